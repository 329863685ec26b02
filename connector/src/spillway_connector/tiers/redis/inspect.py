"""Inspection of a Redis store, for operators: which namespaces and blocks it has, valid or damaged.

SCAN finds all keys on every server, a few hundred in each step, so that a store in use is not slowed down, and memory
use does not depend on the store's size. A key that is written or removed meanwhile may or may not be found; while slots
of a cluster migrate, a block may be found twice. Only :meth:`RedisInspector.remove` and
:meth:`RedisInspector.purge_namespace` write. The rest changes neither a time to live nor, if the server allows
``CLIENT NO-TOUCH``, the idle time that decides evictions.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from spillway_connector.errors import CorruptReason, RefusedReason, TierCorrupt, TierError, TierMiss, TierRefused
from spillway_connector.tiers.frame import HEADER_BYTES, FrameHeader, verify
from spillway_connector.tiers.inspection import StoredNamespace
from spillway_connector.tiers.redis.blocks import Head, StoredBlock, from_commit, read_head, with_first
from spillway_connector.tiers.redis.client.connection import RedisConnection
from spillway_connector.tiers.redis.client.endpoint import Address, RedisEndpoint
from spillway_connector.tiers.redis.client.errors import ProtocolError, Reply, WrongType, shown
from spillway_connector.tiers.redis.client.router import RedisRouter
from spillway_connector.tiers.redis.names import KEY_PREFIX, RedisName, RedisNames, parse_name
from spillway_connector.tiers.redis.stripes import check_together
from spillway_connector.tiers.tier import Clock

SCAN_NAMES = 512  # of one SCAN; about 0.2 ms of the server's time
BLOCKS_AT_ONCE = 128  # whose headers are read, or which are removed, in one round trip
NAMESPACES_MAX = 65_536  # of one listing

_Item = TypeVar("_Item")


@dataclass(slots=True)
class Progress:
    """Progress of one scan of the store, updated in place. ``names_total``: all keys of the servers at its start."""

    names_seen: int = 0
    names_total: int = 0


class RedisInspector:
    """One connection to each server of ``endpoint``. Not for several threads at once.

    answer_seconds: the most that one round trip, or the transfer of one stripe, may take; ``deadline`` bounds a whole
    scan. All methods raise TierRefused, TierUnreachable, TierTimeout; a generator may be dropped at any point.
    """

    def __init__(self, endpoint: RedisEndpoint, *, answer_seconds: float = 5.0, clock: Clock = time.monotonic) -> None:
        self.endpoint = endpoint
        self._answer_seconds = answer_seconds
        self._clock = clock
        # Unknown before version 7.2, and the user may not have the permission.
        self._router = RedisRouter(endpoint, 1, clock, greeting=(b"CLIENT", b"NO-TOUCH", b"ON"))

    def namespaces(self, deadline: float) -> list[StoredNamespace]:
        """All namespaces of which anything is stored, in order of their digests."""
        found: set[str] = set()
        for name in self._names(KEY_PREFIX.encode() + b":*", deadline, Progress()):
            parsed = parse_name(name)
            if parsed is None:
                continue
            found.add(parsed.namespace)
            if len(found) > NAMESPACES_MAX:
                raise TierRefused(RefusedReason.OTHER, f"{self.endpoint}: more than {NAMESPACES_MAX} namespaces")
        return [StoredNamespace(bytes.fromhex(each), self.document(each, deadline)) for each in sorted(found)]

    def document(self, namespace: str, deadline: float) -> bytes | None:
        """The document of ``namespace`` (32 hex digits), None if there is none."""
        [reply] = self._router.attempt([(b"GET", RedisNames(namespace).document)], self._step(deadline))
        if isinstance(reply, TierError):
            if isinstance(reply, WrongType):
                return None
            raise reply
        return reply if isinstance(reply, bytes) else None

    def blocks(self, namespace: str | None, deadline: float, progress: Progress | None = None) -> Iterator[StoredBlock]:
        """Every block of ``namespace``, or of all if it is None, from its headers alone (192 or 384 bytes each)."""
        pattern = (KEY_PREFIX.encode() + b":*") if namespace is None else RedisNames(namespace).prefix + b"*"
        found = (parse_name(name) for name in self._names(pattern, deadline, progress or Progress()))
        commits = (name for name in found if name is not None and name.key is not None and name.stripe is None)
        for batch in _batched(commits, BLOCKS_AT_ONCE):
            yield from self._describe(batch, deadline)

    def verify(self, block: StoredBlock, deadline: float) -> None:
        """Read the whole block and verify its checksums. Raises TierMiss if it does not exist any more, TierCorrupt.

        Needs neither the namespace's document nor the key of encrypted blocks: checksums cover the stored bytes.
        """
        for _ in self._verified(block, deadline):
            pass

    def read(self, block: StoredBlock, deadline: float) -> memoryview:
        """The verified payload of a block, all stripes together. Raises what :meth:`verify` raises."""
        payloads = list(self._verified(block, deadline))
        return payloads[0] if len(payloads) == 1 else memoryview(bytearray().join(payloads))

    def remove(self, blocks: Iterable[StoredBlock], deadline: float) -> list[int]:
        """Remove these blocks; returns how many values (Redis keys) of each existed and were removed.

        Commit records are removed first, so that a reader gets a miss, not a block without its stripes. A block that an
        engine stored again meanwhile is removed too, and recomputed when it is needed.
        """
        commits: list[bytes] = []
        stripes: list[tuple[int, bytes]] = []  # and which of the blocks each is of
        for at, block in enumerate(blocks):
            names = RedisNames(block.namespace)
            commits.append(names.block(block.key))
            stripes += [(at, names.stripe(block.key, index)) for index in range(block.stripes - 1)]
        removed = list(self._unlink(commits, deadline))
        for (at, _), values in zip(stripes, self._unlink((name for _, name in stripes), deadline), strict=True):
            removed[at] += values
        return removed

    def purge_namespace(self, namespace: str, deadline: float) -> int:
        """Remove everything of ``namespace``: blocks, orphaned stripes, tenants' indexes and, last, the document.

        Returns how many values were removed. Engines that still use it get misses, store blocks again, and write the
        document again within a minute.
        """
        names = RedisNames(namespace)
        found = self._names(names.prefix + b"*", deadline, Progress())
        ours = (name for name in found if name != names.document and parse_name(name) is not None)
        return sum(self._unlink(ours, deadline)) + sum(self._unlink([names.document], deadline))

    def close(self) -> None:
        self._router.close()

    def _verified(self, block: StoredBlock, deadline: float) -> Iterator[memoryview]:
        """The payloads of all stripes, each verified; that they are of one block is verified after the last."""
        if block.damage is not None:
            raise TierCorrupt(block.damage, f"{block.key.hex()}: its header cannot be trusted")
        names = RedisNames(block.namespace)
        digest = bytes.fromhex(block.namespace)
        commit = block.stripes - 1
        headers: list[FrameHeader] = []
        for index in range(block.stripes):
            name = names.block(block.key) if index == commit else names.stripe(block.key, index)
            try:
                frame = self._value(name, deadline)
            except TierMiss:
                if index == commit:
                    raise
                raise TierCorrupt(CorruptReason.SHORT, f"{name.decode()}: the stripe does not exist") from None
            payload = frame[HEADER_BYTES:]
            headers.append(
                verify(
                    frame[:HEADER_BYTES],
                    payload,
                    namespace=digest,
                    key=block.key,
                    payload_bytes=payload.nbytes,
                    part_index=index,
                    part_count=block.stripes,
                )
            )
            yield payload
        check_together(headers)

    def _step(self, deadline: float) -> float:
        return min(deadline, self._clock() + self._answer_seconds)

    def _names(self, pattern: bytes, deadline: float, progress: Progress) -> Iterator[bytes]:
        """All keys that match ``pattern``, server by server."""
        servers = self._router.servers(self._step(deadline))
        progress.names_total += sum(
            self._router.run_at(server, self._names_held, self._step(deadline)) for server in servers
        )
        for server in servers:
            cursor = b"0"
            while True:
                cursor, names = self._scan(server, cursor, pattern, deadline)
                progress.names_seen = min(progress.names_seen + SCAN_NAMES, progress.names_total)
                yield from names
                if cursor == b"0":
                    break
        progress.names_seen = progress.names_total

    def _scan(self, server: Address, cursor: bytes, pattern: bytes, deadline: float) -> tuple[bytes, list[bytes]]:
        def ask(connection: RedisConnection, deadline: float) -> tuple[bytes, list[bytes]]:
            reply = connection.command(
                b"SCAN", cursor, b"MATCH", pattern, b"COUNT", b"%d" % SCAN_NAMES, deadline=deadline
            )
            match reply:
                case [bytes(onward), list(names)] if onward.isdigit():
                    return onward, [name for name in names if isinstance(name, bytes)]
            raise _unexpected(connection, "SCAN", reply)

        return self._router.run_at(server, ask, self._step(deadline))

    def _names_held(self, connection: RedisConnection, deadline: float) -> int:
        reply = connection.command(b"DBSIZE", deadline=deadline)
        if not isinstance(reply, int):
            raise _unexpected(connection, "DBSIZE", reply)
        return reply

    def _describe(self, names: Iterable[RedisName], deadline: float) -> Iterator[StoredBlock]:
        """Blocks from their headers; those that do not exist any more are left out."""
        wanted = [(name.namespace, name.key) for name in names if name.key is not None]
        commits = [RedisNames(namespace).block(key) for namespace, key in wanted]
        described: list[StoredBlock] = []
        heads = self._heads(commits, deadline)
        for (namespace, key), head in zip(wanted, heads, strict=True):
            if head.there:
                described.append(from_commit(StoredBlock(namespace, key, ttl_ms=head.ttl_ms), head))
        # In a striped block all stripes but the last have the size of the first.
        striped = [block for block in described if block.stripes > 1]
        firsts = self._heads([RedisNames(block.namespace).stripe(block.key, 0) for block in striped], deadline)
        complete = {id(block): with_first(block, head) for block, head in zip(striped, firsts, strict=True)}
        for block in described:
            yield complete.get(id(block), block)

    def _heads(self, names: list[bytes], deadline: float) -> list[Head]:
        last = b"%d" % (HEADER_BYTES - 1)
        commands: list[tuple[bytes, ...]] = []
        for name in names:
            commands += [(b"GETRANGE", name, b"0", last), (b"STRLEN", name), (b"PTTL", name)]
        replies = self._router.attempt(commands, self._step(deadline)) if commands else []
        return [read_head(*replies[at : at + 3]) for at in range(0, len(replies), 3)]

    def _value(self, name: bytes, deadline: float) -> memoryview:
        """A whole value. Raises TierMiss if there is none."""
        [length] = self._router.batch([(b"STRLEN", name)], self._step(deadline))
        if not isinstance(length, int) or length < HEADER_BYTES:
            if length == 0:
                raise TierMiss
            raise TierCorrupt(CorruptReason.SHORT, f"{name.decode()}: {shown(length)} bytes")
        value = memoryview(bytearray(length))

        def receive(connection: RedisConnection, deadline: float) -> None:
            connection.receive_value((b"GET", name), [value], deadline)

        self._router.run(name, receive, self._step(deadline))
        return value

    def _unlink(self, names: Iterable[bytes], deadline: float) -> Iterator[int]:
        """Whether each existed, 0 or 1. Removes what is asked for."""
        for batch in _batched(names, BLOCKS_AT_ONCE):
            for reply in self._router.batch([(b"UNLINK", name) for name in batch], self._step(deadline)):
                yield reply if isinstance(reply, int) else 0


def _batched(items: Iterable[_Item], size: int) -> Iterator[list[_Item]]:
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch


def _unexpected(connection: RedisConnection, command: str, reply: Reply) -> TierRefused:
    return ProtocolError(f"{connection.endpoint}: {command} was answered with {shown(reply)}")
