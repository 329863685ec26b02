"""The budget of memory: from settings, model shape and machine to bytes, block counts, warnings and refusals. Pure
arithmetic.

KV bytes per token are those of `model_shape.py`, a row of the CPU tier that of the connector's `plan/geometry.py`. The
chart computes the same in templates/_memory.tpl before anything is scheduled; tests/chart/test_template_arithmetic.py
renders generated cases and compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from spillway_connector.plan.geometry import ChunkGeometry
from spillway_connector.plan.kv_groups import KvGroup, held_tokens, stored_chunks, whole_chunk_tokens, whole_groups
from spillway_connector.tiers.disk.slab.layout import copies_bytes
from spillway_engine.argument_memory import argument_memory
from spillway_engine.machine import Machine
from spillway_engine.model_shape import DTYPE_BYTES, ModelShape
from spillway_engine.platform_facts import least_device_blocks, memory_contradictions
from spillway_engine.settings import EngineSettings
from spillway_settings.byte_sizes import format_byte_count

# vLLM's own message queues, mapped lazily: 10 x 16 MiB plus 10 x 24 MiB per worker; about a tenth is ever touched.
SHM_QUEUE_BYTES_PER_RANK = 40 << 20
# What the three Python processes of one engine hold beyond weights and KV: 2.2 GiB measured on the CPU build.
PROCESS_BYTES = 2_300 << 20
# A CPU engine without deviceBlocks gets room for this many longest prompts, memory permitting.
DEFAULT_LONGEST_PROMPTS = 4


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Every figure of one engine's memory, and what is wrong with it."""

    dtype: str
    kv_dtype: str  # of the KV cache's elements
    bytes_per_token: int  # of a replica: what each further token of a prompt adds to a load
    bytes_per_block: int  # of the device's blocks of all KV groups
    kv_groups: int  # a block of tokens takes one device block in each, and one row of the CPU tier if it is stored
    data_parallel_ranks: int
    device_blocks: int | None  # of each data parallel rank; None: the engine sizes its own device cache
    device_tokens: int | None  # None as for device_blocks
    device_bytes: int | None
    cpu_chunks: int  # rows, of each data parallel rank
    cpu_row_bytes: int
    cpu_tier_bytes: int  # of all data parallel ranks
    cpu_tier_tokens: int  # of each data parallel rank
    shared_memory_needed_bytes: int
    shared_memory_free_bytes: int
    node_tier_bytes: int  # rows that the node's engines share, which count in no engine's memory; 0: there are none
    node_tier_chunks: int
    tier_index_bytes: int  # of all data parallel ranks: their copies of the index of a shared tier in slabs
    memory_needed_bytes: int
    memory_available_bytes: int
    memory_limit_source: str
    problems: tuple[str, ...]  # any: refuse to start
    warnings: tuple[str, ...]
    block_tokens: int = 0  # of a block of full attention: what vLLM makes of blockSize for this model

    @property
    def fits(self) -> bool:
        return not self.problems

    def report(self) -> dict[str, Any]:
        return {**asdict(self), "problems": list(self.problems), "warnings": list(self.warnings), "fits": self.fits}


def choose_dtype(settings: EngineSettings, shape: ModelShape, machine: Machine) -> str:
    """`auto` on a CPU is bfloat16 only if the core multiplies it natively: elsewhere it is 3.6 to 4.7 times slower
    than float32 (measured, AVX2)."""
    if settings.model.dtype != "auto":
        return settings.model.dtype
    if machine.platform == "cpu":
        native = machine.cpu_flags & {"avx512_bf16", "amx_bf16", "bf16"}
        return "bfloat16" if native else "float32"
    return shape.dtype if shape.dtype in ("bfloat16", "float16") else "bfloat16"


