"""Tells the CPU tier which requests wait, so that what they are about to use leaves it last (plan/waiting.py).

A request waits from its arrival until it is given device blocks: from then on its load pins the rows. vLLM asks the
connector about it only when it could schedule it, so those behind the head of the queue are known from here alone. A
request that a step preempts waits again, in front of the others.

EngineCore process, scheduler thread; no method blocks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

from typing_extensions import override
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.request import RequestStatus

from spillway_connector.engine.features.feature import Feature
from spillway_connector.engine.manager.tiering import TieringManager
from spillway_connector.engine.requests.state import RequestFields
from spillway_connector.engine.requests.tenancy import tenant_of_context
from spillway_connector.plan.waiting import Turn, WaitingChunks

# Requests whose keys are computed, which their turn does not do again, and those only if they matter (plan/waiting.py).
_REQUESTS_PER_STEP = 16


class WaitingRequests(Feature):
    """The requests that wait in one engine."""

    def __init__(self, manager: TieringManager, state_of: Callable[[str], RequestFields | None]) -> None:
        """state_of: returns what the connector knows of a request."""
        self.chunks: WaitingChunks[OffloadKey] = manager.primary_tier.waiting
        self._manager = manager
        self._state_of = state_of
        self._arrived: dict[str, RequestFields] = {}  # in this step
        self._waited: dict[str, RequestFields] = {}  # before it, and not begun
        self._waited_since = 0.0  # the first of these
        self._numbers = itertools.count()

    @override
    def came(self, status: RequestFields) -> None:
        """Note a request that has come. Its turn may be now or much later."""
        self._arrived[status.req.request_id] = status

    @override
    def admitted(self, request_id: str, loaded_tokens: int) -> None:
        self.ended(request_id)

    @override
    def ended(self, request_id: str) -> None:
        """Note that the request does not wait any more."""
        if self._waited.pop(request_id, None) is None and self._arrived.pop(request_id, None) is None:
            self.chunks.end(request_id)

    @override
    def end_step(self, output: SchedulerOutput) -> None:
        if self.chunks.due_at < math.inf and (now := self._manager.step_time) >= self.chunks.due_at:
            self.chunks.pass_time(now)
        for request_id in output.preempted_req_ids or ():
            status = self._state_of(request_id)
            if status is not None and status.req.status is RequestStatus.PREEMPTED:  # not resumed
                self._begin(request_id, status, Turn(_priority(status), -next(self._numbers)), self._manager.now())
        if self._arrived:
            if not self._waited:
                self._waited_since = self._manager.step_time
            self._waited.update(self._arrived)
            self._arrived.clear()
        if self._waited and self.chunks.more is None:
            self.chunks.expect(self._begin_some, self._manager.step_time)

    def _begin_some(self) -> None:
        for request_id in list(itertools.islice(self._waited, _REQUESTS_PER_STEP)):
            status = self._waited.pop(request_id)
            self._begin(request_id, status, Turn(_priority(status), next(self._numbers)), self._waited_since)

    def _begin(self, name: str, status: RequestFields, turn: Turn, now: float) -> None:
        if status.req.skip_reading_prefix_cache:
            return
        status.update_offload_keys()
        first, *others = status.group_states
        keys = first.offload_keys  # they do not grow while the request waits
        if others:
            keys = [*keys, *(key for state in others for key in state.offload_keys)]
        if keys:
            self.chunks.begin(name, tenant_of_context(status.req_context), turn, keys, now)


def _priority(status: RequestFields) -> float:
    """Return vLLM's priority of a request. With `priority` scheduling the lowest is first."""
    return float(getattr(status.req, "priority", 0))
