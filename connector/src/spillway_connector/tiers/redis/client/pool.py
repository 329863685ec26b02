"""The connections to one server: a bounded number, reused, and replaced when they turn out to be stale.

Not redis-py's pool: that one waits for one timeout, not to a deadline, has no place for brief operations, and takes 7.5
us of CPU time for each use of a connection, this one 2.3 us.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from spillway_connector.errors import RefusedReason, TierRefused, TierTimeout, TierUnreachable
from spillway_connector.tiers.redis.client.connection import RedisConnection, connect
from spillway_connector.tiers.redis.client.endpoint import RedisEndpoint
from spillway_connector.tiers.tier import Clock

_Result = TypeVar("_Result")


class RedisPool:
    """A thread that finds no connection free waits for one within its deadline. Nothing is connected before use.

    One connection more than ``connections`` exists for ``brief`` operations while all others are busy: a lookup waits
    behind other lookups at most, never behind megabytes.
    """

    def __init__(
        self, endpoint: RedisEndpoint, connections: int, clock: Clock, greeting: tuple[bytes, ...] = ()
    ) -> None:
        self.endpoint = endpoint
        self._greeting = greeting
        self._clock = clock
        self._slots = threading.BoundedSemaphore(connections)
        self._reserve = threading.BoundedSemaphore(1)
        self._lock = threading.Lock()
        self._idle: list[RedisConnection] = []
        self._busy: set[RedisConnection] = set()
        self._retired = False
        self._closed = False

    def run(
        self,
        operation: Callable[[RedisConnection, float], _Result],
        deadline: float,
        *,
        connect_deadline: float | None = None,
        brief: bool = False,
    ) -> _Result:
        """Run ``operation`` on a pooled connection; once more on a fresh one if an idle one turns out to be stale.

        All operations here are idempotent. At most two attempts, within the one deadline.
        connect_deadline: for establishing a connection, where time is to be left for another server.
        brief: it moves few bytes.
        """
        slot = self._slot(brief, deadline)
        connect_until = deadline if connect_deadline is None else min(deadline, connect_deadline)
        try:
            connection, fresh = self._take(connect_until)
            try:
                return operation(connection, deadline)
            except TierTimeout:
                raise
            except (TierUnreachable, TierRefused) as error:
                if fresh or not _may_be_stale(connection, error):
                    raise
                connection.disconnect()
                self._release(connection)
                self.close_idle()  # they are as old as this one
                connection, _ = self._take(connect_until)
                return operation(connection, deadline)
            finally:
                self._release(connection)
        finally:
            slot.release()

    def close_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.disconnect()

    def retire(self) -> None:
        """The server holds no keys any more: close each connection once its operation has ended."""
        self._retired = True
        self.close_idle()

    def close(self) -> None:
        """Also ends the waits of other threads at once."""
        with self._lock:
            self._closed = True
            busy = list(self._busy)
        self.close_idle()
        for connection in busy:
            connection.interrupt()

    def _slot(self, brief: bool, deadline: float) -> threading.Semaphore:
        """The slot that was taken."""
        if brief and self._slots.acquire(blocking=False):
            return self._slots
        slot = self._reserve if brief else self._slots
        if not slot.acquire(timeout=max(0.0, deadline - self._clock())):
            raise TierTimeout(f"{self.endpoint}: all connections were busy until the deadline")
        return slot

    def _take(self, deadline: float) -> tuple[RedisConnection, bool]:
        with self._lock:
            if self._closed:
                raise self._refusal()
            if self._idle:
                connection = self._idle.pop()
                self._busy.add(connection)
                return connection, False
        if self._clock() >= deadline:
            raise TierTimeout(f"{self.endpoint}: the deadline passed before the operation began")
        connection = connect(self.endpoint, self._clock, deadline, self._greeting)
        with self._lock:
            if not self._closed:
                self._busy.add(connection)
                return connection, True
        connection.disconnect()
        raise self._refusal()

    def _release(self, connection: RedisConnection) -> None:
        with self._lock:
            self._busy.discard(connection)
            if connection.is_connected and not self._closed and not self._retired:
                if connection not in self._idle:
                    self._idle.append(connection)
                return
        connection.disconnect()

    def _refusal(self) -> TierRefused:
        return TierRefused(RefusedReason.CLOSED, f"{self.endpoint}: the tier is closed")


def _may_be_stale(connection: RedisConnection, error: TierRefused | TierUnreachable) -> bool:
    """Whether a fresh connection may fare better: no byte came back, or the login is not valid any more."""
    if isinstance(error, TierRefused):
        return error.reason == RefusedReason.AUTHENTICATION
    return not connection.answered
