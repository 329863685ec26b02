"""How much each tenant holds on a Redis server, and which of its blocks go first: commands and answers, no I/O.

One sorted set per tenant and namespace names the tenant's blocks by last use. All blocks of a namespace have one size,
so the number of members is what the tenant holds. A store sends, in the round trip it begins with anyway:

    ZADD index <now + 60 s> <key>            counted before it is written, and nobody's oldest while it is
    ZREMRANGEBYSCORE index -inf <long ago>   what has expired (only with a time to live)
    ZCARD index
    ZRANGE index 0 8                         who would have to go
    PEXPIRE index ...                        (only with a time to live)

and only where the tenant is above its share, before its own values: UNLINK of the oldest blocks, at most 8, then one
ZREM. Loads note what they used and stores what they have written, for one ZADD with the next store, or with the next
lookup after a minute.

Set and values are separate keys, on a cluster on separate nodes, and nothing ties them together but this order. Whoever
dies in between leaves members without a block, never a block without its member: the tenant seems to hold more than it
does until such a member is the oldest, or expires. The count is too low when a server at ``maxmemory`` has evicted the
set, for at most the time to live or until the blocks are used again; and when one engine removes a block that another
stores in the same moment, until that one tells what it has written. Clocks that disagree change the order by as much.
Engines at work at the same time may together be above the share by the blocks that they are writing.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from spillway_connector.errors import ConfigError
from spillway_connector.tiers.redis.client.errors import ProtocolError, Reply
from spillway_connector.tiers.redis.names import RedisNames
from spillway_connector.tiers.tier import NO_TENANT, Clock, WallClock

VICTIMS_MAX = 8  # of one store: a share that was made smaller is reached over several stores
# A block whose member goes while it is written would never be counted. Longer than any store's deadline; and a member
# whose writer died, or never stored again, is an old one like the others after that.
WRITING_MS = 60_000
EXPIRED_GRACE_MS = 120_000  # uses are told late; until then a member may look older than its block is
USES_MAX = 4096  # remembered at once
USES_PER_COMMAND = 256
USES_SECONDS = 60.0  # the longest that uses wait while there are lookups

Command = tuple[bytes, ...]


class TenantShares:
    """Used by several threads at once. Blocks of no tenant are not counted.

    block_bytes: of one block with its headers. max_bytes: what each tenant may hold of one namespace.
    Raises ConfigError where not even one block fits.
    """

    def __init__(
        self,
        names: RedisNames,
        block_bytes: int,
        max_bytes: int,
        ttl_ms: int | None,
        *,
        clock: Clock,
        wall_clock: WallClock,
    ) -> None:
        if max_bytes < block_bytes:
            raise ConfigError(
                f"tenant_max_bytes: {max_bytes} holds no block of {block_bytes} bytes; allow at least that, or leave "
                "it out"
            )
        self._names = names
        self._blocks_max = max_bytes // block_bytes
        self._ttl_ms = ttl_ms
        self._clock = clock
        self._wall_clock = wall_clock
        self._lock = threading.Lock()
        self._uses: OrderedDict[tuple[bytes, bytes], int] = OrderedDict()  # (tenant, key): when, milliseconds
        self._told_at = clock()

    def count(self, key: bytes, tenant: bytes) -> list[Command]:
        """What to ask before a block of ``tenant`` is written."""
        now_ms = self._now_ms()
        index = self._names.tenant(tenant)
        with self._lock:
            used = [used for used in self._uses if used[0] == tenant][: USES_PER_COMMAND - 1]
            members = {one: self._uses.pop((owner, one)) for owner, one in used}
        members[key] = now_ms + WRITING_MS
        commands = [_add(index, members)]
        if self._ttl_ms is not None:
            expired_ms = now_ms - self._ttl_ms - EXPIRED_GRACE_MS
            commands.append((b"ZREMRANGEBYSCORE", index, b"-inf", b"%d" % expired_ms))
        commands += [(b"ZCARD", index), (b"ZRANGE", index, b"0", b"%d" % VICTIMS_MAX)]
        if self._ttl_ms is not None:
            commands.append((b"PEXPIRE", index, b"%d" % (self._ttl_ms + EXPIRED_GRACE_MS)))
        return commands

    def victims(self, key: bytes, replies: Sequence[Reply]) -> list[bytes]:
        """The keys of the blocks that have to go before ``key`` is written; from the answers to :meth:`count`."""
        held, oldest = replies[1:3] if self._ttl_ms is None else replies[2:4]
        if not isinstance(held, int) or not isinstance(oldest, list):
            raise ProtocolError(f"ZCARD and ZRANGE were answered with {held!r:.32} and {oldest!r:.32}")
        excess = min(held - self._blocks_max, VICTIMS_MAX)
        if excess <= 0:
            return []
        return [member for member in oldest if isinstance(member, bytes) and member != key][:excess]

    def written(self, key: bytes, tenant: bytes) -> None:
        """A block that was counted is on the server. Told before any use: now it may be the oldest."""
        self._note(key, tenant, told_last=False)

    def forget(self, keys: Sequence[bytes], tenant: bytes) -> Command:
        """Blocks that are gone."""
        return (b"ZREM", self._names.tenant(tenant), *keys)

    def drop(self, tenant: bytes) -> Command:
        """The whole set."""
        return (b"UNLINK", self._names.tenant(tenant))

    def use(self, key: bytes, tenant: bytes) -> None:
        """A block was loaded. Remembered until told; of too many the oldest is forgotten."""
        if tenant != NO_TENANT:
            self._note(key, tenant, told_last=True)

    def uses_due(self) -> list[Command]:
        """Uses that have waited for a minute, to go with any round trip; their answers do not matter."""
        if not self._uses or self._clock() - self._told_at < USES_SECONDS:
            return []
        by_tenant: dict[bytes, dict[bytes, int]] = {}
        with self._lock:
            self._told_at = self._clock()
            for (tenant, key), used_ms in self._uses.items():
                by_tenant.setdefault(tenant, {})[key] = used_ms
            self._uses.clear()
        commands = []
        for tenant, members in by_tenant.items():
            several = list(members.items())
            for start in range(0, len(several), USES_PER_COMMAND):
                commands.append(_add(self._names.tenant(tenant), dict(several[start : start + USES_PER_COMMAND])))
        return commands

    def _note(self, key: bytes, tenant: bytes, *, told_last: bool) -> None:
        with self._lock:
            self._uses[tenant, key] = self._now_ms()
            self._uses.move_to_end((tenant, key), last=told_last)
            if len(self._uses) > USES_MAX:
                self._uses.popitem(last=False)

    def _now_ms(self) -> int:
        return int(self._wall_clock() * 1000)


def _add(index: bytes, members: dict[bytes, int]) -> Command:
    return (b"ZADD", index, *(word for key, used_ms in members.items() for word in (b"%d" % used_ms, key)))