def plan_memory(settings: EngineSettings, shape: ModelShape, machine: Machine) -> MemoryBudget:
    """The whole arithmetic. Never raises: what does not fit is in `problems`, each with the value that would.

    All of it is this pod's. Every data parallel rank has a device cache, a CPU tier, weights, queues and processes of
    its own.
    """
    cores, ranks_here = settings.cores_here, settings.ranks_here
    dtype = choose_dtype(settings, shape, machine)
    kv_dtype = dtype if settings.model.kv_cache_dtype == "auto" else settings.model.kv_cache_dtype
    ranks, stages = settings.ranks, settings.pipeline_parallel_size
    split = settings.tensor_parallel_size, stages
    block_tokens = shape.block_tokens(kv_dtype, settings.tensor_parallel_size, settings.block_size)
    groups = shape.groups(block_tokens, settings.offload.blocks_per_chunk)
    chunk_tokens = whole_chunk_tokens(groups)
    longest_tokens = -(-settings.model.max_length // chunk_tokens) * chunk_tokens
    counted = {"every_window": settings.offload.window_chunks == "all", "drafts": shape.speculates}
    longest_rows = sum(stored_chunks(groups, longest_tokens, **counted))
    block_of_rank_bytes = shape.block_bytes_of_rank(kv_dtype, *split, settings.block_size)
    block_of_ranks_bytes = block_of_rank_bytes * ranks_here  # on the devices of this pod
    device_blocks = _device_blocks(settings, machine, block_of_ranks_bytes, len(groups))
    offload = settings.offload
    geometry = ChunkGeometry(
        shape.row_block_bytes_of_rank(kv_dtype, *split, settings.block_size),
        offload.blocks_per_chunk,
        ranks,
        shape.ranks_hold_the_same,
        stages=stages,
    )
    row_bytes = geometry.row_bytes
    chunks = _cpu_chunks(settings, row_bytes)
    tier_bytes = chunks * row_bytes * cores
    node = offload.node_tier if offload.enabled else None
    node_bytes = int(node.bytes) if node is not None else 0
    node_chunks = node_bytes // row_bytes
    tier_tokens = held_tokens(groups, chunks, settings.model.max_length, **counted)
    on_cpu = machine.platform == "cpu"
    device_bytes = device_blocks * block_of_ranks_bytes * cores if device_blocks is not None else None
    weight_bytes = shape.weight_bytes
    # Quantised weights stay as the files have them, or become smaller.
    if settings.model.quantization is None and not shape.quantized:
        weight_bytes = weight_bytes * DTYPE_BYTES[dtype] // DTYPE_BYTES.get(shape.dtype, 2)
    weight_bytes = weight_bytes * ranks_here // ranks
    asked = argument_memory(
        settings.extra_args, on_cpu=on_cpu, ranks=ranks_here, cores=cores, weight_bytes=weight_bytes
    )
    queue_bytes = SHM_QUEUE_BYTES_PER_RANK * (1 + ranks_here) * cores + asked.shared_bytes
    shared_bytes = tier_bytes + queue_bytes
    index_bytes = _index_bytes(settings, row_bytes) * cores
    memory_bytes = PROCESS_BYTES * ranks_here * cores + shared_bytes + asked.process_bytes + index_bytes
    memory_bytes += page_table_bytes(node_bytes, ranks_here, cores)
    if on_cpu:
        memory_bytes += (device_bytes or 0) + weight_bytes * cores
    names = settings.names
    return MemoryBudget(
        dtype=dtype,
        kv_dtype=kv_dtype,
        bytes_per_token=whole_groups(groups) * geometry.payload_bytes // chunk_tokens,
        bytes_per_block=shape.bytes_per_block(kv_dtype, *split, settings.block_size),
        kv_groups=len(groups),
        data_parallel_ranks=cores,
        device_blocks=device_blocks,
        device_tokens=device_blocks // len(groups) * block_tokens if device_blocks is not None else None,
        device_bytes=device_bytes,
        cpu_chunks=chunks,
        cpu_row_bytes=row_bytes,
        cpu_tier_bytes=tier_bytes,
        cpu_tier_tokens=tier_tokens,
        shared_memory_needed_bytes=shared_bytes,
        shared_memory_free_bytes=machine.shared_memory_free_bytes,
        node_tier_bytes=node_bytes,
        node_tier_chunks=node_chunks,
        tier_index_bytes=index_bytes,
        memory_needed_bytes=memory_bytes,
        memory_available_bytes=machine.memory_available_bytes,
        memory_limit_source=machine.memory_limit_source,
        problems=tuple(
            [
                *(each.sentence(names) for each in memory_contradictions(settings, shape, row_bytes, names)),
                *_shared_memory_problems(settings, machine, chunks, row_bytes, queue_bytes),
                *_node_tier_problems(settings, row_bytes),
                *_memory_problems(settings, machine, row_bytes, tier_bytes, memory_bytes),
            ]
        ),
        warnings=tuple(
            _warnings(settings, groups, node_chunks or chunks, longest_rows, row_bytes, drafts=shape.speculates)
        ),
        block_tokens=block_tokens,
    )


def _device_blocks(settings: EngineSettings, machine: Machine, block_bytes: int, groups: int) -> int | None:
    if settings.device_blocks is not None or machine.platform != "cpu":
        return settings.device_blocks
    # vLLM's CPU default is 92 % of all memory; an engine that shares its machine wants a stated number.
    wanted = DEFAULT_LONGEST_PROMPTS * -(-settings.model.max_length // settings.block_size) * groups + 1
    affordable = machine.memory_available_bytes // 4 // (block_bytes * settings.cores_here)
    return max(least_device_blocks(settings), min(wanted, affordable))


def _cpu_chunks(settings: EngineSettings, row_bytes: int) -> int:
    offload = settings.offload
    if not offload.enabled or not _has_own_tier(settings):
        return 0
    if offload.num_cpu_blocks is not None:
        return offload.num_cpu_blocks
    return (offload.cpu_bytes_to_use or 0) // row_bytes


def _has_own_tier(settings: EngineSettings) -> bool:
    """Whether this engine may have to have a CPU tier of its own."""
    node = settings.offload.node_tier
    return node is None or node.fallback == "private"


def page_table_bytes(node_bytes: int, ranks: int, cores: int) -> int:
    """Return the bytes of page tables that an engine's processes have for a node's tier: 8 for each page of 4 KiB, in
    the scheduler's process and in each rank's."""
    return node_bytes // 512 * (ranks + 1) * cores


def _node_tier_problems(settings: EngineSettings, row_bytes: int) -> list[str]:
    node = settings.offload.node_tier
    if not settings.offload.enabled or node is None or node.bytes >= row_bytes:
        return []
    names = settings.names
    return [
        f"{names.given('offload.nodeTier.bytes', format_byte_count(node.bytes))} holds no chunk of "
        f"{format_byte_count(row_bytes)}; set it to {row_bytes} or more, or lower "
        f"{names.name('offload.blocksPerChunk')}"
    ]


def _index_bytes(settings: EngineSettings, row_bytes: int) -> int:
    """0 without slabs, and if only the file system bounds them, because its size is not known here."""
    tier = settings.offload.shared_tier
    if not settings.offload.enabled or "nvme" not in tier.types or tier.nvme.mode == "files" or not tier.nvme.max_bytes:
        return 0
    return copies_bytes(row_bytes, tier.nvme.max_bytes)


def _shared_memory_problems(
    settings: EngineSettings, machine: Machine, chunks: int, row_bytes: int, queue_bytes: int
) -> list[str]:
    if not settings.offload.enabled:
        return []
    names = settings.names
    given = names.given(*_tier_setting(settings))
    if chunks == 0 and _has_own_tier(settings):
        return [
            f"{given} holds no chunk of {format_byte_count(row_bytes)}; set {names.name('offload.cpuBytes')} >= "
            f"{row_bytes} or lower {names.name('offload.blocksPerChunk')}"
        ]
    free_bytes = machine.shared_memory_free_bytes
    cores = settings.cores_here
    needed_bytes = chunks * row_bytes * cores + queue_bytes
    if needed_bytes <= free_bytes:
        return []
    fitting = max(0, (free_bytes - queue_bytes) // (row_bytes * cores))
    remedy = (
        f"set {_fitting_setting(settings, fitting, row_bytes)} or enlarge /dev/shm" if fitting else "enlarge /dev/shm"
    )
    return [
        f"{given} needs {format_byte_count(needed_bytes)} of /dev/shm{_for_ranks(settings)}, "
        f"{format_byte_count(free_bytes)} is free; {remedy}"
    ]


def _memory_problems(
    settings: EngineSettings, machine: Machine, row_bytes: int, tier_bytes: int, needed_bytes: int
) -> list[str]:
    available_bytes = machine.memory_available_bytes
    if needed_bytes <= available_bytes:
        return []
    names = settings.names
    short = (
        f"this engine needs {format_byte_count(needed_bytes)} of memory{_for_ranks(settings)}, "
        f"{format_byte_count(available_bytes)} is available ({machine.memory_limit_source})"
    )
    fitting = (available_bytes - (needed_bytes - tier_bytes)) // (row_bytes * settings.cores_here)
    if tier_bytes and fitting > 0:
        return [
            f"{names.name(_tier_setting(settings)[0])}: {short}; set {_fitting_setting(settings, fitting, row_bytes)}"
        ]
    remedy = "give it more memory"
    if machine.platform == "cpu":
        remedy = f"lower {names.name('deviceBlocks')} or {names.name('model.maxLength')}, or {remedy}"
    return [f"{short}; {remedy}"]


def _for_ranks(settings: EngineSettings) -> str:
    ranks = settings.data_parallel_size
    return f" for {settings.names.given('dataParallelSize', ranks)}" if ranks > 1 else ""


def _tier_setting(settings: EngineSettings) -> tuple[str, str]:
    if settings.offload.num_cpu_blocks is not None:
        return "offload.numCpuBlocks", str(settings.offload.num_cpu_blocks)
    return "offload.cpuBytes", format_byte_count(settings.offload.cpu_bytes_to_use or 0)


def _fitting_setting(settings: EngineSettings, chunks: int, row_bytes: int) -> str:
    if settings.offload.num_cpu_blocks is not None:
        return f"{settings.names.name('offload.numCpuBlocks')} <= {chunks}"
    return f"{settings.names.name('offload.cpuBytes')} <= {chunks * row_bytes}"


def _warnings(
    settings: EngineSettings, groups: Sequence[KvGroup], chunks: int, longest_rows: int, row_bytes: int, *, drafts: bool
) -> list[str]:
    if not settings.offload.enabled or chunks >= longest_rows:
        return []
    every_window = settings.offload.window_chunks == "all"
    tier_tokens = held_tokens(groups, chunks, settings.model.max_length, every_window=every_window, drafts=drafts)
    needed, setting = longest_rows, "offload.numCpuBlocks"
    if settings.offload.node_tier is not None:
        needed, setting = longest_rows * row_bytes, "offload.nodeTier.bytes"
    rows = f"{chunks} chunks of {whole_chunk_tokens(groups)}" if len(groups) == 1 else f"{chunks} rows"
    return [
        f"the CPU tier holds {tier_tokens:,} tokens ({rows}), one longest prompt has "
        f"{settings.model.max_length:,}; a prefix longer than the tier is recomputed: "
        f"set {settings.names.name(setting)} >= {needed}"
    ]
