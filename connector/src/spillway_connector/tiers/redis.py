"""The Redis/Valkey tier: a block is one string value, or several stripes where it is large.

    spillway1:<namespace hex>:<key hex>            a frame: 192-byte header, payload; or the last stripe of a block
    spillway1:<namespace hex>:<key hex>:<index>    the other stripes
    spillway1:<namespace hex>:document             the namespace document in full

Entries have a time to live that slides on every hit. The servers bound their own memory (``maxmemory`` with an eviction
policy); this side bounds only the age of entries.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from spillway_connector.errors import CorruptReason, RefusedReason, TierCorrupt, TierError, TierMiss, TierRefused
from spillway_connector.namespace import Namespace, explain_difference
from spillway_connector.tiers.frame import (
    HEADER_BYTES,
    WHOLE,
    FrameHeader,
    Part,
    build_header,
    digest_of_parts,
    digest_of_payload,
    verify,
)
from spillway_connector.tiers.redis_connection import RedisConnection, refusal
from spillway_connector.tiers.redis_endpoint import RedisEndpoint
from spillway_connector.tiers.redis_router import RedisRouter
from spillway_connector.tiers.redis_stripes import STRIPE_BYTES_MAX, StripePlan
from spillway_connector.tiers.resp import ErrorReply, ProtocolError, Reply, encode_set
from spillway_connector.tiers.tier import Clock, StoreOutcome, WallClock

KEY_PREFIX = "spillway1"  # the number is the version of this key layout
STRIPE_GRACE_MS = 60_000  # the commit record expires first; stripes without it are only garbage, never a torn block
DOCUMENT_SECONDS = 60.0  # how often a storing engine looks whether the document is still there


class RedisTier:
    """A tier on one server, on the primary that sentinels name, or on a cluster. See tier.Tier for the contract.

    ttl_seconds: renewed by every load and every repeated store; None keeps entries until the server evicts them.
    connections: the most that are open at once to one server; a thread that finds none free waits within its deadline.
    payload_connections: over how many of them the stripes of one block are spread.
    stripe_bytes_max: engines that share blocks must agree on it; only tests have reason to change it.
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
        payload_connections: int = 1,
        stripe_bytes_max: int = STRIPE_BYTES_MAX,
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
        self._plan = StripePlan.of(payload_bytes, stripe_bytes_max)
        self._router = RedisRouter(endpoint, connections, clock)
        self._lanes = min(payload_connections, connections, self._plan.count)
        self._helpers = ThreadPoolExecutor(connections, "spillway-redis-stripe") if self._lanes > 1 else None
        self._prepared_at: float | None = None

    def prepare(self, deadline: float) -> None:
        if self._prepared_at is not None:
            return
        stored = self._router.run(self._prefix + b"document", self._stored_document, deadline)
        if stored != self._namespace.document:
            raise TierRefused(
                RefusedReason.NAMESPACE,
                f"{self._endpoint}: {self._prefix.decode()}document describes another layout: "
                f"{explain_difference(self._namespace.document, stored)}; delete it and its blocks if no longer wanted",
            )
        self._prepared_at = self._clock()

    def contains(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        self.prepare(deadline)
        replies = self._router.batch([(b"EXISTS", self._name(key)) for key in keys], deadline)
        return [self._integer(reply) == 1 for reply in replies]

    def load(self, key: bytes, target: memoryview, deadline: float) -> None:
        self.prepare(deadline)
        names = self._plan.names(self._name(key))
        headers: list[FrameHeader | None] = [None] * self._plan.count
        commit = self._plan.commit_index

        def receive(index: int) -> None:
            start, end = self._plan.ranges[index]
            raw = memoryview(bytearray(HEADER_BYTES))
            self._receive(names[index], self._ttl_of(index), [raw, target[start:end]], deadline)
            headers[index] = verify(
                raw,
                target[start:end],
                namespace=self._digest,
                key=key,
                payload_bytes=end - start,
                part_index=index,
                part_count=self._plan.count,
            )

        try:
            self._in_lanes([commit, *range(commit)], receive)
        except TierMiss:
            if headers[commit] is None:
                raise  # no block, or one that is being written just now
            raise TierCorrupt(CorruptReason.SHORT, f"{self._endpoint}: stripes of the block are gone") from None
        self._plan.check_together([header for header in headers if header is not None])

    def store(self, key: bytes, source: memoryview, deadline: float) -> StoreOutcome:
        if self._prepared_at is not None and self._clock() - self._prepared_at > DOCUMENT_SECONDS:
            self._prepared_at = None  # it may have gone with all else: FLUSHALL, or a restart without persistence
        self.prepare(deadline)
        names = self._plan.names(self._name(key))
        # A block that another engine has stored costs one small round trip instead of megabytes.
        present = [self._integer(reply) == 1 for reply in self._router.batch(self._renewals(names), deadline)]
        if all(present):
            return StoreOutcome.PRESENT
        if present[-1] and len(names) > 1:
            self._router.batch([(b"UNLINK", names[-1])], deadline)  # it commits nothing any more
        headers = self._headers(key, source)
        commit = self._plan.commit_index

        def send(index: int) -> None:
            start, end = self._plan.ranges[index]
            # Without NX: a stripe that lies there without its block is a leftover, perhaps of other bits.
            self._send(names[index], self._ttl_of(index), headers[index], source[start:end], deadline)

        try:
            self._in_lanes(range(commit), send)
            start, end = self._plan.ranges[commit]
            written = self._send(
                names[commit], self._ttl_ms, headers[commit], source[start:end], deadline, only_if_absent=True
            )
        except TierRefused as refused:
            if refused.reason != RefusedReason.CLOSED and commit:
                self._clean_up(names[:commit], deadline)
            raise
        # NX: another engine may have stored the block just now.
        return StoreOutcome.STORED if written else StoreOutcome.PRESENT

    def discard(self, key: bytes, deadline: float) -> None:
        names = self._plan.names(self._name(key))
        for reply in self._router.batch([(b"UNLINK", name) for name in reversed(names)], deadline):
            self._integer(reply)

    def resident_bytes(self, deadline: float) -> int:
        """The servers' ``used_memory``: their other users included, and their own overhead."""
        return sum(self._router.each_server(self._used_memory, deadline))

    def close(self) -> None:
        self._router.close()
        if self._helpers is not None:
            self._helpers.shutdown(wait=False, cancel_futures=True)

    def _stored_document(self, connection: RedisConnection, deadline: float) -> bytes:
        name = self._prefix + b"document"
        ours = self._namespace.document
        # Without a time to live: a few hundred bytes per layout, and an operator can always read what was there.
        written = connection.command(b"SET", name, ours, b"NX", deadline=deadline)
        if written == b"OK":
            return ours
        if isinstance(written, ErrorReply) and written.code in ("MOVED", "ASK"):
            raise refusal(connection.endpoint, written)
        stored = connection.command(b"GET", name, deadline=deadline)
        if isinstance(stored, bytes):
            return stored
        if stored is None and isinstance(written, ErrorReply):
            # Full or read-only, and never written: nothing contradicts us, and reads may still be of use.
            return ours
        if isinstance(stored, ErrorReply):
            raise refusal(connection.endpoint, stored)
        raise ProtocolError(f"{self._endpoint}: GET was answered with {type(stored).__name__}")

    def _receive(self, name: bytes, ttl_ms: int | None, targets: list[memoryview], deadline: float) -> None:
        def receive(connection: RedisConnection, deadline: float) -> None:
            if ttl_ms is None:
                connection.receive_value((b"GET", name), targets, deadline)
                return
            try:
                connection.receive_value((b"GETEX", name, b"PX", b"%d" % ttl_ms), targets, deadline)
            except TierRefused as refused:
                # GETEX counts as a write: a replica or a user without write permission can still read.
                if refused.reason not in (RefusedReason.READ_ONLY, RefusedReason.PERMISSION):
                    raise
                connection.receive_value((b"GET", name), targets, deadline)

        self._router.run(name, receive, deadline)

    def _send(
        self,
        name: bytes,
        ttl_ms: int | None,
        header: bytes,
        payload: memoryview,
        deadline: float,
        *,
        only_if_absent: bool = False,
    ) -> bool:
        """Write one value; False when ``only_if_absent`` and there was one."""
        head, tail = encode_set(name, len(header) + payload.nbytes, ttl_ms, only_if_absent=only_if_absent)

        def send(connection: RedisConnection, deadline: float) -> bool:
            reply = connection.send_value([head + header, payload, tail], deadline)
            if reply == b"OK" or (reply is None and only_if_absent):
                return reply is not None
            if isinstance(reply, ErrorReply):
                raise refusal(connection.endpoint, reply)
            raise ProtocolError(f"{connection.endpoint}: SET was answered with {reply!r:.64}")

        return self._router.run(name, send, deadline)

    def _headers(self, key: bytes, source: memoryview) -> list[bytes]:
        payloads = [source[start:end] for start, end in self._plan.ranges]
        digests = [digest_of_payload(payload) for payload in payloads]
        together = digest_of_parts(digests)
        count = self._plan.count
        created_ms = int(self._wall_clock() * 1000)
        return [
            build_header(
                self._digest,
                key,
                payload,
                created_ms=created_ms,
                part=WHOLE if count == 1 else Part(index, count, together),
                payload_digest=digests[index],
            )
            for index, payload in enumerate(payloads)
        ]

    def _renewals(self, names: list[bytes]) -> list[tuple[bytes, ...]]:
        renewals: list[tuple[bytes, ...]] = []
        for index, name in enumerate(names):
            ttl_ms = self._ttl_of(index)
            renewals.append((b"EXISTS", name) if ttl_ms is None else (b"PEXPIRE", name, b"%d" % ttl_ms))
        return renewals

    def _ttl_of(self, index: int) -> int | None:
        if self._ttl_ms is None or index == self._plan.commit_index:
            return self._ttl_ms
        return self._ttl_ms + STRIPE_GRACE_MS

    def _in_lanes(self, indices: Sequence[int], act: Callable[[int], None]) -> None:
        """Do ``act`` for every index, begun in order, here and in helper threads that are free right now.

        Returns or raises the first error only when no thread is at it any more: they work in the caller's memory.
        """
        waiting = deque(indices)
        errors: list[Exception] = []

        def lane() -> None:
            while waiting and not errors:
                try:
                    index = waiting.popleft()
                except IndexError:
                    return
                try:
                    act(index)
                except Exception as error:
                    errors.append(error)

        helpers = []
        if self._helpers is not None and len(indices) > 1:
            try:
                helpers = [self._helpers.submit(lane) for _ in range(min(self._lanes, len(indices)) - 1)]
            except RuntimeError:
                pass  # closed meanwhile: the router says so
        lane()
        for helper in helpers:
            if not helper.cancel():
                helper.result()
        if errors:
            raise errors[0]

    def _clean_up(self, names: list[bytes], deadline: float) -> None:
        try:
            self._router.batch([(b"UNLINK", name) for name in names], deadline)
        except TierError:
            pass  # they expire; the refusal of the store is the error to report

    def _used_memory(self, connection: RedisConnection, deadline: float) -> int:
        reply = connection.command(b"INFO", b"memory", deadline=deadline)
        if isinstance(reply, ErrorReply):
            raise refusal(connection.endpoint, reply)
        for line in reply.splitlines() if isinstance(reply, bytes) else ():
            name, _, value = line.partition(b":")
            if name == b"used_memory" and value.isdigit():
                return int(value)
        raise ProtocolError(f"{connection.endpoint}: INFO memory names no used_memory")

    def _integer(self, reply: Reply) -> int:
        if not isinstance(reply, int):
            raise ProtocolError(f"{self._endpoint}: an integer was expected, not {reply!r:.64}")
        return reply

    def _name(self, key: bytes) -> bytes:
        return self._prefix + key.hex().encode("ascii")
