"""The scheduler's process on this vLLM, whichever generation it is of, on the part of vLLM's objects that it reads.

Tests of what the generations share use these names, and so run on each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

from vllm.config import ParallelConfig, SchedulerConfig, VllmConfig
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

from spillway_connector.config import ConnectorConfig
from spillway_connector.engine.cpu_tier.tier import CpuTier
from spillway_connector.engine.generation import Generation, generation
from spillway_connector.engine.manager.tiering import TieringManager
from spillway_connector.engine.patches.patching import Needed, apply

__all__ = [
    "RequestState",
    "SharedTierAdapter",
    "SpillwayConnectorScheduler",
    "SpillwayTieringManager",
    "StepLoadingScheduler",
    "make_scheduler_control",
    "patch_vllm",
]

match generation():
    case Generation.V023:
        from spillway_connector.engine.patches.vllm_patches import V023 as PATCHES
        from spillway_connector.engine.v023.cpu_tier import ArcCpuTier, LruCpuTier, NodeCpuTier
        from spillway_connector.engine.v023.scheduler import (
            RequestState,
            SpillwayConnectorScheduler,
            StepLoadingScheduler,
        )
        from spillway_connector.engine.v023.scheduler_control import SchedulerControlV023 as make_scheduler_control
        from spillway_connector.engine.v023.tier_adapter import SharedTierAdapter
        from spillway_connector.engine.v023.tiering import SpillwayTieringManager

        HIT, PENDING, RETRY, MISS = True, None, None, False
        STEP_END: tuple[Any, ...] = ()  # arguments of a manager's and a tier's on_schedule_end
    case Generation.V030:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading import config as offloading_config
        from vllm.v1.kv_offload.base import LookupResult, ScheduleEndContext

        from spillway_connector.engine.patches.vllm_patches import V030 as PATCHES  # type: ignore[no-redef]
        from spillway_connector.engine.v030.cpu_tier import ArcCpuTier, LruCpuTier, NodeCpuTier  # type: ignore[no-redef]
        from spillway_connector.engine.v030.scheduler import (  # type: ignore[no-redef]
            RequestState,
            SpillwayConnectorScheduler,
            StepLoadingScheduler,
        )
        from spillway_connector.engine.v030.scheduler_control import (  # type: ignore[no-redef]
            SchedulerControlV030 as make_scheduler_control,
        )
        from spillway_connector.engine.v030.tier_adapter import SharedTierAdapter  # type: ignore[no-redef]
        from spillway_connector.engine.v030.tiering import SpillwayTieringManager  # type: ignore[no-redef]

        HIT, PENDING, RETRY, MISS = (
            LookupResult.HIT,
            LookupResult.HIT_PENDING,
            LookupResult.RETRY,
            LookupResult.MISS,
        )
        STEP_END = (ScheduleEndContext(new_req_ids=(), preempted_req_ids=()),)


def make_cpu_tier(num_rows: int, region: Any, policy: str, enable_events: bool) -> CpuTier:
    """Make the CPU tier of one engine over a HostRegion. policy: "lru" or "arc"."""
    kind = LruCpuTier if policy == "lru" else ArcCpuTier
    return kind(num_rows, region, enable_events=enable_events)


def make_node_tier(
    region: Any,
    namespace: bytes,
    enable_events: bool,
    floor_share: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
) -> CpuTier:
    """Join the CPU tier of a node, which is a NodeRegion. Raises HostMemoryError."""
    return NodeCpuTier(region, namespace, floor_share=floor_share, enable_events=enable_events, clock=clock)


def _window_chunks(group: KVCacheSpec, chunk_tokens: int) -> int | None:
    """Return the value that vLLM's OffloadingConfig has since 0.33; None for older versions, which do not read it."""
    count = getattr(offloading_config, "get_sliding_window_size_in_chunks", None)
    return None if count is None else count(group, chunk_tokens)


def patch_vllm(*names: str) -> None:
    """Put patches of this vLLM in force, for tests of what they do.

    Args:
        names: The names of the patches, as `spillway doctor` shows them.
    """
    wanted = [patch for patch in PATCHES if patch.name in names]
    assert len(wanted) == len(names), names
    apply(wanted, Needed)


