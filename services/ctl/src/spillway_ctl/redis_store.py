"""A Redis or Valkey tier as an operator sees it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence

from spillway_connector.errors import TierCorrupt, TierMiss, TierRefused
from spillway_connector.tiers.inspection import CheckPayload, Damage, Gone, Removal, StoredFrame, StoredNamespace
from spillway_connector.tiers.redis.blocks import StoredBlock
from spillway_connector.tiers.redis.client.connection import RedisConnection
from spillway_connector.tiers.redis.client.endpoint import RedisEndpoint
from spillway_connector.tiers.redis.client.router import RedisRouter
from spillway_connector.tiers.redis.info import read_info
from spillway_connector.tiers.redis.inspect import BLOCKS_AT_ONCE, Progress, RedisInspector
from spillway_connector.tiers.redis.names import RedisNames
from spillway_connector.tiers.tier import Clock
from spillway_ctl.store import Extent

NEVER = math.inf  # a walk takes as long as it takes; each single answer has a deadline of its own


class RedisStore:
    """See store.Store. Nothing is connected before the first question.

    answer_seconds: for one round trip, or the transfer of one value.
    """

    kind = "redis"

    def __init__(self, endpoint: RedisEndpoint, *, answer_seconds: float = 5.0, clock: Clock = time.monotonic) -> None:
        self._endpoint = endpoint
        self._answer_seconds = answer_seconds
        self._clock = clock
        self._inspector = RedisInspector(endpoint, answer_seconds=answer_seconds, clock=clock)
        self._router = RedisRouter(endpoint, 1, clock)  # for what the inspector does not ask
        self._progress = Progress()

    @property
    def location(self) -> str:
        return str(self._endpoint)

    @property
    def layout(self) -> str:
        return str(self._endpoint.topology)

    def now_s(self) -> float:
        return time.time()

    def check(self) -> None:
        self._router.servers(self._soon())
        self.extent()

    def notes(self) -> list[str]:
        return []

    def extent(self) -> Extent:
        servers = self._router.servers(self._soon())
        answers = [self._router.run_at(server, _memory, self._soon()) for server in servers]
        used = sum(answer.get("used_memory", 0) for answer in answers)
        limits = [answer.get("maxmemory", 0) for answer in answers]
        if not all(answers):
            return Extent(None, None, "the login may not ask the server (INFO)")
        limit = sum(limits) if all(limits) else None
        means = "maxmemory" if limit is not None else "no maxmemory is set: the server's machine is the limit"
        if len(servers) > 1:
            means += f" of {len(servers)} servers together"
        return Extent(used, limit, means)

    def namespaces(self) -> Iterator[StoredNamespace]:
        yield from self._inspector.namespaces(NEVER)

    def frames(self, *, headers: bool, namespace_prefix: str = "") -> Iterator[StoredFrame]:
        """Headers are read in any case: a round trip brings many names and their headers alike."""
        self._progress = Progress()
        whole = namespace_prefix if len(namespace_prefix) == 32 else None
        for block in self._inspector.blocks(whole, NEVER, self._progress):
            if block.namespace.startswith(namespace_prefix):
                yield _frame(block)

    def share_walked(self) -> float | None:
        total = self._progress.names_total
        return self._progress.names_seen / total if total else None

    def verify(self, frame: StoredFrame, check_payload: CheckPayload | None = None) -> Damage | None:
        block = _block_of(frame)
        try:
            if check_payload is not None:
                return check_payload(frame, self._inspector.read(block, NEVER))
            self._inspector.verify(block, NEVER)
            return None
        except TierMiss:
            raise Gone from None
        except TierCorrupt as corrupt:
            return Damage(corrupt.reason, str(corrupt))

    def remove(self, frames: Sequence[StoredFrame], *, only_unused: bool) -> Removal:
        """Uses are not recorded here, so ``only_unused`` changes nothing: ages count from the creation."""
        removed = Removal()
        for start in range(0, len(frames), BLOCKS_AT_ONCE):
            batch = frames[start : start + BLOCKS_AT_ONCE]
            values = self._inspector.remove([_block_of(frame) for frame in batch], NEVER)
            found = [frame.stored_bytes for frame, count in zip(batch, values, strict=True) if count]
            removed += Removal(len(found), sum(found))
        return removed

    def sweep(self, namespace: bytes) -> None:
        """Stripes without their block, tenants' indexes and the document, which an engine in use writes again."""
        self._inspector.purge_namespace(namespace.hex(), NEVER)

    def close(self) -> None:
        self._inspector.close()
        self._router.close()

    def _soon(self) -> float:
        return self._clock() + self._answer_seconds


def _frame(block: StoredBlock) -> StoredFrame:
    known = block.damage is None
    return StoredFrame(
        bytes.fromhex(block.namespace),
        block.stored_bytes,
        RedisNames(block.namespace).block(block.key).decode("ascii"),
        block,
        key=block.key,
        tenant=block.tenant if known else None,
        payload_bytes=block.payload_bytes if known else None,
        created_s=block.created_ms / 1000 if known else None,
        damage=None if block.damage is None else Damage(block.damage, "its header cannot be trusted"),
    )


def _block_of(frame: StoredFrame) -> StoredBlock:
    assert isinstance(frame.handle, StoredBlock)
    return frame.handle


def _memory(connection: RedisConnection, deadline: float) -> dict[str, int]:
    """The numbers of INFO memory; empty if the login may not ask for them."""
    try:
        fields = read_info(connection, b"memory", deadline)
    except TierRefused:
        return {}
    return {name: value for name, value in fields.items() if isinstance(value, int)}
