"""Tells the CPU tier which requests wait, so that what they are about to use leaves it last (plan/waiting.py).

A request waits from its arrival until it is given device blocks: from then on its load pins the rows. vLLM asks the
connector about it only when it could schedule it, so those behind the head of the queue are known from here alone. A
request that a step preempts waits again, in front of the others.

EngineCore process, scheduler thread; no method blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.request import RequestStatus

from spillway_connector.engine.manager.tiering import TieringManager
from spillway_connector.engine.requests.state import RequestFields
from spillway_connector.engine.requests.tenancy import tenant_of_context
from spillway_connector.plan.waiting import Turn, WaitingChunks

_REQUESTS_PER_STEP = 16  # whose keys are computed, which their turn does not do again


class WaitingRequests:
    """The requests that wait in one engine."""

    def __init__(self, manager: TieringManager) -> None:
        self._manager = manager
        self._arrived: dict[str, RequestFields] = {}  # waiting since this step, or since a crowded one before
        self._numbers = itertools.count()

    @property
    def chunks(self) -> WaitingChunks[OffloadKey]:
        return self._manager.primary_tier.waiting

    def add(self, request_id: str, status: RequestFields) -> None:
        """Take a new request, whose turn may be now or much later."""
        self._arrived[request_id] = status

    def leave(self, request_id: str) -> None:
        """Forget a request that has been admitted or has ended."""
        if self._arrived.pop(request_id, None) is None:
            self.chunks.end(request_id)

    def end_step(self, preempted: Iterable[str], states: Mapping[str, Any]) -> None:
        """Called before the step's stores get rows. preempted: requests that this step has preempted."""
        self.chunks.end_old(self._manager.now())
        for request_id in preempted:
            status = states.get(request_id)
            if isinstance(status, RequestFields) and status.req.status is RequestStatus.PREEMPTED:  # not resumed
                self._begin(request_id, status, Turn(_priority(status), -next(self._numbers)))
        if self._arrived:
            for request_id in list(itertools.islice(self._arrived, _REQUESTS_PER_STEP)):
                status = self._arrived.pop(request_id)
                self._begin(request_id, status, Turn(_priority(status), next(self._numbers)))

    def _begin(self, name: str, status: RequestFields, turn: Turn) -> None:
        if status.req.skip_reading_prefix_cache:
            return
        status.update_offload_keys()
        first, *others = status.group_states
        keys = [*first.offload_keys, *(key for state in others for key in state.offload_keys)]
        if keys:
            self.chunks.begin(name, tenant_of_context(status.req_context), turn, keys, self._manager.now())


def _priority(status: RequestFields) -> float:
    """What vLLM's `priority` scheduling goes by: the least is first."""
    return float(getattr(status.req, "priority", 0))
