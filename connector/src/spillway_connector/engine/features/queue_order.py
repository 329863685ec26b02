"""vLLM's queue of waiting requests, which returns the request with most cached tokens first (settings, queue_order.py).

The order within vLLM's queue is its own, by arrival or by priority; what changes is which of the requests at its head
vLLM is shown next. Requests of another priority are never compared. A request that a step has preempted goes first, as
in vLLM. vLLM itself handles requests that it has passed over (a load under way, a grammar): it keeps them apart or puts
them back in front.

The device's prefix cache and the CPU tier say whether a prefix is there; asking them neither marks a block as used nor
begins a load. A chunk that only a shared tier holds counts from its promotion on, which begins when the request arrives
(engine/features/ahead.py).

EngineCore process, scheduler thread; no method blocks.
"""

from __future__ import annotations

import heapq
import math
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol, cast

from typing_extensions import override
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.request_queue import FCFSRequestQueue, PriorityRequestQueue, RequestQueue
from vllm.v1.request import Request, RequestStatus

from spillway_connector.engine.features.feature import Feature, HasFeatures, feature_of
from spillway_connector.engine.manager.tiering import TieringManager
from spillway_connector.engine.patches.own_connector import own_connector
from spillway_connector.engine.requests.state import RequestFields
from spillway_connector.plan.waiting import leading_count
from spillway_settings.queue_order import CANDIDATES_MAX, admission_order, next_due

_CURRENT_SECONDS = 0.1  # for so long an answer about a prefix is used again
_FULL_ATTENTION_GROUP = 0


class _Owner(Protocol):
    """The scheduler half."""

    manager: TieringManager
    device_blocks: BlockPool | None
    chunk_tokens: int
    blocks_per_chunk: int

    def known_state(self, request_id: str) -> RequestFields | None: ...


