"""The scheduler half: upstream's, with failures carried through and no request left waiting or asserted on."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.base import OffloadingSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from spillway_connector.engine.tiering import SpillwayTieringManager
from spillway_connector.engine.worker import SpillwayWorkerMetadata

_STEPS_MAX = 64  # vLLM keeps at most a handful of steps in flight
_PREFILL_TOKENS_MIN = 128  # a step below this mostly decodes and says little about prefill


class _Step(NamedTuple):
    begun_at: float  # time.monotonic seconds
    tokens: int


class SpillwayConnectorScheduler(OffloadingConnectorScheduler):
    """Runs in the EngineCore process on the scheduler thread; nothing here may block."""

    manager: SpillwayTieringManager

    def __init__(self, spec: OffloadingSpec) -> None:
        super().__init__(spec)
        self._failed_jobs: set[int] = set()  # some rank failed, others still to answer
        self._recompute_only: set[str] = set()  # requests whose load failed once: never offered a load again
        self._steps: deque[_Step] = deque(maxlen=_STEPS_MAX)  # begun, not yet reported by the workers
        self._last_step_ended_at = 0.0

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if request.request_id in self._recompute_only:
            return 0, False
        if self._req_status[request.request_id].transfer_jobs:
            # A preempted request comes back while its stores still read its old blocks; upstream asserts that a
            # load never meets a store of the same request. The flush that preemption ordered ends them this step.
            return None, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        self._steps.append(_Step(time.monotonic(), scheduler_output.total_num_scheduled_tokens))
        return super().build_connector_meta(scheduler_output)

    def _measure_prefill(self) -> None:
        """Time the step that just ended. Steps overlap under async scheduling: one begins when both have."""
        if not self._steps:
            return
        step, now = self._steps.popleft(), time.monotonic()
        if step.tokens >= _PREFILL_TOKENS_MIN:
            self.manager.prefill_rate.add(step.tokens, now - max(step.begun_at, self._last_step_ended_at), now)
        self._last_step_ended_at = now

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._measure_prefill()
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, SpillwayWorkerMetadata):
            self._failed_jobs |= meta.failed_jobs
            for job_id, count in meta.completed_jobs.items():
                status = self._jobs.get(job_id)
                if job_id not in self._failed_jobs or status is None or status.pending_count > count:
                    continue
                self._failed_jobs.discard(job_id)
                if status.is_store:
                    # Upstream reports every store as successful; the manager must know before it hears that.
                    self.manager.distrust_store(status.keys)
                else:
                    self._recompute_only.add(status.req_id)
        super().update_connector_output(connector_output)

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        self._recompute_only.discard(request.request_id)
        return super().request_finished(request)

    def reset_cache(self) -> None:
        super().reset_cache()
        self._failed_jobs.clear()