@cache  # most tests make a half, and none changes its configuration
def _vllm_config(num_ranks: int, retention_interval: int | None) -> VllmConfig:
    config = VllmConfig(
        parallel_config=ParallelConfig(tensor_parallel_size=num_ranks, distributed_executor_backend="mp"),
        scheduler_config=SchedulerConfig.default_factory(max_num_batched_tokens=8192),
    )
    config.cache_config.prefix_cache_retention_interval = retention_interval  # type: ignore[attr-defined]
    return config


def scheduler_half(
    manager: TieringManager,
    groups: Sequence[KVCacheSpec],
    num_ranks: int = 1,
    half: type[SpillwayConnectorScheduler] = SpillwayConnectorScheduler,
    *,
    retention_interval: int | None = 0,
    settings: ConnectorConfig | None = None,
) -> SpillwayConnectorScheduler:
    """Make a scheduler half for KV groups of equal block size, one device block to a chunk. half: a class of this
    generation's. retention_interval: vLLM's `prefix_cache_retention_interval`, with its default."""
    block_tokens = groups[0].block_size
    kv_cache_config = KVCacheConfig(1, [], [KVCacheGroupSpec(["layer"], group) for group in groups])
    vllm_config = _vllm_config(num_ranks, retention_interval)
    spec: Any
    if generation() is Generation.V023:
        spec = SimpleNamespace(
            gpu_block_size=(block_tokens,) * len(groups),
            hash_block_size=block_tokens,
            block_size_factor=1,
            offload_prompt_only=True,
            kv_cache_config=kv_cache_config,
            vllm_config=vllm_config,
            get_manager=lambda: manager,
            settings=settings,
        )
        return half(spec)
    spec = SimpleNamespace(
        config=SimpleNamespace(
            groups=[
                SimpleNamespace(
                    group_id=at,
                    tokens_per_block=block_tokens,
                    sliding_window_size_in_chunks=_window_chunks(group, block_tokens),
                )
                for at, group in enumerate(groups)
            ]
        ),
        extra_config={},
        tokens_per_block=(block_tokens,) * len(groups),
        tokens_per_hash=block_tokens,
        blocks_per_chunk=1,
        offload_prompt_only=True,
        kv_events_config=SimpleNamespace(enable_kv_cache_events=False, self_describing_kv_events=False),
        get_manager=lambda: manager,
        settings=settings,
    )
    return half(*(spec, vllm_config, kv_cache_config))


def step_output(
    scheduled: dict[str, int] | None = None,
    new: Iterable[NewRequestData] = (),
    *,
    resumed: Iterable[NewRequestData] = (),
    running: Sequence[str] = (),
    preempted: Iterable[str] | None = None,
    finished: Iterable[str] = (),
) -> SchedulerOutput:
    """Make the output of a step.

    Args:
        scheduled: The tokens of each request in this step.
        new: The requests that run for the first time.
        resumed: The requests that run again after a preemption.
        running: The requests that go on and get no block.
        preempted: The requests that this step preempted; None: the scheduler does not say.
        finished: The requests that have ended since the last step.
    """
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = list(new)
    cached, again = output.scheduled_cached_reqs, list(resumed)
    cached.resumed_req_ids = {request.req_id for request in again}
    cached.req_ids = [request.req_id for request in again] + list(running)
    cached.new_block_ids = [request.block_ids for request in again] + [None for _ in running]
    cached.num_computed_tokens = [request.num_computed_tokens for request in again] + [0 for _ in running]
    output.num_scheduled_tokens = scheduled or {}
    output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
    output.preempted_req_ids = None if preempted is None else set(preempted)
    output.finished_req_ids = set(finished)
    return output


def copy_of(job: Any) -> tuple[Any, Any]:
    """(source, destination) of a job in the connector's metadata."""
    return job.transfer_spec if generation() is Generation.V023 else (job.src_spec, job.dst_spec)


def rows_on_the_way(job: Any) -> list[int]:
    """The rows of a job that a shared tier was given."""
    rows: Any = job.block_ids if generation() is Generation.V023 else job.chunk_ids
    return [int(row) for row in rows]
