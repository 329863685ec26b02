"""The queue in front of engines that are all full: bounded, with a deadline, fair.

While a model has capacity a request passes without waiting. Beyond it, a tenant or a session that has no request on the
engines may send one, into one of a few places that are kept for these: so such a request does not wait until a request
of a flood ends. Otherwise it queues by priority, and within one priority tenants are served by round robin (fair
queueing, J. Nagle, RFC 970), so a thousand requests of one tenant delay the first of another by one place. Sessions of
one tenant take turns too (session_turns.py). Among the requests of one session, the one that finds most cached tokens
goes first, and the others overtake none of them for longer than OVERTAKE_SECONDS. An engine's queue has the same rule
(spillway_settings.queue_order).

A model that is scaled to zero has no capacity; its requests wait longer, for the first engine. One whose engines were
all lost a moment ago has none either: its requests wait for one to return, and once none is expected any more they
pass, so that routing refuses them.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable

from spillway_gateway.access.keys import Priority
from spillway_gateway.access.session_turns import REQUEST_TOKENS, Session, SessionTurns
from spillway_gateway.config.settings import AdmissionConfig
from spillway_gateway.errors import GatewayOverloaded, NoEngineInTime, NoEngineReady
from spillway_gateway.turns import Turns
from spillway_settings.queue_order import OVERTAKE_SECONDS, admission_order

NEWCOMERS_PART = 8  # one place beyond this number for sessions without a request, and one for tenants
CANDIDATES_MAX = 16  # of one session that are compared: each asks the prefix index
ADMITTING_SECONDS_MAX = 0.002  # in one iteration of the event loop: an engine may become ready for a thousand requests
REFUSALS_PER_ITERATION = 16  # of the event loop; thousands may have waited for equally long


def _none_at_hand() -> int:
    return 0


def _none_returns() -> float:
    return 0.0


class _Waiting:
    """A queued request. at_hand: the cached tokens that it would find on an engine with room."""

    __slots__ = ("arrived_at", "at_hand", "place", "session")

    def __init__(
        self, place: asyncio.Future[None], arrived_at: float, at_hand: Callable[[], int], session: Session
    ) -> None:
        self.place = place
        self.arrived_at = arrived_at
        self.at_hand = at_hand
        self.session = session


class Admission:
    """The queue of one model. On the event loop. capacity: requests that its engines may run together at the moment.
    wake_seconds: how long a request waits for a first engine; None: as long as for room. return_seconds: for which lost
    engines are expected back; while that is not 0 there is no capacity, and as soon as it is 0 there is some."""

    def __init__(
        self,
        config: AdmissionConfig,
        capacity: Callable[[], int],
        wake_seconds: Callable[[], float | None] = lambda: None,
        return_seconds: Callable[[], float] = _none_returns,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._config = config
        self._capacity = capacity
        self._wake_seconds = wake_seconds
        self._return_seconds = return_seconds
        self._seconds = {
            Priority.HIGH: config.high_wait_seconds,
            Priority.NORMAL: config.normal_wait_seconds,
            Priority.LOW: config.low_wait_seconds,
        }
        # priority -> tenant -> queued requests; the first tenant is next, and moves to the end when served
        self._waiting: dict[Priority, OrderedDict[str, deque[_Waiting]]] = {
            priority: OrderedDict() for priority in Priority
        }
        self._refusals = Turns(REFUSALS_PER_ITERATION)
        self.turns = SessionTurns(config.session_half_life_seconds, clock)
        self._goes_on: asyncio.Handle | None = None  # admitting, in the next iteration of the event loop
        self._looks_again: asyncio.TimerHandle | None = None
        self.admitted_requests = 0
        self._admitted: dict[str, dict[Session, int]] = {}  # how many, by tenant and session
        # Sessions that entered beyond the engines' room, until all of their requests have ended: they take no room
        # from requests that wait.
        self._beyond: set[tuple[str, Session]] = set()
        self.waiting_requests = 0
        self.refused_total = 0

    @property
    def is_full(self) -> bool:
        """Whether a request that comes now has to wait until an existing engine has room."""
        capacity = self._capacity()
        return capacity > 0 and (self.waiting_requests > 0 or self._taken >= capacity)

    def enter_at_once(self, tenant: str, session: Session = None, priority: Priority = Priority.NORMAL) -> bool:
        """Whether the request may be sent without waiting; leave() must then follow."""
        if self.waiting_requests or not self._has_room():
            if not self._may_enter_beyond(tenant, session, priority):
                return False
            self._beyond.add((tenant, session))
        self._admit(tenant, session)
        self.turns.charge(tenant, session, REQUEST_TOKENS)
        return True

    def _may_enter_beyond(self, tenant: str, session: Session, priority: Priority) -> bool:
        """Whether the request gets a place beyond the engines' room. These places are for senders that have no request
        on the engines: a part for sessions, and as many for tenants, so that one tenant's sessions take none from
        another tenant. It gets none while a request of a higher priority waits."""
        if any(self._waiting[other] for other in Priority if other < priority):
            return False
        beyond, places = len(self._beyond), self._capacity() // NEWCOMERS_PART
        if tenant not in self._admitted:
            return beyond < 2 * places
        return session is not None and session not in self._admitted[tenant] and beyond < places

    def _has_room(self) -> bool:
        return self._taken < self._capacity()

    @property
    def _taken(self) -> int:
        """Places within the engines' room."""
        return self.admitted_requests - len(self._beyond)

    def _admit(self, tenant: str, session: Session) -> None:
        self.admitted_requests += 1
        sessions = self._admitted.get(tenant)
        if sessions is None:
            self._admitted[tenant] = {session: 1}
        else:
            sessions[session] = sessions.get(session, 0) + 1

    @property
    def requests_per_engine_max(self) -> int:
        """Number of requests that an engine has room for."""
        return self._config.requests_per_engine_max

    async def enter(
        self,
        tenant: str,
        priority: Priority,
        at_hand: Callable[[], int] = _none_at_hand,
        session: Session = None,
    ) -> None:
        """Returns when the request may be sent; leave() must follow. The sender then charges `turns`.

        Args:
            tenant: the tenant whose turn it takes.
            priority: before which others it goes, and how long it waits.
            at_hand: the cached tokens that it would find on an engine with room; called whenever there is room.
            session: the tenant's session whose turn it takes.

        Raises:
            GatewayOverloaded: the queue is full, or the priority's deadline passed.
            NoEngineReady: the queue is full, and there is no engine.
            NoEngineInTime: the priority's deadline passed without one.
        """
        if self.enter_at_once(tenant, session, priority):
            return
        config = self._config
        if self.waiting_requests >= config.waiting_requests_max:
            self.refused_total += 1
            waiting_max = config.waiting_requests_max
            if not self._capacity():
                raise NoEngineReady(f"No engine of this model is ready, and {waiting_max} requests wait for one")
            raise GatewayOverloaded(f"all engines are full and {waiting_max} requests wait for them")
        waiting = _Waiting(asyncio.get_running_loop().create_future(), self._clock(), at_hand, session)
        self._waiting[priority].setdefault(tenant, deque()).append(waiting)
        self.waiting_requests += 1
        self._look_again()
        seconds, wake_seconds = self._seconds[priority], self._wake_seconds()
        if wake_seconds is not None and not self._capacity():
            seconds = max(seconds, wake_seconds)
        try:
            async with asyncio.timeout(seconds):
                await waiting.place
        except TimeoutError:
            self._give_up(waiting, tenant, priority)
            self.refused_total += 1
            await self._refusals.wait()
            if not self._capacity():
                raise NoEngineInTime(f"No engine of this model became ready within {seconds:g} s") from None
            raise GatewayOverloaded(f"all engines were full for {seconds:g} s") from None
        except asyncio.CancelledError:
            self._give_up(waiting, tenant, priority)
            raise

    def leave(self, tenant: str, session: Session = None) -> None:
        """An admitted request has ended."""
        self.admitted_requests -= 1
        sessions = self._admitted[tenant]
        left = sessions[session] - 1
        if left:
            sessions[session] = left
        else:
            del sessions[session]
            if not sessions:
                del self._admitted[tenant]
            if self._beyond:
                self._beyond.discard((tenant, session))
        if self.waiting_requests:
            self.wake()

    def wake(self) -> None:
        """Admit queued requests while there is capacity; also called when an engine becomes ready."""
        if self._goes_on is None:
            self._admit_queued()
        self._look_again()

    def _look_again(self) -> None:
        """Plan to wake requests that wait for an engine once none is expected back any more."""
        if self._looks_again is None and self.waiting_requests and (seconds := self._return_seconds()):
            self._looks_again = asyncio.get_running_loop().call_later(seconds, self._none_returned)

    def _none_returned(self) -> None:
        self._looks_again = None
        self.wake()

    def _admit_queued(self) -> None:
        self._goes_on = None
        until = self._clock() + ADMITTING_SECONDS_MAX
        while self.waiting_requests and self._has_room():
            tenant, waiting = self._next()
            self.waiting_requests -= 1
            if not waiting.place.done():  # else it gave up in this event loop iteration
                self._admit(tenant, waiting.session)
                waiting.place.set_result(None)
            if self._clock() > until:
                self._goes_on = asyncio.get_running_loop().call_soon(self._admit_queued)
                return

    def _next(self) -> tuple[str, _Waiting]:
        for tenants in self._waiting.values():  # by priority
            if tenants:
                tenant, queue = tenants.popitem(last=False)
                at = self._first_of(tenant, queue)
                waiting = queue[at]
                self.turns.charge(tenant, waiting.session, REQUEST_TOKENS)
                del queue[at]
                if queue:
                    tenants[tenant] = queue  # at the end: the other tenants come first
                return tenant, waiting
        raise AssertionError("waiting_requests counts a request that is not queued")

    def _first_of(self, tenant: str, queue: deque[_Waiting]) -> int:
        """Decides which of one tenant's requests is next."""
        if len(queue) == 1:
            return 0
        positions = self.turns.next_of(tenant, [each.session for each in queue])[:CANDIDATES_MAX]
        if len(positions) == 1:
            return positions[0]
        head = [queue[at] for at in positions]
        arrived_at = [each.arrived_at for each in head]
        first = admission_order(arrived_at, lambda at: head[at].at_hand(), self._clock(), OVERTAKE_SECONDS)[0]
        return positions[first]

    def _give_up(self, waiting: _Waiting, tenant: str, priority: Priority) -> None:
        """Take a request off the queue; if it was admitted in the same iteration, its place goes to the next one."""
        place = waiting.place
        if place.done() and not place.cancelled():
            self.leave(tenant, waiting.session)
            return
        queue = self._waiting[priority].get(tenant)
        if queue is not None and waiting in queue:
            queue.remove(waiting)
            self.waiting_requests -= 1
            if not queue:
                del self._waiting[priority][tenant]
