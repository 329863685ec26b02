"""The Redis/Valkey tier: a block is one string value, or several stripes if it is large.

    spillway1:<namespace hex>:<key hex>            a frame: 192-byte header, payload; or the last stripe of a block
    spillway1:<namespace hex>:<key hex>:<index>    the other stripes
    spillway1:<namespace hex>:document             the namespace document in full
    spillway1:<namespace hex>:tenant:<tenant hex>  which blocks a tenant has, where tenants have a quota

Entries have a time to live that slides on every hit. The servers bound their own memory (``maxmemory`` with an eviction
policy); this side bounds only the age of entries.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from spillway_connector.errors import CorruptReason, RefusedReason, TierCorrupt, TierError, TierMiss, TierRefused
from spillway_connector.limits import REDIS_CONNECTIONS, REDIS_PAYLOAD_CONNECTIONS, REDIS_TTL_SECONDS
from spillway_connector.namespace import Namespace, explain_difference, store_id_of
from spillway_connector.tiers.borrow import Borrow, Owned, Span, taken_back
from spillway_connector.tiers.frame import (
    HEADER_BYTES,
    WHOLE,
    FrameHeader,
    Part,
    digest_of_parts,
    digest_of_payload,
    pack_header,
    running_digest,
    verify_digest,
)
from spillway_connector.tiers.redis.client.connection import RedisConnection
from spillway_connector.tiers.redis.client.endpoint import RedisEndpoint, Topology
from spillway_connector.tiers.redis.client.errors import ProtocolError, Redirected, Reply, WrongType, accepted, shown
from spillway_connector.tiers.redis.client.router import RedisRouter
from spillway_connector.tiers.redis.client.value_path import encode_set
from spillway_connector.tiers.redis.info import used_memory_bytes
from spillway_connector.tiers.redis.lanes import Lanes
from spillway_connector.tiers.redis.names import RedisNames
from spillway_connector.tiers.redis.pressure import Pressure
from spillway_connector.tiers.redis.quota import TenantQuotas
from spillway_connector.tiers.redis.stripes import STRIPE_BYTES_MAX, StripePlan, check_together
from spillway_connector.tiers.tier import NO_TENANT, BlockInMemory, Clock, EvictionReason, StoreOutcome, WallClock

STRIPE_GRACE_MS = 60_000  # the commit record expires first; stripes without it are only garbage, never a torn block
DOCUMENT_SECONDS = 60.0  # how often a storing engine checks that the document still exists


class RedisTier:
    """A tier on one server, on the primary that sentinels name, or on a cluster. See tier.Tier for the contract.

    ttl_seconds: renewed by every load and every repeated store; None keeps entries until the server evicts them.
    connections: the most that transfer blocks to or from one server at once; a thread that finds none free waits within
    its deadline. One more is opened for lookups when all are busy.
    payload_connections: over how many of them the stripes of one block are spread.
    tenant_max_bytes: the most that each tenant may hold in this namespace, headers included; above it the tenant's
    oldest blocks are evicted (see quota.py). Blocks without a tenant are not bounded. None sends no extra command.
    stripe_bytes_max: engines that share blocks must agree on it; only tests change it.
    Nothing is connected before the first operation.
    """

    name = "redis"
    has_local_index = False
    renews = True

    def __init__(
        self,
        namespace: Namespace,
        payload_bytes: int,
        endpoint: RedisEndpoint,
        *,
        ttl_seconds: float | None = REDIS_TTL_SECONDS,
        connections: int = REDIS_CONNECTIONS,
        payload_connections: int = REDIS_PAYLOAD_CONNECTIONS,
        tenant_max_bytes: int | None = None,
        stripe_bytes_max: int = STRIPE_BYTES_MAX,
        clock: Clock = time.monotonic,
        wall_clock: WallClock = time.time,
    ) -> None:
        self.payload_bytes = payload_bytes
        self._namespace = namespace
        self._digest = namespace.digest16
        self._endpoint = endpoint
        self._ttl_ms = None if ttl_seconds is None else max(1, int(ttl_seconds * 1000))
        self._names = RedisNames(namespace.hex)
        self._clock = clock
        self._wall_clock = wall_clock
        self._plan = StripePlan.of(payload_bytes, stripe_bytes_max)
        self._router = RedisRouter(endpoint, connections, clock)
        # On a cluster each node has this number, because it is not known beforehand which node has a block.
        self.transfers_at_once = None if endpoint.topology is Topology.CLUSTER else connections
        lanes = min(payload_connections, connections, self._plan.count)
        self._lanes = Lanes(lanes, connections)
        # With all stripes of a block on one server and one connection, the next is requested ahead. A cluster has them
        # on different nodes.
        self._one_stream = lanes == 1 and endpoint.topology is not Topology.CLUSTER
        self._prepared_at: float | None = None
        self._pressure = Pressure(self._router, clock)
        self._quotas = None
        if tenant_max_bytes is not None:
            block_bytes = payload_bytes + self._plan.count * HEADER_BYTES
            self._quotas = TenantQuotas(
                self._names, block_bytes, tenant_max_bytes, self._ttl_ms, clock=clock, wall_clock=wall_clock
            )
        self._receiving = threading.Lock()
        self._received_bytes = 0
        self._evicted_lock = threading.Lock()
        self.evicted_frames = 0  # blocks that this process removed because their tenant was above its quota

    @property
    def under_pressure(self) -> bool:
        """Whether, within the last 30 seconds, a server refused a store at ``maxmemory`` or evicted keys by itself."""
        return self._pressure.high

    @property
    def store_id(self) -> bytes | None:
        """Name the store by the servers' configured address: under two names one server counts as two."""
        return store_id_of(self._endpoint.place, self._digest)

    @property
    def evictions(self) -> Mapping[EvictionReason, int]:
        return {EvictionReason.TENANT: self.evicted_frames}

    @property
    def quarantined(self) -> Mapping[str, int]:
        return {}

    def contains_now(self, keys: Sequence[bytes]) -> list[bool] | None:
        """Return None: only the servers can tell."""
        return None

    def prepare(self, deadline: float) -> None:
        if self._prepared_at is not None:
            return
        stored = self._router.run(self._names.document, self._stored_document, deadline)
        if stored != self._namespace.document:
            raise TierRefused(
                RefusedReason.NAMESPACE,
                f"{self._endpoint}: {self._names.document.decode()} describes another layout: "
                f"{explain_difference(self._namespace.document, stored)}; delete it and its blocks if no longer wanted",
            )
        self._prepared_at = self._clock()

    def contains(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        self.prepare(deadline)
        questions: list[tuple[bytes, ...]] = [(b"EXISTS", self._names.block(key)) for key in keys]
        uses = self._quotas.uses_due() if self._quotas is not None else []
        if not uses:
            return [self._integer(reply) == 1 for reply in self._router.batch(questions, deadline)]
        answers = self._router.attempt([*questions, *uses], deadline)
        return [self._integer(accepted(answer)) == 1 for answer in answers[: len(keys)]]

    def load(self, key: bytes, target: memoryview, deadline: float) -> None:
        self._receive_block(key, self._owned(target), deadline, renew=True)

    def peek(self, key: bytes, target: memoryview, deadline: float) -> None:
        """The time to live stays; what maxmemory-policy makes of the read is the server's."""
        self._receive_block(key, self._owned(target), deadline, renew=False)

    @property
    def received_bytes(self) -> int:
        """See tier.ReceivingTier."""
        return self._received_bytes

    def receive(self, key: bytes, borrow: Borrow, deadline: float) -> None:
        self._receive_block(key, borrow, deadline, renew=True)

    def _owned(self, target: memoryview) -> Owned:
        if target.nbytes != self.payload_bytes:
            raise ValueError(f"target: {target.nbytes} bytes given, {self.payload_bytes} needed")
        return Owned(target)

    def _receive_block(self, key: bytes, borrow: Borrow, deadline: float, *, renew: bool) -> None:
        self.prepare(deadline)
        names = self._plan.names(self._names.block(key))
        headers: list[FrameHeader | None] = [None] * self._plan.count
        commit = self._plan.commit_index

        raws = [memoryview(bytearray(HEADER_BYTES)) for _ in names]
        digests = [running_digest() for _ in names]

        def receive(indices: Sequence[int]) -> None:
            """Receive the values on one connection, and verify each while it and the next arrive."""

            def take_in(place: int, offset: int, stretch: memoryview) -> None:
                with self._receiving:
                    self._received_bytes += stretch.nbytes
                if offset < HEADER_BYTES:
                    digests[indices[place]].reset()  # the value may be received a second time
                else:
                    digests[indices[place]].update(stretch)

            def prove(place: int) -> None:
                index = indices[place]
                start, end = self._plan.ranges[index]
                headers[index] = verify_digest(
                    raws[index],
                    digests[index].digest(),
                    namespace=self._digest,
                    key=key,
                    payload_bytes=end - start,
                    part_index=index,
                    part_count=self._plan.count,
                )

            targets = [[Span.of(raws[index]), Span(borrow, *self._plan.ranges[index])] for index in indices]
            values = [(names[index], self._ttl_of(index) if renew else None) for index in indices]
            self._receive(values, targets, prove, take_in, deadline)

        try:
            order = [commit, *range(commit)]
            if self._one_stream:
                receive(order)
            else:
                self._lanes.run(order, lambda index: receive([index]))
        except TierMiss:
            if headers[commit] is None:
                raise  # no block, or one that is being written now
            raise TierCorrupt(CorruptReason.SHORT, f"{self._endpoint}: stripes of the block are gone") from None
        found = [header for header in headers if header is not None]
        check_together(found)
        if renew and self._quotas is not None:
            self._quotas.use(key, found[commit].tenant)

    def in_memory(self, key: bytes, deadline: float) -> BlockInMemory | None:
        """Return None: blocks are on servers."""
        return None

    def store(self, key: bytes, source: memoryview, deadline: float, tenant: bytes = NO_TENANT) -> StoreOutcome:
        return self.send(key, Owned(source), deadline, tenant)

    def send(self, key: bytes, borrow: Borrow, deadline: float, tenant: bytes = NO_TENANT) -> StoreOutcome:
        if self._prepared_at is not None and self._clock() - self._prepared_at > DOCUMENT_SECONDS:
            self._prepared_at = None  # it may be lost with all other keys: FLUSHALL, or a restart without persistence
        self.prepare(deadline)
        names = self._plan.names(self._names.block(key))
        # A block that another engine has stored takes one small round trip, no payload.
        quotas = self._quotas if tenant != NO_TENANT else None
        counting = [] if quotas is None else quotas.count(key, tenant)
        answers = self._router.attempt([*self._renewals(names), *counting], deadline)
        present = [self._integer(accepted(answer)) == 1 for answer in answers[: len(names)]]
        if all(present):
            if quotas is not None:
                quotas.written(key, tenant)
            return StoreOutcome.PRESENT
        try:
            if quotas is not None:
                counted = [accepted(answer) for answer in answers[len(names) :]]
                self._make_room(quotas, quotas.victims(key, counted), tenant, deadline)
            if present[-1] and len(names) > 1:
                self._router.batch([(b"UNLINK", names[-1])], deadline)  # a commit record without its stripes
            outcome = self._write(names, self._headers(key, borrow, tenant), borrow, deadline)
        except TierRefused as refused:
            if refused.reason == RefusedReason.OUT_OF_MEMORY:
                self._pressure.refused()
            if quotas is not None and refused.reason != RefusedReason.CLOSED:
                # A key of another type in the place of the sorted set is removed; the next store counts again.
                wrong = isinstance(refused, WrongType)
                self._clean_up([quotas.drop(tenant) if wrong else quotas.remove([key], tenant)], deadline)
            raise
        if quotas is not None:
            quotas.written(key, tenant)
        self._pressure.sample(deadline)
        return outcome

    def _write(self, names: list[bytes], headers: list[bytes], borrow: Borrow, deadline: float) -> StoreOutcome:
        commit = self._plan.commit_index
        payloads = [Span(borrow, start, end) for start, end in self._plan.ranges]

        def send(index: int) -> None:
            # Without NX: a stripe without its commit record is a leftover, perhaps with other bits.
            self._send(names[index], self._ttl_of(index), headers[index], payloads[index], deadline)

        try:
            self._lanes.run(range(commit), send)
            written = self._send(
                names[commit], self._ttl_ms, headers[commit], payloads[commit], deadline, only_if_absent=True
            )
        except TierRefused as refused:
            if refused.reason != RefusedReason.CLOSED and commit:
                self._clean_up([(b"UNLINK", name) for name in names[:commit]], deadline)
            raise
        # NX: another engine may have stored the block meanwhile.
        return StoreOutcome.STORED if written else StoreOutcome.PRESENT

    def renew(self, keys: Sequence[bytes], deadline: float, tenant: bytes = NO_TENANT) -> None:
        """Renews the time to live, the idle time that servers evict by, and the order within the tenant's quota."""
        self.prepare(deadline)
        blocks = [self._plan.names(self._names.block(key)) for key in keys]
        commands = [command for names in blocks for command in self._renewals(names, touch=True)]
        answers = self._router.attempt(commands, deadline)
        if self._quotas is not None:
            for key, answer in zip(keys, answers[self._plan.count - 1 :: self._plan.count], strict=True):
                if answer == 1:
                    self._quotas.use(key, tenant)

    def discard(self, key: bytes, deadline: float) -> None:
        names = self._plan.names(self._names.block(key))
        for reply in self._router.batch([(b"UNLINK", name) for name in reversed(names)], deadline):
            self._integer(reply)

    def resident_bytes(self, deadline: float) -> int:
        """``used_memory`` of all servers: other users and the servers' overhead included."""
        return sum(self._router.each_server(used_memory_bytes, deadline))

    def close(self) -> None:
        self._router.close()
        self._lanes.close()

    def _stored_document(self, connection: RedisConnection, deadline: float) -> bytes:
        name = self._names.document
        ours = self._namespace.document
        while True:
            # Without a time to live: a few hundred bytes per layout, for operators to read after the blocks expired.
            refused = False
            try:
                written = connection.command(b"SET", name, ours, b"NX", deadline=deadline)
                if written == b"OK":
                    return ours
                if written is not None:
                    raise ProtocolError(f"{self._endpoint}: SET was answered with {shown(written)}")
            except (Redirected, ProtocolError):
                raise
            except TierRefused:
                refused = True  # full or read-only: whether another document is there decides
            try:
                stored = connection.command(b"GET", name, deadline=deadline)
            except WrongType as error:
                raise TierRefused(
                    RefusedReason.NAMESPACE,
                    f"{self._endpoint}: {name.decode()} is not a string, so another program uses it; delete it",
                ) from error
            if isinstance(stored, bytes):
                return stored
            if stored is not None:
                raise ProtocolError(f"{self._endpoint}: GET was answered with {type(stored).__name__}")
            if refused:
                return ours  # never written: nothing contradicts it, and loads may still succeed
            # else it was removed between the two commands

    def _receive(
        self,
        values: list[tuple[bytes, int | None]],
        targets: list[list[Span]],
        received: Callable[[int], None],
        arrived: Callable[[int, int, memoryview], None],
        deadline: float,
    ) -> None:
        """Receive values of one server, each given by its name and the time to live to renew."""
        reads = [(b"GET", name) for name, _ in values]
        renewing = [
            (b"GET", name) if ttl_ms is None else (b"GETEX", name, b"PX", b"%d" % ttl_ms) for name, ttl_ms in values
        ]

        def receive(connection: RedisConnection, deadline: float) -> None:
            try:
                connection.receive_values(renewing, targets, deadline, received, arrived)
            except TierRefused as refused:
                # GETEX is a write: a replica, or a user without write permission, can still read.
                if renewing == reads or refused.reason not in (RefusedReason.READ_ONLY, RefusedReason.PERMISSION):
                    raise
                connection.receive_values(reads, targets, deadline, received, arrived)

        self._router.run(values[0][0], receive, deadline)

    def _send(
        self,
        name: bytes,
        ttl_ms: int | None,
        header: bytes,
        payload: Span,
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
            raise ProtocolError(f"{connection.endpoint}: SET was answered with {shown(reply)}")

        return self._router.run(name, send, deadline)

    def _headers(self, key: bytes, borrow: Borrow, tenant: bytes) -> list[bytes]:
        """One for each stripe, whose checksums need the memory for one pass over a stripe at a time."""
        digests = [_digest_of(Span(borrow, start, end)) for start, end in self._plan.ranges]
        together = digest_of_parts(digests)
        count = self._plan.count
        created_ms = int(self._wall_clock() * 1000)
        return [
            pack_header(
                self._digest,
                key,
                end - start,
                digests[index],
                created_ms=created_ms,
                part=WHOLE if count == 1 else Part(index, count, together),
                tenant=tenant,
            )
            for index, (start, end) in enumerate(self._plan.ranges)
        ]

    def _renewals(self, names: list[bytes], *, touch: bool = False) -> list[tuple[bytes, ...]]:
        """touch: count even a value without a time to live as used."""
        renewals: list[tuple[bytes, ...]] = []
        for index, name in enumerate(names):
            ttl_ms = self._ttl_of(index)
            renewals.append(
                (b"TOUCH" if touch else b"EXISTS", name) if ttl_ms is None else (b"PEXPIRE", name, b"%d" % ttl_ms)
            )
        return renewals

    def _ttl_of(self, index: int) -> int | None:
        if self._ttl_ms is None or index == self._plan.commit_index:
            return self._ttl_ms
        return self._ttl_ms + STRIPE_GRACE_MS

    def _make_room(self, quotas: TenantQuotas, victims: list[bytes], tenant: bytes, deadline: float) -> None:
        if not victims:
            return
        blocks = [self._plan.names(self._names.block(victim)) for victim in victims]
        # Commit records first. Members last: a block that may still exist is never uncounted.
        replies = self._router.batch([(b"UNLINK", name) for names in blocks for name in reversed(names)], deadline)
        self._router.batch([quotas.remove(victims, tenant)], deadline)
        with self._evicted_lock:
            self.evicted_frames += sum(self._integer(reply) for reply in replies[:: self._plan.count])

    def _clean_up(self, commands: list[tuple[bytes, ...]], deadline: float) -> None:
        """Clean up after a store that was refused. If this fails too, the leftovers expire."""
        try:
            self._router.attempt(commands, deadline)
        except TierError:
            pass  # the refusal of the store is the error to report

    def _integer(self, reply: Reply) -> int:
        if not isinstance(reply, int):
            raise ProtocolError(f"{self._endpoint}: an integer was expected, not {shown(reply)}")
        return reply


def _digest_of(span: Span) -> bytes:
    memory = span.borrow.begin()
    if memory is None:
        raise taken_back()
    try:
        return digest_of_payload(memory[span.start : span.end])
    finally:
        del memory
        span.borrow.end()
