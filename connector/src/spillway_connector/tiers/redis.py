"""The Redis/Valkey tier: one string value per frame, with a time to live that slides on every hit.

    spillway1:<namespace hex>:<key hex>    a frame: 192-byte header, payload
    spillway1:<namespace hex>:document     the namespace document in full

The server bounds its own memory (``maxmemory`` with an eviction policy); this side bounds only the age of entries.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from spillway_connector.errors import (
    RefusedReason,
    TierRefused,
    TierTimeout,
    TierUnreachable,
)
from spillway_connector.namespace import Namespace, explain_difference
from spillway_connector.tiers.frame import HEADER_BYTES, build_header, verify
from spillway_connector.tiers.redis_connection import RedisConnection, refusal
from spillway_connector.tiers.redis_endpoint import RedisEndpoint
from spillway_connector.tiers.resp import ErrorReply, ProtocolError, Reply, encode_set
from spillway_connector.tiers.tier import Clock, StoreOutcome, WallClock

KEY_PREFIX = "spillway1"  # the number is the version of this key layout
LOOKUP_BATCH_KEYS = 1024  # per pipeline: replies (4 bytes each) must fit in socket buffers while we still send

_Result = TypeVar("_Result")


class RedisTier:
    """A tier on one server. See tier.Tier for the contract.

    ttl_seconds: renewed by every load and every repeated store; None keeps entries until the server evicts them.
    connections: the most that are open at once; a thread that finds none free waits for one within its deadline.
    Nothing is connected before the first operation.
    """

    name = "redis"

    def __init__(
        self,
        namespace: Namespace,
        payload_bytes: int,
        endpoint: RedisEndpoint,
        *,
        ttl_seconds: float | None = 86400.0,
        connections: int = 4,
        clock: Clock = time.monotonic,
        wall_clock: WallClock = time.time,
    ) -> None:
        self.payload_bytes = payload_bytes
        self._namespace = namespace
        self._digest = namespace.digest16
        self._endpoint = endpoint
        self._ttl_ms = None if ttl_seconds is None else max(1, int(ttl_seconds * 1000))
        self._prefix = f"{KEY_PREFIX}:{namespace.hex}:".encode("ascii")
        self._clock = clock
        self._wall_clock = wall_clock
        self._slots = threading.BoundedSemaphore(connections)
        self._lock = threading.Lock()
        self._idle: list[RedisConnection] = []
        self._busy: set[RedisConnection] = set()
        self._prepared = False
        self._closed = False

    def prepare(self, deadline: float) -> None:
        if self._prepared:
            return
        stored = self._with_connection(self._stored_document, deadline)
        if stored != self._namespace.document:
            raise TierRefused(
                RefusedReason.NAMESPACE,
                f"{self._endpoint}: {self._prefix.decode()}document describes another layout: "
                f"{explain_difference(self._namespace.document, stored)}; delete it and its blocks if no longer wanted",
            )
        self._prepared = True

    def contains(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        self.prepare(deadline)

        def ask(connection: RedisConnection, deadline: float) -> list[bool]:
            found: list[bool] = []
            for start in range(0, len(keys), LOOKUP_BATCH_KEYS):
                batch = keys[start : start + LOOKUP_BATCH_KEYS]
                replies = connection.pipeline([(b"EXISTS", self._name(key)) for key in batch], deadline)
                found.extend(self._integer(reply) == 1 for reply in replies)
            return found

        return self._with_connection(ask, deadline)

    def load(self, key: bytes, target: memoryview, deadline: float) -> None:
        self.prepare(deadline)
        header = memoryview(bytearray(HEADER_BYTES))
        targets = [header, target]
        name = self._name(key)

        def receive(connection: RedisConnection, deadline: float) -> None:
            if self._ttl_ms is None:
                connection.receive_value((b"GET", name), targets, deadline)
                return
            try:
                connection.receive_value((b"GETEX", name, b"PX", b"%d" % self._ttl_ms), targets, deadline)
            except TierRefused as refused:
                # GETEX counts as a write: a replica or a user without write permission can still read.
                if refused.reason not in (RefusedReason.READ_ONLY, RefusedReason.PERMISSION):
                    raise
                connection.receive_value((b"GET", name), targets, deadline)

        self._with_connection(receive, deadline)
        verify(header, target, namespace=self._digest, key=key, payload_bytes=self.payload_bytes)

    def store(self, key: bytes, source: memoryview, deadline: float) -> StoreOutcome:
        self.prepare(deadline)
        name = self._name(key)

        def send(connection: RedisConnection, deadline: float) -> StoreOutcome:
            # A block that another engine has stored costs one small round trip instead of megabytes.
            renew = (b"EXISTS", name) if self._ttl_ms is None else (b"PEXPIRE", name, b"%d" % self._ttl_ms)
            if self._integer(connection.command(*renew, deadline=deadline)) == 1:
                return StoreOutcome.PRESENT
            header = build_header(self._digest, key, source, created_ms=int(self._wall_clock() * 1000))
            head, tail = encode_set(name, len(header) + source.nbytes, self._ttl_ms)
            reply = connection.send_value([head + header, source, tail], deadline)
            if reply is None:
                return StoreOutcome.PRESENT  # NX: another engine stored it just now
            if isinstance(reply, ErrorReply):
                raise refusal(self._endpoint, reply)
            if reply != b"OK":
                raise ProtocolError(f"{self._endpoint}: SET was answered with {reply!r}")
            return StoreOutcome.STORED

        return self._with_connection(send, deadline)

    def discard(self, key: bytes, deadline: float) -> None:
        def remove(connection: RedisConnection, deadline: float) -> None:
            self._integer(connection.command(b"UNLINK", self._name(key), deadline=deadline))

        self._with_connection(remove, deadline)

    def resident_bytes(self, deadline: float) -> int:
        """The server's ``used_memory``: its other users included, and its own overhead."""

        def ask(connection: RedisConnection, deadline: float) -> int:
            reply = connection.command(b"INFO", b"memory", deadline=deadline)
            if isinstance(reply, ErrorReply):
                raise refusal(self._endpoint, reply)
            for line in reply.splitlines() if isinstance(reply, bytes) else ():
                name, _, value = line.partition(b":")
                if name == b"used_memory" and value.isdigit():
                    return int(value)
            raise ProtocolError(f"{self._endpoint}: INFO memory names no used_memory")

        return self._with_connection(ask, deadline)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            open_connections = [*self._idle, *self._busy]
            self._idle.clear()
        for connection in open_connections:
            connection.close()

    def _stored_document(self, connection: RedisConnection, deadline: float) -> bytes:
        name = self._prefix + b"document"
        ours = self._namespace.document
        # Without a time to live: a few hundred bytes per layout, and an operator can always read what was there.
        written = connection.command(b"SET", name, ours, b"NX", deadline=deadline)
        if written == b"OK":
            return ours
        stored = connection.command(b"GET", name, deadline=deadline)
        if isinstance(stored, bytes):
            return stored
        if stored is None and isinstance(written, ErrorReply):
            # Full or read-only, and never written: nothing contradicts us, and reads may still be of use.
            return ours
        if isinstance(stored, ErrorReply):
            raise refusal(self._endpoint, stored)
        raise ProtocolError(f"{self._endpoint}: GET was answered with {type(stored).__name__}")

    def _integer(self, reply: Reply) -> int:
        if isinstance(reply, ErrorReply):
            raise refusal(self._endpoint, reply)
        if not isinstance(reply, int):
            raise ProtocolError(f"{self._endpoint}: an integer was expected, not {reply!r:.64}")
        return reply

    def _name(self, key: bytes) -> bytes:
        return self._prefix + key.hex().encode("ascii")

    def _with_connection(self, operation: Callable[[RedisConnection, float], _Result], deadline: float) -> _Result:
        """Run ``operation`` on a pooled connection; once more on a fresh one if an idle one turns out to be dead.

        All operations here may be repeated safely. At most two attempts, within the one deadline.
        """
        if not self._slots.acquire(timeout=max(0.0, deadline - self._clock())):
            raise TierTimeout(f"{self._endpoint}: all connections were busy until the deadline")
        try:
            connection, fresh = self._take(deadline)
            try:
                return operation(connection, deadline)
            except TierTimeout:
                raise
            except TierUnreachable:
                if fresh or connection.answered:
                    raise
                self._release(connection)
                self._close_idle()  # they are as old as this one
                connection, _ = self._take(deadline)
                return operation(connection, deadline)
            finally:
                self._release(connection)
        finally:
            self._slots.release()

    def _take(self, deadline: float) -> tuple[RedisConnection, bool]:
        with self._lock:
            self._refuse_when_closed()
            if self._idle:
                connection = self._idle.pop()
                self._busy.add(connection)
                return connection, False
        if self._clock() >= deadline:
            raise TierTimeout(f"{self._endpoint}: the deadline passed before the operation began")
        connection = RedisConnection(self._endpoint, self._clock, deadline)
        with self._lock:
            if self._closed:
                connection.close()
            self._refuse_when_closed()
            self._busy.add(connection)
        return connection, True

    def _release(self, connection: RedisConnection) -> None:
        with self._lock:
            self._busy.discard(connection)
            if connection.usable and not self._closed:
                if connection not in self._idle:
                    self._idle.append(connection)
                return
        connection.close()

    def _close_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise TierRefused(RefusedReason.CLOSED, f"{self._endpoint}: the tier is closed")
