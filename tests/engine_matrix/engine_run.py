"""Engines one after the other, in a separate process: `python -m engine_matrix.engine_run FOLDER MODEL:CASE,...`.

vLLM binds threads to cores, reads its settings from the environment and keeps global state, none of which the calling
process should inherit. Several models may share the process, as importing vLLM takes longer than one of their engines.
Prints `RUN {json}` with the model for each case:

    none         no connector: the reference answers
    device       no connector and no eviction from the device: the answer of a hit of the same length
    cpu          Spillway with the CPU tier
    chunks       the same, two device blocks to a chunk
    nvme         Spillway with a small CPU tier, so that chunks are loaded from files
    nvme-other   the same, in the directory that the `nvme` of its `other_size` has filled: an engine of the same model
                 with another number of ranks
    redis        the same as nvme, from a Valkey
    early        the same as nvme, with reads that wait until a load has begun with part of its chunks
    meet, meet-async
                 the same as nvme, each prompt computed from its front while the tier's end of it is loaded; with
                 synchronous and with asynchronous scheduling
    lossy        loads of zeroes: the answers must differ, or the comparison proves nothing
    failing      every second load fails after overwriting its blocks
    layers       the same as cpu, loads layer by layer under the step that reads them
    layers-failing, layers-refused, layers-lossy
                 the same, with copies that fail, that cannot be submitted, and that are zeroes
    npu, npu-off the NPU transport on the ACL emulator, with batched copies and without

or `REFUSED {json}` with the error when the engine does not start. Scheduler and worker are in this one process (the
workers of several ranks are not), which costs seconds an engine where vLLM's processes cost a minute.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine_matrix.gated_reads import gated_reads
from engine_matrix.greedy import greedy_answers
from engine_matrix.met_loads import met_loads
from engine_matrix.models import VOCABULARY, Model, engine_settings, model
from engine_matrix.valkey_process import running_valkey
from spillway_connector.transfer_config import transfer_config as spillway

PROMPT_BLOCKS = 12
ANSWER_TOKENS = 8
# Lengths of three prompts: inside a block, exactly whole blocks, one token more.
_TAILS = (5, 0, 1)
# What is asked, one after the other: each evicts the one before, and the last two go beyond what was asked before.
_ORDER = ("a", "b", "c", "a", "b", "c", "a", "b+", "c+")
_LATENT_BLOCK_TOKENS = 16
_TORCH_MLA = "ENGINE_MATRIX_TORCH_MLA"  # set for the processes of ranks
_STAGES = "ENGINE_MATRIX_STAGES"  # likewise
_PROMPTS = len(_TAILS) + 1  # as many as fit a device without eviction
# Of a rank. With more, which wait for each other in every operation, such a small model takes twice as long.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def prompts(block_tokens: int) -> dict[str, list[int]]:
    found = {}
    for name, tail in zip("abc", _TAILS, strict=True):
        rng = random.Random(name)
        found[name] = [rng.randrange(3, VOCABULARY) for _ in range(PROMPT_BLOCKS * block_tokens + tail)]
        found[f"{name}+"] = found[name] + [rng.randrange(3, VOCABULARY) for _ in range(2 * block_tokens + 3)]
    return found


def transfer_config(case: str, wanted: Model, folder: Path, redis_url: str = "") -> dict[str, Any] | None:
    """vLLM's kv_transfer_config of a case."""
    if case in ("none", "device"):
        return None
    extra: dict[str, Any] = {"num_cpu_blocks": wanted.cpu_blocks}
    if case == "chunks":
        extra["blocks_per_chunk"] = 2
    if case.startswith("layers"):
        extra["layerwise_loads"] = "on"
    if case in ("lossy", "layers-lossy"):
        extra |= {"spec_name": "LossySpec", "spec_module_path": "engine_matrix.lossy_spec"}
    if case == "layers-refused":
        extra |= {"spec_name": "RefusingSpec", "spec_module_path": "engine_matrix.failing_spec"}
    if case in ("failing", "layers-failing"):
        extra |= {"spec_name": "FailingSpec", "spec_module_path": "engine_matrix.failing_spec"}
    if case.startswith("meet"):
        # A tier from which loads do not pay would get nothing before device and CPU tier are full.
        extra |= {"compute_while_loading": "on", "storing": "eager"}
    if case in ("nvme", "nvme-other", "redis", "early", "meet", "meet-async"):
        directory = f"nvme-{wanted.other_size}" if case == "nvme-other" else f"{case}-{wanted.name}"
        tier: dict[str, Any] = {"type": "nvme", "path": str(folder / directory), "max_bytes": 1 << 30}
        if case == "redis":
            tier = {"type": "redis", "url": redis_url}
        limits = {"lookup_timeout_seconds": 60.0, "load_timeout_seconds": 60.0, "store_timeout_seconds": 60.0}
        limits["store_queue_seconds_max"] = 60.0
        # Loads happen whether they pay or not, and no deadline may pass on a busy machine.
        extra |= {
            "num_cpu_blocks": wanted.small_cpu_blocks,
            "prefill_tokens_per_second": 1e-3,
            "request_wait_seconds": 60.0,
            "secondary_tiers": [tier | limits],
        }
    if case.startswith("npu"):
        from acl_emulator import build as emulator

        extra |= {
            "spec_name": "EmulatedNpuSpec",
            "spec_module_path": "acl_emulator.engine_spec",
            "transport": "npu",
            "acl_library_path": str(emulator.library()),
            "batch_memcpy": "off" if case == "npu-off" else "on",
        }
    return spillway(extra)


