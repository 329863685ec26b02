"""Memory of an engine's pod: the engine service's arithmetic, and on top of it the pod's own share. Pure.

The chart computes the same in templates/_memory.tpl while it renders; tests/chart/test_checked_values.py compares.
"""

from __future__ import annotations

import msgspec

from spillway_connector.plan.geometry import ChunkGeometry
from spillway_connector.tiers.disk.slab.layout import copies_bytes
from spillway_ctl.check.finding import Finding, bytes_text, quantity, size
from spillway_ctl.check.model_facts import ModelFacts
from spillway_engine.argument_memory import argument_memory
from spillway_engine.memory_budget import (
    DEFAULT_LONGEST_PROMPTS,
    PROCESS_BYTES,
    SHM_QUEUE_BYTES_PER_RANK,
    page_table_bytes,
)
from spillway_engine.model_shape import DTYPE_BYTES
from spillway_settings.shared_names import PROCESS_PER_RANK
from spillway_settings.values.engine import Engine, ranks_of_pod
from spillway_settings.values.offload import tier_types

_QUEUES_MAPPED_BYTES, _QUEUES_MAPPED_BYTES_PER_RANK = 160 << 20, 240 << 20
_COMPUTED_BYTES_MAX = 8 << 50  # what the chart's sums hold in 64 bits


class PodMemory(msgspec.Struct, frozen=True):
    """Figures of one pod, in bytes except for chunk_tokens."""

    row: int  # of the CPU tier: one chunk of one KV group over all ranks
    tier: int  # the CPU tier of all data parallel ranks
    chunk_tokens: int
    needed: int
    limit: int
    shared_memory: int


