"""Tenants' quotas on a Redis server: how many blocks each holds and which are evicted. Commands and replies, no I/O.

One sorted set per tenant and namespace has the tenant's blocks by last use. All blocks of a namespace have one size, so
the number of members is what the tenant holds. A store sends, within its first round trip:

    ZADD index <now + 60 s> <key>            counted before it is written, and not the oldest until it is
    ZREMRANGEBYSCORE index -inf <long ago>   what has expired (only with a time to live)
    ZCARD index
    ZRANGE index 0 8                         the candidates for eviction
    PEXPIRE index ...                        (only with a time to live)

and only if the tenant is above its quota, before the new values: UNLINK of the oldest blocks, at most 8, then one
ZREM. Loads record what they used and stores what they wrote. One ZADD sends that with the next store, or with the next
lookup after a minute.

Set and values are separate keys, on a cluster on separate nodes, consistent only by this order. An engine that dies in
between leaves members without a block, never a block without its member: the tenant seems to hold more than it does
until such a member is the oldest, or expires. The count is too low in two cases. A server at ``maxmemory`` evicted the
set: for at most the time to live, or until the blocks are used again. One engine removed a block while another stored
it: until the other sends what it wrote. Clock skew between engines changes the order by as much. Engines that store at
the same time may together exceed the quota by the blocks that they are writing.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from spillway_connector.errors import ConfigError
from spillway_connector.tiers.redis.client.errors import ProtocolError, Reply, shown
from spillway_connector.tiers.redis.names import RedisNames
from spillway_connector.tiers.tier import NO_TENANT, Clock, WallClock

VICTIMS_MAX = 8  # of one store: after a quota was lowered, several stores evict down to it
# A block whose member is removed while it is written would never be counted. Longer than any store's deadline. After
# that, a member whose writer died, or never stored again, ages like the others.
WRITING_MS = 60_000
EXPIRED_GRACE_MS = 120_000  # uses are sent late; until then a member may seem older than its block
USES_MAX = 4096  # recorded at once
USES_PER_COMMAND = 256
USES_SECONDS = 60.0  # the longest that uses wait to be sent while there are lookups

Command = tuple[bytes, ...]


class TenantQuotas:
    """Quotas of all tenants. Several threads may use them at once. Blocks without a tenant are not counted.

    block_bytes: of one block with its headers. max_bytes: what each tenant may hold in one namespace.
    Raises ConfigError if not even one block fits.
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
        self._sent_at = clock()

    def count(self, key: bytes, tenant: bytes) -> list[Command]:
        """The commands to send before a block of ``tenant`` is written."""
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
        """The keys of the blocks to evict before ``key`` is written; from the replies to :meth:`count`."""
        held, oldest = replies[1:3] if self._ttl_ms is None else replies[2:4]
        if not isinstance(held, int) or not isinstance(oldest, list):
            raise ProtocolError(f"ZCARD and ZRANGE were answered with {shown(held)} and {shown(oldest)}")
        excess = min(held - self._blocks_max, VICTIMS_MAX)
        if excess <= 0:
            return []
        return [member for member in oldest if isinstance(member, bytes) and member != key][:excess]

    def written(self, key: bytes, tenant: bytes) -> None:
        """A block that was counted is on the server. Sent before all uses: from now on it may be the oldest."""
        self._record(key, tenant, last=False)

    def remove(self, keys: Sequence[bytes], tenant: bytes) -> Command:
        """The command after blocks were removed."""
        return (b"ZREM", self._names.tenant(tenant), *keys)

    def drop(self, tenant: bytes) -> Command:
        """The command that removes the whole set."""
        return (b"UNLINK", self._names.tenant(tenant))

    def use(self, key: bytes, tenant: bytes) -> None:
        """A block was loaded. Recorded until it is sent; of too many the oldest is dropped."""
        if tenant != NO_TENANT:
            self._record(key, tenant, last=True)

    def uses_due(self) -> list[Command]:
        """The commands for uses that have waited for a minute, for any round trip; their replies do not matter."""
        if not self._uses or self._clock() - self._sent_at < USES_SECONDS:
            return []
        by_tenant: dict[bytes, dict[bytes, int]] = {}
        with self._lock:
            self._sent_at = self._clock()
            for (tenant, key), used_ms in self._uses.items():
                by_tenant.setdefault(tenant, {})[key] = used_ms
            self._uses.clear()
        commands = []
        for tenant, members in by_tenant.items():
            several = list(members.items())
            for start in range(0, len(several), USES_PER_COMMAND):
                commands.append(_add(self._names.tenant(tenant), dict(several[start : start + USES_PER_COMMAND])))
        return commands

    def _record(self, key: bytes, tenant: bytes, *, last: bool) -> None:
        with self._lock:
            self._uses[tenant, key] = self._now_ms()
            self._uses.move_to_end((tenant, key), last=last)
            if len(self._uses) > USES_MAX:
                self._uses.popitem(last=False)

    def _now_ms(self) -> int:
        return int(self._wall_clock() * 1000)


def _add(index: bytes, members: dict[bytes, int]) -> Command:
    return (b"ZADD", index, *(word for key, used_ms in members.items() for word in (b"%d" % used_ms, key)))
