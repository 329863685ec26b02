"""The connections to one server, or to the primary that sentinels name: redis-py's pools, within deadlines.

redis-py makes connections, keeps idle ones, follows the primary and closes what is left. Its BlockingConnectionPool
waits for one timeout, not to a deadline, so threads wait at semaphores here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

from redis.connection import ConnectionPool
from redis.sentinel import SentinelConnectionPool

from spillway_connector.errors import RefusedReason, TierRefused, TierTimeout, TierUnreachable
from spillway_connector.tiers.redis.client.connection import RESP_VERSION, RedisConnection, connection_class
from spillway_connector.tiers.redis.client.deadline_socket import connect_by
from spillway_connector.tiers.redis.client.endpoint import RedisEndpoint
from spillway_connector.tiers.tier import Clock

_Result = TypeVar("_Result")


class RedisPool(ConnectionPool):
    """A thread that finds no connection free waits for one within its deadline. Nothing is connected before use.

    One connection more than ``connections`` exists for ``brief`` operations while all others are busy: a lookup waits
    behind other lookups at most, never behind megabytes. greeting: see RedisConnection. options: of the SentinelPool.
    """

    def __init__(
        self, endpoint: RedisEndpoint, connections: int, clock: Clock, greeting: tuple[bytes, ...] = (), **options: Any
    ) -> None:
        self.endpoint = endpoint
        self._clock = clock
        self._slots = threading.BoundedSemaphore(connections)
        self._reserve = threading.BoundedSemaphore(1)
        self._closed = False
        super().__init__(
            connection_class=connection_class(endpoint),
            max_connections=connections + 1,
            endpoint=endpoint,
            clock=clock,
            greeting=greeting,
            protocol=RESP_VERSION,
            **options,
        )

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
        connect_deadline: for establishing a connection, if time is to be left for another server.
        brief: it moves few bytes.
        """
        slot = self._slot(brief, deadline)
        connect_until = deadline if connect_deadline is None else min(deadline, connect_deadline)
        try:
            connection = self._take(connect_until)
            try:
                return operation(connection, deadline)
            except TierTimeout:
                raise
            except (TierUnreachable, TierRefused) as error:
                if not connection.reused or not _may_be_stale(connection, error):
                    raise
                connection.disconnect()
                with connect_by(connect_until):
                    connection.connect()
                return operation(connection, deadline)
            finally:
                self.release(connection)
        finally:
            slot.release()

    def get_connection(self, *_: Any, **__: Any) -> RedisConnection:
        """Return a connection as redis-py does, without metrics and events, which add 10 us of CPU to a lookup's 35.

        A connection that the server closed while it was idle, or on which something arrived unasked, is replaced.
        """
        with self._lock:
            connection = self._available_connections.pop() if self._available_connections else self.make_connection()
            self._in_use_connections.add(connection)
        try:
            if connection.can_read():
                connection.disconnect()
            connection.connect()
        except BaseException:
            self.release(connection)
            raise
        return cast("RedisConnection", connection)

    def release(self, connection: Any) -> None:
        with self._lock:
            if self._closed or connection.should_reconnect() or not self.owns_connection(connection):
                connection.disconnect()
            self._in_use_connections.discard(connection)
            self._available_connections.append(connection)

    def close(self) -> None:
        """Close, which ends the waits of other threads at once."""
        with self._lock:
            self._closed = True
            self.disconnect(inuse_connections=False)
            for connection in self._in_use_connections:
                connection.interrupt()

    def retire(self) -> None:
        """The server holds no keys any more: close each connection once its operation has ended."""
        self.update_active_connections_for_reconnect()
        self.disconnect_free_connections()

    def _slot(self, brief: bool, deadline: float) -> threading.Semaphore:
        """The slot that was taken."""
        if brief and self._slots.acquire(blocking=False):
            return self._slots
        slot = self._reserve if brief else self._slots
        if not slot.acquire(timeout=max(0.0, deadline - self._clock())):
            raise TierTimeout(f"{self.endpoint}: all connections were busy until the deadline")
        return slot

    def _take(self, deadline: float) -> RedisConnection:
        if not self._closed:
            with connect_by(deadline):
                connection = self.get_connection()
            if not self._closed:
                return connection
            self.release(connection)
        raise closed(self.endpoint)


class SentinelPool(RedisPool, SentinelConnectionPool):
    """The same to the primary. If the sentinels name another one, connections to the former are closed.

    It takes ``service_name`` and ``sentinel_manager``, whose ``discover_master`` it calls to connect.
    """


def closed(endpoint: RedisEndpoint) -> TierRefused:
    return TierRefused(RefusedReason.CLOSED, f"{endpoint}: the tier is closed")


def _may_be_stale(connection: RedisConnection, error: TierRefused | TierUnreachable) -> bool:
    """Whether a fresh connection may fare better: no byte came back, or the login is not valid any more."""
    if isinstance(error, TierRefused):
        return error.reason == RefusedReason.AUTHENTICATION
    return not connection.answered