def pod_memory(engine: Engine, path: str, platform: str, model: ModelFacts) -> tuple[PodMemory, list[Finding]]:
    """Return the figures, and each setting that does not fit them, with a value that does."""
    shape, memory, offload = model.shape, engine.memory, engine.offload
    on_cpu = platform == "cpu"
    found: list[Finding] = []
    dtype, kv_dtype = _dtypes(engine, shape.dtype, on_cpu)
    stages = engine.pipeline_parallel_size
    ranks = engine.tensor_parallel_size * stages
    # A core that spans pods has these ranks, and their share of its weights, in this pod.
    cores, ranks_here = ranks_of_pod(engine.data_parallel_size, ranks, engine.nodes_per_replica)
    tensor_ranks = engine.tensor_parallel_size
    block_of_rank = shape.block_bytes_of_rank(kv_dtype, tensor_ranks, stages, engine.block_size)
    row_block = shape.row_block_bytes_of_rank(kv_dtype, tensor_ranks, stages, engine.block_size)
    row = ChunkGeometry(row_block, offload.blocks_per_chunk, ranks, shape.ranks_hold_the_same, stages=stages).row_bytes
    device_blocks = _device_blocks(engine, on_cpu, shape.kv_groups)
    device = device_blocks * block_of_rank * ranks_here * cores if on_cpu else 0
    weights = shape.weight_bytes
    # Quantised weights stay as the files have them, or become smaller.
    if not (engine.model.quantization or shape.quantized):
        weights = weights * DTYPE_BYTES[dtype] // DTYPE_BYTES.get(shape.dtype, 2)
    weights = weights * ranks_here // ranks
    asked = argument_memory(engine.extra_args, on_cpu=on_cpu, ranks=ranks_here, cores=cores, weight_bytes=weights)
    chunks, tier_key = _chunks(engine, path, row, found)
    tier = chunks * row * cores
    times = f"{cores} ranks x " if cores > 1 else ""
    queues = SHM_QUEUE_BYTES_PER_RANK * (1 + ranks_here) * cores + asked.shared_bytes
    shared_needed = tier + queues
    mapped = cores * (_QUEUES_MAPPED_BYTES + _QUEUES_MAPPED_BYTES_PER_RANK * ranks_here) + asked.shared_bytes
    shared = (tier + mapped) * 110 // 100
    in_tier = f"{bytes_text(tier)} ({times}{chunks} chunks x {bytes_text(row)})"
    if memory.shared_memory is not None:
        shared = size(memory.shared_memory)
        if shared < shared_needed and not memory.force:
            fits = _tier_fitting(tier_key, row, (shared - queues) // cores)
            found.append(
                Finding(
                    f"{path}.memory.sharedMemory",
                    f"{bytes_text(shared)} cannot hold the CPU tier of {in_tier} and queues of {bytes_text(queues)}",
                    f"set it to {quantity(shared_needed)} or more, null to have it computed{fits}",
                )
            )
    index = _index(engine, row) * cores
    tables = page_table_bytes(node_tier_bytes(engine), ranks_here, cores)
    weights_held = weights * cores if on_cpu else 0
    engine_needs = (
        PROCESS_BYTES * ranks_here * cores + shared_needed + device + weights_held + asked.process_bytes + index
    )
    engine_needs += tables
    process_text = memory.process_per_rank
    if process_text is None:
        process_text = PROCESS_PER_RANK["onCpu" if on_cpu else "onDevice"]
    processes = ranks_here * cores * size(process_text)
    staging = _staging(engine, row, cores)
    total = shared_needed + processes + device + weights_held + staging + asked.process_bytes + index + tables
    needed = max(engine_needs, total * (100 + memory.margin_percent) // 100)
    limit = needed
    if memory.limit is not None:
        limit = size(memory.limit)
        if memory.shared_memory is not None and shared > limit and not memory.force:
            found.append(
                Finding(
                    f"{path}.memory.sharedMemory",
                    f"{bytes_text(shared)} is more than memory.limit: {bytes_text(limit)}, which it counts against",
                    "lower the first or raise the second",
                )
            )
        if limit < needed and not memory.force:
            number_of_ranks = "1 rank" if ranks_here * cores == 1 else f"{ranks_here * cores} ranks"
            parts = [
                f"CPU tier {in_tier}",
                f"queues {bytes_text(queues)}",
                f"processes {bytes_text(processes)} ({number_of_ranks})",
            ]
            if on_cpu:
                parts += [f"device blocks {bytes_text(device)}", f"weights {bytes_text(weights_held)}"]
            parts += [f"shared tier's buffers {bytes_text(staging)}"] if staging else []
            parts += [f"its index {bytes_text(index)}"] if index else []
            parts += [f"extraArgs {bytes_text(asked.process_bytes)}"] if asked.process_bytes else []
            parts += [f"page tables of the node's tier {bytes_text(tables)}"] if tables else []
            arithmetic = f"{' + '.join(parts)} + {memory.margin_percent} % margin = {bytes_text(needed)}"
            rest = limit * 100 // (100 + memory.margin_percent) - (total - tier)
            found.append(
                Finding(
                    f"{path}.memory.limit",
                    f"{bytes_text(limit)} is too little: {arithmetic}",
                    f"set memory.limit >= {quantity(needed)}, null to have it computed"
                    f"{_tier_fitting(tier_key, row, rest // cores)}",
                )
            )
    chunk_tokens = shape.block_tokens(kv_dtype, tensor_ranks, engine.block_size) * offload.blocks_per_chunk
    return PodMemory(row, tier, chunk_tokens, needed, limit, shared), found


def _dtypes(engine: Engine, checkpoint: str, on_cpu: bool) -> tuple[str, str]:
    """The dtypes of the weights and of the KV cache."""
    dtype = str(engine.model.dtype)
    if dtype == "auto":
        # A CPU engine takes bfloat16 if the core has it: reckon with the larger.
        dtype = "float32" if on_cpu else checkpoint if checkpoint in ("bfloat16", "float16") else "bfloat16"
    kv_dtype = str(engine.model.kv_cache_dtype)
    return dtype, dtype if kv_dtype == "auto" else kv_dtype


def _device_blocks(engine: Engine, on_cpu: bool, groups: int) -> int:
    """Count the blocks of the engine's device cache; 0 if the engine sizes the cache itself."""
    if engine.device_blocks is not None:
        return engine.device_blocks
    longest = -(-engine.model.max_length // engine.block_size)
    return 1 + DEFAULT_LONGEST_PROMPTS * longest * groups if on_cpu else 0


def _chunks(engine: Engine, path: str, row: int, found: list[Finding]) -> tuple[int, str]:
    """Rows of the CPU tier of one data parallel rank, and the setting that says how many."""
    offload = engine.offload
    if not offload.enabled or (offload.node_tier.enabled and offload.node_tier.fallback == "refuse"):
        return 0, "offload.numCpuBlocks"
    if offload.num_cpu_blocks:
        most = _COMPUTED_BYTES_MAX // row
        if offload.num_cpu_blocks <= most:
            return offload.num_cpu_blocks, "offload.numCpuBlocks"
        found.append(
            Finding(
                f"{path}.offload.numCpuBlocks",
                f"{offload.num_cpu_blocks} chunks of {bytes_text(row)} are more than 8 PiB",
                f"set it to what the host memory holds, {most} or less",
            )
        )
        return 1, "offload.numCpuBlocks"
    if offload.cpu_bytes is None:
        return 0, "offload.numCpuBlocks"
    given = size(offload.cpu_bytes)
    if given < row:
        tokens = engine.block_size * offload.blocks_per_chunk
        found.append(
            Finding(
                f"{path}.offload.cpuBytes",
                f"{bytes_text(given)} holds no chunk of {bytes_text(row)} ({tokens} tokens x {row // tokens} B)",
                f"set it to {row} or more, or lower blocksPerChunk",
            )
        )
    return given // row, "offload.cpuBytes"


def _tier_fitting(key: str, row: int, free: int) -> str:
    """The largest tier that fits into this number of bytes, as a part of a remedy; empty if none does."""
    chunks = free // row
    if chunks < 1:
        return ""
    return f", or {key} <= {chunks * row if key == 'offload.cpuBytes' else chunks}"


def _index(engine: Engine, row: int) -> int:
    """Return the bytes that an engine core's copies of the slabs' index take, if the values bound the tier."""
    tier = engine.offload.shared_tier
    if not engine.offload.enabled or "nvme" not in tier_types(tier) or tier.nvme.mode == "files":
        return 0
    most = nvme_max_bytes(engine)
    return copies_bytes(row, most) if most else 0


def _staging(engine: Engine, row: int, cores: int) -> int:
    tier = engine.offload.shared_tier
    if not engine.offload.enabled or tier.type == "none":
        return 0
    # Each thread: a chunk in flight, one on its way to or from the store, and a sealed one.
    buffers = tier.io_threads * (3 if tier.encryption.enabled else 2) * row * cores
    if tier.below.type != "none":  # and half as many threads copy what is idle
        buffers += tier.below.io_threads * (4 if tier.encryption.enabled else 3) * row * cores
    return buffers + (size(engine.memory.page_cache) if "nvme" in tier_types(tier) else 0)


def node_tier_bytes(engine: Engine) -> int:
    """Rows of one size that the engines of a node share, which are memory of the DaemonSet; 0: there are none."""
    offload = engine.offload
    return size(offload.node_tier.bytes) if offload.enabled and offload.node_tier.enabled else 0


def nvme_max_bytes(engine: Engine) -> int | None:
    """Return the bytes that all engines may store in the folder: nine tenths of a volume, as kubelet counts more."""
    nvme = engine.offload.shared_tier.nvme
    if nvme.max_bytes is not None:
        return size(nvme.max_bytes)
    if nvme.volume.type in ("emptyDir", "perPodClaim", "sharedClaim"):
        return size(nvme.volume.size) * 9 // 10
    return None
