"""Resets of the CPU tier and of the device's prefix cache, and changes of weights: what is still under way then.

A reset drops every chunk at once, while ranks still copy to and from rows: those rows stay out of use until all ranks
have reported their jobs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from typing_extensions import override
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import RequestStatus

from spillway_connector.engine.features.feature import Feature
from spillway_connector.engine.features.late_stores import LateStores
from spillway_connector.engine.manager.early_loads import EarlyLoads
from spillway_connector.engine.manager.tiering import TieringManager
from spillway_connector.engine.patches.own_connector import own_connector
from spillway_connector.engine.patches.patching import replace_on
from spillway_connector.engine.requests.state import RequestFields
from spillway_connector.namespace import Namespace
from spillway_settings.wire import WEIGHTS_PATH

logger = logging.getLogger(__name__)

_WAITING = (RequestStatus.WAITING, RequestStatus.PREEMPTED, RequestStatus.WAITING_FOR_REMOTE_KVS)


@dataclass(slots=True)
class ResetJob:
    """A job that was under way at a reset, until every rank has reported it."""

    ranks_pending: int
    rows: list[int]  # of the CPU tier, which it may still read or write
    loading: str | None = None  # the request that it loads for


def blocks_in_use(device_blocks: BlockPool) -> int:
    """Count the blocks that requests use, on which vLLM's own reset of the device's prefix cache refuses.

    The null block is always in use and belongs to no request.
    """
    return device_blocks.num_gpu_blocks - device_blocks.get_num_free_blocks() - 1


class ResettableHalf(OffloadingConnectorScheduler):
    """The part of the scheduler half that drops what the tiers and the device hold. EngineCore process, scheduler
    thread, between steps."""

    manager: TieringManager
    device_blocks: BlockPool | None = None  # vLLM's; bound before the first request
    _early_loads: EarlyLoads
    features: list[Feature]
    _req_status: dict[str, RequestFields]  # type: ignore[assignment]  # vLLM's, made by `_state_of`
    _failed_jobs: set[int]
    _has_device_cache: bool
    late_stores: LateStores | None

    def _begin_resets(self, *, has_device_cache: bool) -> None:
        self._has_device_cache = has_device_cache
        self._reset_jobs: dict[int, ResetJob] = {}
        self._weights_changed = False
        self._device_is_stale = False  # its prefix cache may hold KV of weights that are gone
        self._given_up_blocks: Set[int] = frozenset()  # of loads that a reset under way leaves to their end

    def bind_device_blocks(self, device_blocks: BlockPool) -> None:
        """Learn of each reset of the device's prefix cache, also of those that leave connectors alone."""
        self.device_blocks = device_blocks
        if self.late_stores is not None:
            self.late_stores.bind(device_blocks)
        original = device_blocks.reset_prefix_cache

        def reset_prefix_cache() -> bool:
            # Blocks whose loads have been given up hold nothing that a later request could hit.
            if self.late_stores is not None:
                self.late_stores.device_resetting()
            given_up = len(self._given_up_blocks)
            device_blocks.num_gpu_blocks -= given_up
            try:
                done = bool(original())
            finally:
                device_blocks.num_gpu_blocks += given_up
            if done:
                self._device_was_reset()
            return done

        replace_on(device_blocks, "reset_prefix_cache", reset_prefix_cache)

    def weights_changing(self, cause: str) -> None:
        """The model's weights are about to change: drop the CPU tier, and use the shared tiers no more until the new
        weights have a name.

        Running requests hold KV of the old weights, and until its reset the device's prefix cache serves such KV, so
        nothing is offloaded before that. cause: for the log.
        """
        if not self._weights_changed:
            logger.warning(
                "%s may change the model's weights: the shared tiers are not used until the new weights have a name "
                "(POST %s), or the engine is restarted, because their KV was computed with other weights. The CPU tier "
                "is filled again once the device's prefix cache has been reset (/reset_prefix_cache)",
                cause,
                WEIGHTS_PATH,
            )
        self._weights_changed = True
        self._device_is_stale = self._has_device_cache
        self.manager.weights_changed()
        self.reset_cache()
        for status in self._req_status.values():
            status.is_stale = True

    def name_weights(self, namespace: Namespace | None, reset_device: Callable[[], bool]) -> str | None:
        """The weights that the engine has are those of this namespace: share under it from the next step on.

        Args:
            namespace: None: there is no shared tier.
            reset_device: vLLM's reset of the device's prefix cache; returns whether it was done.

        Returns:
            Why not, in a sentence; then nothing has changed, or the tiers rest.

        Raises:
            ConfigError: A shared tier cannot be opened; the tiers rest.
        """
        in_use = 0 if self.device_blocks is None else blocks_in_use(self.device_blocks)
        if in_use:
            return (
                f"{in_use} blocks of the device are in use by requests, whose KV may be of other weights; name the "
                "weights when no request runs: POST /pause, then name them, then POST /resume"
            )
        if not self._weights_changed:
            self.weights_changing("another name of the weights")
        if not reset_device():
            return "vLLM did not reset the device's prefix cache; try again when no request runs"
        if namespace is not None:
            self.manager.use_namespace(namespace)
        self._weights_changed = False
        return None

    @property
    def weights_are_known(self) -> bool:
        """Whether the weights are those of the start, or were named after their last change."""
        return not self._weights_changed

    def _device_was_reset(self) -> None:
        """Note that no request holds a block any more that was computed before, or hits one from now on."""
        if self.late_stores is not None:
            self.late_stores.device_was_reset()
        if self._device_is_stale:
            self._device_is_stale = False
            for status in self._req_status.values():
                status.is_stale = False

    def reset_with_device(self) -> bool:
        """Reset the CPU tier; False, and nothing has changed, while requests hold blocks of the device.

        vLLM resets the device's prefix cache first and refuses while a block is in use, but calls the connector
        nevertheless. Those blocks stay cached, and a load under way would add to them: with them, an empty CPU tier is
        no reset. So both caches are reset, or neither is.
        """
        in_use = 0 if self.device_blocks is None else blocks_in_use(self.device_blocks) - len(self._given_up_blocks)
        if in_use:
            logger.warning(
                "The CPU tier was not reset, like the device's prefix cache: %d blocks are in use; reset again when no "
                "request runs, or with reset_running_requests",
                in_use,
            )
            self.manager.count_refused_reset()
            return False
        self.reset_cache()
        return True

    @override
    def reset_cache(self) -> None:
        """vLLM's contract: drop every chunk and job. Workers finish their copies in their next step; the rows of a
        job are released when all ranks have reported it."""
        for job_id, job in self._jobs.items():
            rows = self.manager.primary_tier.rows_of(job.keys)
            self._reset_jobs[job_id] = ResetJob(job.pending_count, rows, None if job.is_store else job.req_id)
        if self.late_stores is not None:
            for job_id, ranks_pending, keys in self.late_stores.tier_resetting():
                self._reset_jobs[job_id] = ResetJob(ranks_pending, self.manager.primary_tier.rows_of(keys))
        # vLLM asserts that there are none; those of an earlier reset wait here for the next step.
        jobs_to_flush, self._current_batch_jobs_to_flush = self._current_batch_jobs_to_flush, set()
        super().reset_cache()
        self._current_batch_jobs_to_flush |= jobs_to_flush
        self._failed_jobs.clear()
        self._early_loads.tier_was_reset()
        for feature in self.features:
            feature.tier_was_reset()

    def _end_reset_jobs(self, completed_jobs: dict[int, int]) -> None:
        """completed_jobs: how many ranks have reported each job since the last call."""
        for job_id in completed_jobs.keys() & self._reset_jobs.keys():
            job = self._reset_jobs[job_id]
            job.ranks_pending -= completed_jobs[job_id]
            if not job.ranks_pending:
                del self._reset_jobs[job_id]
                self.manager.primary_tier.release(job.rows)

    def copies_under_way(self) -> bool:
        """Whether copies between the device and the CPU tier are under way, those begun before a reset included."""
        late = self.late_stores is not None and self.late_stores.under_way
        return late or bool(self._jobs or self._reset_jobs or self._early_loads.loads)

    @contextmanager
    def forced_reset(self, scheduler: Any) -> Iterator[None]:
        """Surround vLLM's reset of the device's prefix cache that preempts all running requests.

        vLLM refuses it, once it has preempted them, while a waiting request holds blocks for a load or since one. Here
        such requests are computed again from their first token: those whose load has ended lose their blocks at once,
        the others when it ends, because a rank may still write to them.
        """
        loading = self._requests_being_loaded()
        given_up: set[int] = set()
        for request in list(scheduler.requests.values()):
            request_id = request.request_id
            blocks = {block for group in scheduler.kv_cache_manager.get_block_ids(request_id) for block in group}
            if not blocks and request.status in _WAITING:
                # A load that failed as a whole has lost its blocks, and with them what vLLM reserves for it.
                scheduler._inflight_prefills.discard(request)
            if not blocks or (request.status not in _WAITING and not request.is_finished()):
                continue
            waits_for_load = request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
            load_has_ended = request_id in scheduler.finished_recving_kv_req_ids
            if request_id in loading and not load_has_ended:
                given_up |= blocks
            elif request.is_finished() or (waits_for_load and not load_has_ended):
                continue  # a load of another connector's
            if request.is_finished():
                continue
            request.num_computed_tokens = 0
            # vLLM reserves blocks for admitted requests, because it assumes that they keep what they hold; requests
            # that lose their blocks would wait for each other.
            scheduler._inflight_prefills.discard(request)
            if waits_for_load:
                scheduler.failed_recving_kv_req_ids.add(request_id)  # then vLLM frees the blocks when it has ended
            if request_id not in loading or load_has_ended:
                scheduler.kv_cache_manager.free(request)
        given_up.discard(scheduler.kv_cache_manager.block_pool.null_block.block_id)
        self._given_up_blocks = given_up
        try:
            yield
        finally:
            self._given_up_blocks = frozenset()

    def _requests_being_loaded(self) -> set[str]:
        """Requests whose blocks may be written to, also by loads that a reset has dropped."""
        loading = {job.req_id for job in self._jobs.values() if not job.is_store}
        loading |= {job.loading for job in self._reset_jobs.values() if job.loading is not None}
        return loading | self._early_loads.requests()


@runtime_checkable
class ResetListener(Protocol):
    """A connector that takes part in vLLM's resets."""

    def forced_reset(self, scheduler: Any) -> AbstractContextManager[None]: ...


def forcing_reset(original: Any) -> Callable[..., bool]:
    """Wrap Scheduler.reset_prefix_cache: the connector gives up its loads before a reset that preempts requests."""

    def reset_prefix_cache(self: Any, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        connector = own_connector(self, ResetListener) if reset_running_requests else None  # type: ignore[type-abstract]
        if connector is None:
            return bool(original(self, reset_running_requests, reset_connector))
        with connector.forced_reset(self):
            return bool(original(self, reset_running_requests, reset_connector))

    return reset_prefix_cache