class QueueOrder(Feature):
    """Decides which request of a queue is next. It serves models with one KV group, all of which attention reads."""

    def __init__(self, owner: _Owner, overtake_seconds: float) -> None:
        """overtake_seconds: the time for which others may be admitted before a request that waits."""
        self._owner = owner
        self.clock = owner.manager.now
        self._ready = owner.manager.primary_tier.ready
        self._overtake_seconds = overtake_seconds
        self._found: dict[Request, tuple[int, float]] = {}  # tokens at hand, and until when that is current
        self._planned: deque[Request] = deque()
        self._current_until = -math.inf

    @override
    def came(self, status: RequestFields) -> None:
        status.arrived_at = self.clock()

    def next_of(self, queue: OrderedQueue) -> Request:
        """The request that vLLM is to consider; the queue has two at least."""
        now = self.clock()
        if not self._planned or now >= self._current_until:
            self._plan(queue.candidates(), now)
        return self._planned[0]

    def popped(self, request: Request) -> None:
        """The request has left the queue; the others keep their order."""
        self._found.pop(request, None)
        if self._planned and self._planned[0] is request:
            self._planned.popleft()
        else:
            self.changed()

    def changed(self) -> None:
        """Forget the plan, because requests have joined or left the queue."""
        self._planned.clear()

    def removed(self) -> None:
        """Forget plan and look-ups, because requests have left the queue without their turn."""
        self._planned.clear()
        self._found.clear()

    def _plan(self, candidates: Sequence[Request], now: float) -> None:
        arrived_at = [self._arrived_at(request) for request in candidates]
        known, self._found = self._found, {}

        def tokens_at_hand(position: int) -> int:
            request = candidates[position]
            found = known.get(request)
            if found is None or now >= found[1]:
                found = self._tokens_at_hand(request), now + _CURRENT_SECONDS
            self._found[request] = found
            return found[0]

        order = admission_order(arrived_at, tokens_at_hand, now, self._overtake_seconds)
        self._planned = deque(candidates[position] for position in order)
        self._current_until = min(now + _CURRENT_SECONDS, next_due(arrived_at, now, self._overtake_seconds))

    def _arrived_at(self, request: Request) -> float:
        status = self._owner.known_state(request.request_id)
        if status is None or request.status is RequestStatus.PREEMPTED:
            return -math.inf
        return status.arrived_at

    def _tokens_at_hand(self, request: Request) -> int:
        """The tokens that the request would find if it were admitted now, in whole chunks."""
        status, device = self._owner.known_state(request.request_id), self._owner.device_blocks
        if status is None or request.skip_reading_prefix_cache:
            return 0
        status.update_offload_keys()
        keys, hashes, width = status.group_states[0].offload_keys, request.block_hashes, self._owner.blocks_per_chunk

        def is_held(chunk: int) -> bool:
            if chunk < len(keys) and keys[chunk] in self._ready:
                return True
            last = hashes[(chunk + 1) * width - 1]
            return device is not None and device.get_cached_block(last, [_FULL_ATTENTION_GROUP]) is not None

        return leading_count(len(hashes) // width, is_held) * self._owner.chunk_tokens


class OrderedQueue(RequestQueue):
    """A queue of vLLM's whose next request is chosen by a QueueOrder."""

    order: QueueOrder
    _shown: Request | None = None  # by the last peek, to be popped if anything is

    @abstractmethod
    def candidates(self) -> list[Request]:
        """Return the requests of the highest priority at the queue's head, in its order; there is at least one."""

    @abstractmethod
    def _take(self, request: Request) -> None:
        """Remove the request from the queue, which holds it."""

    @override
    def peek_request(self) -> Request:
        self._shown = self.order.next_of(self) if len(self) > 1 else super().peek_request()  # type: ignore[safe-super]
        return self._shown

    @override
    def pop_request(self) -> Request:
        request = self._shown or self.peek_request()
        self._take(request)
        self._shown = None
        self.order.popped(request)
        return request

    @override
    def add_request(self, request: Request) -> None:
        super().add_request(request)  # type: ignore[safe-super]
        self._shown = None
        self.order.changed()

    @override
    def prepend_request(self, request: Request) -> None:
        super().prepend_request(request)  # type: ignore[safe-super]
        self._shown = None
        self.order.changed()

    @override
    def prepend_requests(self, requests: Any) -> None:  # a queue in vLLM 0.23, requests since
        super().prepend_requests(requests)  # type: ignore[safe-super]
        self._shown = None
        self.order.changed()

    @override
    def remove_request(self, request: Request) -> None:
        super().remove_request(request)  # type: ignore[safe-super]
        self._shown = None
        self.order.removed()

    @override
    def remove_requests(self, requests: Iterable[Request]) -> None:
        super().remove_requests(requests)  # type: ignore[safe-super]
        self._shown = None
        self.order.removed()


class OrderedFCFSQueue(OrderedQueue, FCFSRequestQueue):
    def __init__(self, order: QueueOrder) -> None:
        super().__init__()
        self.order = order

    @override
    def candidates(self) -> list[Request]:
        return list(islice(self, CANDIDATES_MAX))

    @override
    def _take(self, request: Request) -> None:
        self.remove(request)


class OrderedPriorityQueue(OrderedQueue, PriorityRequestQueue):
    def __init__(self, order: QueueOrder) -> None:
        super().__init__()
        self.order = order

    @override
    def candidates(self) -> list[Request]:
        first, *others = heapq.nsmallest(CANDIDATES_MAX, self._heap)
        return [first, *(one for one in others if one.priority == first.priority)]

    @override
    def _take(self, request: Request) -> None:
        if self._heap[0] is request:
            heapq.heappop(self._heap)
        else:
            self._heap.remove(request)
            heapq.heapify(self._heap)


_QUEUES: dict[type[Any], type[Any]] = {FCFSRequestQueue: OrderedFCFSQueue, PriorityRequestQueue: OrderedPriorityQueue}


def ordering_queue(original: Any) -> Callable[[Any, Request], None]:
    """Wrap Scheduler._enqueue_waiting_request: an engine with such an order has its queue from its first request on. A
    scheduler whose queue is not vLLM's own keeps it."""

    def enqueue_waiting_request(self: Any, request: Request) -> None:
        if type(self.waiting) in _QUEUES:
            _order_queue(self)
        original(self, request)

    return enqueue_waiting_request


def _order_queue(scheduler: Any) -> None:
    connector = own_connector(scheduler, HasFeatures)  # type: ignore[type-abstract]
    order = None if connector is None else feature_of(connector.scheduler_features, QueueOrder)
    if order is not None:
        ordered = _QUEUES[type(scheduler.waiting)](order)
        for request in cast(Iterator[Request], iter(scheduler.waiting)):
            ordered.add_request(request)
        scheduler.waiting = ordered
