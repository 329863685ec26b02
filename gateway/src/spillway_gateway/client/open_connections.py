"""The connections of one listener: how many are open, from which address, and which have expired.

Nothing here waits or has a timer. tick() checks every connection once a second, a share at each call, and ends expired
ones a few at a time, since thousands may expire at once. A full listener evicts the connection that has been idle
longest, so silent clients cannot keep others out; a new connection is refused only if every open one has a request.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Protocol

from spillway_gateway.client.body_budget import BodyBudget
from spillway_gateway.client.reply_budget import ENDED_PER_TICK, STALLED_SECONDS, ReplyBudget
from spillway_gateway.config.settings import ConnectionsConfig
from spillway_gateway.turns import Turns

CHECK_SECONDS = 1.0
UNBOUNDED = 2**63
EXPIRED_PER_TICK = 32
TICKS_PER_CHECK = 8  # of the ten a second; each checks an equal share of the connections
CHECKED_PER_TICK_MIN = 128
REQUESTS_PER_ITERATION = 16  # of half a millisecond each: parsed, then its task's first step
FRAMES_PER_ITERATION = 512  # that proxies send to the endpoint picker
ENDS_PER_ITERATION = 32  # of lost connections, whose requests' tasks then end


class Connection(Protocol):
    """An open connection. now: seconds of the event loop's clock."""

    def is_expired(self, now: float) -> bool:
        """Whether a deadline has passed."""

    def expire(self, now: float) -> None:
        """End it, unless it is no longer expired."""

    def evict(self) -> None:
        """End it at once, to make room for another."""

    def stalled_since(self) -> float | None:
        """The time since which its client has read nothing of a reply, as is_expired() has seen it; None: it reads."""


class OpenConnections:
    """The connections of one listener, on its event loop.

    Args:
        bounds: the bounds of each connection.
        open_max: the most connections of all addresses together; one address gets at most three quarters of them.
        bodies_bytes_max: reads the bound of the budget for bodies.
        replies_bytes_max: reads the bound of the budget for replies.
    """

    def __init__(
        self,
        bounds: ConnectionsConfig,
        open_max: int,
        *,
        bodies_bytes_max: Callable[[], int] = lambda: UNBOUNDED,
        replies_bytes_max: Callable[[], int] = lambda: UNBOUNDED,
    ) -> None:
        self.bounds = bounds
        self.open_max = open_max
        self.per_address_max = min(bounds.per_address_max, max(1, open_max * 3 // 4))
        self.body_budget = BodyBudget(bodies_bytes_max)
        self.reply_budget = ReplyBudget(replies_bytes_max)
        self.request_turns = Turns(REQUESTS_PER_ITERATION)
        self.end_turns = Turns(ENDS_PER_ITERATION)
        self.frame_turns = Turns(FRAMES_PER_ITERATION)
        self.refused_total = 0
        self.evicted_total = 0
        self._address: dict[Connection, str] = {}
        self._of_address: dict[str, int] = {}
        # Without a request, longest first: all of them, and those of each address.
        self._idle: dict[Connection, None] = {}
        self._idle_of: dict[str, dict[Connection, None]] = {}
        self._expired: dict[Connection, None] = {}
        self._check_at = 0.0
        self._unchecked: list[Connection] = []
        self._checked_per_tick = CHECKED_PER_TICK_MIN

    def __len__(self) -> int:
        return len(self._address)

    def holds(self, connection: Connection) -> bool:
        """Whether it was admitted, and has not ended."""
        return connection in self._address

    def admit(self, connection: Connection, address: str) -> bool:
        """Whether a new connection may stay; it is then idle, until remove()."""
        if self._of_address.get(address, 0) >= self.per_address_max:
            if not self._evict_one(self._idle_of.get(address, {})):
                return False
        elif len(self._address) >= self.open_max and not self._evict_one(self._idle):
            return False
        self._address[connection] = address
        self._of_address[address] = self._of_address.get(address, 0) + 1
        self.mark_idle(connection)
        return True

    def _evict_one(self, idle: dict[Connection, None]) -> bool:
        longest = next(iter(idle), None)
        if longest is None:
            self.refused_total += 1
            return False
        self.evicted_total += 1
        self.remove(longest)
        longest.evict()
        return True

    def replace(self, connection: Connection, successor: Connection) -> bool:
        """Put the successor in the place of an admitted connection. False if that was removed meanwhile."""
        if connection not in self._address:
            return False
        self.mark_busy(connection)
        self._address[successor] = self._address.pop(connection)
        self.mark_idle(successor)
        return True

    def remove(self, connection: Connection) -> None:
        """The connection has ended. Does nothing if it was not admitted."""
        if connection not in self._address:
            return
        self.mark_busy(connection)
        address = self._address.pop(connection)
        left = self._of_address[address] - 1
        if left:
            self._of_address[address] = left
        else:
            del self._of_address[address]
            self._idle_of.pop(address, None)

    def mark_busy(self, connection: Connection) -> None:
        """The head of a request has arrived."""
        if connection in self._idle:
            del self._idle[connection]
            del self._idle_of[self._address[connection]][connection]

    def mark_idle(self, connection: Connection) -> None:
        """The connection waits for its client's next request."""
        address = self._address.get(connection)
        if address is not None:
            self._idle[connection] = None
            self._idle_of.setdefault(address, {})[connection] = None

    def tick(self, now: float) -> None:
        """Check a share of the connections; called several times a second."""
        if now >= self._check_at:
            self._check_at = now + CHECK_SECONDS
            if not self._unchecked:
                self._unchecked = list(self._address)
                self._checked_per_tick = max(CHECKED_PER_TICK_MIN, -(-len(self._unchecked) // TICKS_PER_CHECK))
        checked = self._unchecked[-self._checked_per_tick :]
        del self._unchecked[-self._checked_per_tick :]
        self._expired.update(
            (connection, None) for connection in checked if connection in self._address and connection.is_expired(now)
        )
        if self.reply_budget.excess_bytes:
            self._end_stalled(now)
        for connection in list(itertools.islice(self._expired, EXPIRED_PER_TICK)):
            del self._expired[connection]
            if connection in self._address:
                connection.expire(now)

    def _end_stalled(self, now: float) -> None:
        """Replies need more room than there is: close connections whose clients read nothing, until it is enough."""
        stalled = [(since, each) for each in self._address if (since := each.stalled_since()) is not None]
        stalled = [pair for pair in stalled if now - pair[0] >= STALLED_SECONDS]
        for _, connection in sorted(stalled, key=lambda pair: pair[0])[:ENDED_PER_TICK]:
            if not self.reply_budget.excess_bytes:
                break
            self.reply_budget.count_ended()
            connection.evict()