def answers(wanted: Model, folder: Path, case: str, tally: Tally, redis_url: str = "") -> dict[str, Any]:
    """Run greedy_answers for a case: tokens of each answer with log-probabilities, and cached tokens of each prompt."""
    on_gpu = wanted.platform == "cuda"
    device_blocks = wanted.device_blocks * (_PROMPTS if case == "device" else 1)
    settings = engine_settings(wanted, folder) | {
        "dtype": "bfloat16" if on_gpu else "float32",
        "num_gpu_blocks_override": device_blocks,
        **({"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 30} if on_gpu else {}),
        "seed": 0,
        "kv_transfer_config": transfer_config(case, wanted, folder, redis_url),
        **wanted.engine,
    }
    if case.startswith("meet"):
        settings["async_scheduling"] = case == "meet-async"
    if wanted.torch_mla and _has_latent_attention():
        # Its blocks are of 16 tokens whatever is asked for, and no length may exceed what the device holds.
        settings["max_model_len"] = (wanted.device_blocks - 1) * _LATENT_BLOCK_TOKENS

    def asked(block_tokens: int) -> Iterator[list[int]]:
        by_name = prompts(block_tokens)
        for name in _ORDER:
            yield by_name[name]
            tally.await_stores()

    return greedy_answers(settings, asked, ANSWER_TOKENS)


class Tally:
    """Counts of what the scheduler's half receives and reports, of all ranks and tiers, since `take`."""

    def __init__(self) -> None:
        from spillway_connector.engine.generation import generation
        from spillway_connector.transfer.shared_tier import SharedTier

        room = f"spillway_connector.engine.{generation().value}"
        half_class: Any = importlib.import_module(f"{room}.scheduler").SpillwayConnectorScheduler
        self._tiers: list[SharedTier] = []
        self._counts = dict.fromkeys(("loads", "failed_loads", "step_loads", "failed_step_loads"), 0)
        update, open_tier = half_class.update_connector_output, SharedTier.__init__

        def collect(half: Any, output: Any) -> None:
            meta = output.kv_connector_worker_meta
            for job_id in meta.completed_jobs if meta is not None else ():
                job = half._jobs.get(job_id)  # none of a late store's
                if job is not None and not job.is_store:
                    self._counts["loads"] += 1
                    self._counts["failed_loads"] += job_id in meta.failed_jobs
            update(half, output)

        def remember(tier: SharedTier, *arguments: Any, **options: Any) -> None:
            open_tier(tier, *arguments, **options)
            self._tiers.append(tier)

        half_class.update_connector_output = collect
        self._count_step_loads()
        SharedTier.__init__ = remember  # type: ignore[method-assign]

    def await_stores(self) -> None:
        """Wait until the tiers have ended what they were given. Rows that they read cannot be freed: on a disk that is
        slow enough, two prompts would fill so small a CPU tier for as long as the engine runs, and the third have no
        row."""
        assert all(tier.drain(120.0) for tier in self._tiers)

    def _count_step_loads(self) -> None:
        from spillway_connector.engine.scheduler.step_loads import StepLoadingHalf

        update = StepLoadingHalf.update_connector_output

        def collect(half: Any, output: Any) -> None:
            meta = output.kv_connector_worker_meta
            if meta is not None:
                self._counts["step_loads"] += len(meta.completed_jobs.keys() & half._step_loads.keys())
                self._counts["failed_step_loads"] += len(meta.failed_jobs & half._step_loads.keys())
            update(half, output)

        StepLoadingHalf.update_connector_output = collect  # type: ignore[method-assign]

    def take(self) -> dict[str, float]:
        counts = {**self._counts, "tier_read_bytes": sum(tier.counters.read_bytes for tier in self._tiers)}
        self._counts = dict.fromkeys(self._counts, 0)
        self._tiers.clear()
        return counts


def _emulator_calls() -> dict[str, int]:
    """Count the calls of the emulator since the last engine on it; the emulator is this process's."""
    from acl_emulator import build as emulator
    from acl_emulator.control import Emulator

    npu = Emulator(emulator.library())
    live = npu.live()
    found = {
        "batch_calls": npu.calls("aclrtMemcpyBatchAsync"),
        "single_calls": npu.calls("aclrtMemcpyAsync"),
        "unpinned_copies": sum("Memcpy" in line and "pinned=0" in line for line in npu.log()),
        "left_open": live.streams + live.events + live.host_registrations,
    }
    npu.reset()
    return found


def main(arguments: list[str]) -> None:
    folder, wanted = Path(arguments[0]), [parse(word) for word in arguments[1:]]
    prepare([chosen for chosen, _ in wanted])
    tally = Tally()
    for chosen, cases in wanted:
        for case in cases:
            run_case(chosen, folder, case, tally)


def parse(word: str) -> tuple[Model, list[str]]:
    """`llama:none,cpu`. Raises KeyError for an unknown model."""
    name, _, cases = word.partition(":")
    return model(name), cases.split(",")


def prepare(wanted: list[Model]) -> None:
    """Set the environment that vLLM reads when it is imported, and what the models replace in it. Raises ValueError if
    they replace different things."""
    first = wanted[0]
    for other in wanted:
        if _process_needs(other) != _process_needs(first):
            raise ValueError(f"{first.name} and {other.name} need separate processes: other parts of vLLM are replaced")
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        HF_HUB_OFFLINE="1",
        PYTHONHASHSEED="0",
        **({"VLLM_USE_FLASHINFER_SAMPLER": "0"} if first.platform == "cuda" else {"TORCH_COMPILE_DISABLE": "1"}),
        **ONE_THREAD,
    )
    if first.torch_mla:
        os.environ[_TORCH_MLA] = "1"
        _install_torch_mla()
    if first.cpu_experts:
        from engine_matrix import cpu_experts

        cpu_experts.install()
    if any(chosen.engine.get("pipeline_parallel_size", 1) > 1 for chosen in wanted):
        os.environ[_STAGES] = "1"
    if first.platform == "cpu":
        fork_ranks()


def fork_ranks() -> None:
    """Have the ranks of all engines fork from one process that has imported vLLM, which takes longer than their work.

    vLLM starts each on a CPU as a new interpreter. The process that they fork from has computed nothing, so it has no
    threads.
    """
    from vllm.v1.executor import multiproc_executor

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vllm.v1.worker.cpu_worker", "spillway_connector.engine.connector"])
    multiproc_executor.get_mp_context = lambda: context


def _process_needs(wanted: Model) -> tuple[object, ...]:
    return wanted.platform, wanted.torch_mla, wanted.cpu_experts


def _has_latent_attention() -> bool:
    """Whether this vLLM has kernels of its own for it on a CPU."""
    from spillway_connector.engine.generation import Generation, generation

    return generation() is not Generation.V023


def _install_torch_mla() -> None:
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    # vLLM's CPU kernel takes the rows of all tokens for one after another; here they are parts of longer ones, and an
    # answer would depend on how many tokens a step computes.
    RotaryEmbedding.forward_cpu = RotaryEmbedding.forward_native
    if not _has_latent_attention():
        from engine_matrix import torch_mla

        torch_mla.install()


def _give_stages_room() -> None:
    """Make room for what the stage before passes on. vLLM 0.32's CPU worker makes it in a profiling run, which an
    eager engine does not have; 0.23's always has it."""
    from vllm.distributed import get_pp_group
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    initialize = CPUModelRunner.initialize_kv_cache

    def initialize_kv_cache(runner: Any, *arguments: Any, **options: Any) -> None:
        initialize(runner, *arguments, **options)
        if runner.intermediate_tensors is None and not get_pp_group().is_first_rank:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )

    CPUModelRunner.initialize_kv_cache = initialize_kv_cache


def run_case(wanted: Model, folder: Path, case: str, tally: Tally) -> None:
    run_of = {"model": wanted.name, "case": case}
    began = time.monotonic()
    try:
        if case == "redis":
            with running_valkey(folder) as url:
                run = answers(wanted, folder, case, tally, url)
        elif case == "early":
            with gated_reads() as early_parts:
                run = answers(wanted, folder, case, tally)
            run["early_parts"] = early_parts()
        elif case.startswith("meet"):
            with met_loads() as jumps:
                run = answers(wanted, folder, case, tally)
            run["jumps"] = jumps()
        else:
            run = answers(wanted, folder, case, tally)
        run |= tally.take() | (_emulator_calls() if case.startswith("npu") else {})
        run["seconds"] = round(time.monotonic() - began, 1)
    except Exception as error:
        cause = error.__cause__ or error
        print("REFUSED " + json.dumps(run_of | {"error": f"{type(cause).__name__}: {cause}"}), flush=True)
        raise
    print("RUN " + json.dumps(run_of | run), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
else:  # in the process of a rank, which vLLM spawns: it imports this module again
    if os.environ.get(_TORCH_MLA):
        _install_torch_mla()
    if os.environ.get(_STAGES):
        _give_stages_room()
