"""The buckets of access/limits.py for all replicas together: one atomic Redis script over one hash per tenant. Pure.

The hash has a field per bucket ("level at-milliseconds") and one per replica with running requests ("sequence count
expires-milliseconds"). A replica always reports its whole count with a growing sequence number, so a report that is
lost or late does no harm. A replica's count expires when it has not reported for its lease. Time is the Redis server's:
replicas' clocks need not agree.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import NamedTuple

from spillway_gateway.access.keys import Tenant
from spillway_gateway.access.limits import Limit, Settlement

SCRIPT = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local key, replica = KEYS[1], 'r:' .. ARGV[1]
local number, running, lease = tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local asks, most = ARGV[5] == '1', tonumber(ARGV[6])
local prompt = tonumber(ARGV[10])
local owed_requests, owed_prompt, owed_reply = tonumber(ARGV[11]), tonumber(ARGV[12]), tonumber(ARGV[13])
local buckets = {
  {field = 'requests', rate = tonumber(ARGV[7]), takes = 1, owed = owed_requests, least = 1, limit = 2},
  {field = 'prompt', rate = tonumber(ARGV[8]), takes = prompt, owed = owed_prompt, least = 0, limit = 3},
  {field = 'tokens', rate = tonumber(ARGV[9]), takes = prompt, owed = owed_prompt + owed_reply, least = 0, limit = 4},
}
local saved, others, known = {}, 0, nil
local pairs_read = redis.call('HGETALL', key)
for at = 1, #pairs_read, 2 do
  local field, value = pairs_read[at], pairs_read[at + 1]
  if string.sub(field, 1, 2) == 'r:' then
    local sequence, count, expires = string.match(value, '^(%d+) (%d+) (%d+)$')
    if field == replica then
      known = {number = tonumber(sequence), count = tonumber(count)}
    elseif tonumber(expires) <= now then
      redis.call('HDEL', key, field)
    else
      others = others + tonumber(count)
    end
  else
    saved[field] = value
  end
end
local refused, wait = 0, 0
if asks and most > 0 and others + running > most then
  refused, wait = 1, 1
end
local kept = lease
for _, bucket in ipairs(buckets) do
  if bucket.rate > 0 then
    bucket.level = bucket.rate
    if saved[bucket.field] then
      local level, at = string.match(saved[bucket.field], '^(%S+) (%d+)$')
      bucket.level = math.min(bucket.rate, tonumber(level) + math.max(0, now - tonumber(at)) * bucket.rate / 60000)
    end
    bucket.level = math.min(bucket.rate, bucket.level - bucket.owed)
    local missing = bucket.least - bucket.level
    local enough = missing < 0 or (bucket.least > 0 and missing <= 0)
    if asks and refused == 0 and not enough then
      refused = bucket.limit
      wait = math.max(1, math.ceil(missing * 60 / bucket.rate))
    end
  end
end
for _, bucket in ipairs(buckets) do
  if bucket.rate > 0 then
    if asks and refused == 0 then
      bucket.level = bucket.level - bucket.takes
    end
    redis.call('HSET', key, bucket.field, string.format('%.3f %d', bucket.level, now))
    kept = math.max(kept, (bucket.rate - bucket.level) * 60000 / bucket.rate)
  end
end
if refused > 0 then
  running = running - 1
end
if known and known.number > number then
  running, number = known.count, known.number
end
if most > 0 and running > 0 then
  redis.call('HSET', key, replica, string.format('%d %d %d', number, running, now + lease))
elseif most > 0 and known then
  redis.call('HSET', key, replica, string.format('%d 0 %d', number, now + lease))
end
redis.call('PEXPIRE', key, math.ceil(kept) + 1000)
return {refused, wait}
"""


class Refusal(NamedTuple):
    """The limit that was reached, and the seconds until a retry may succeed."""

    limit: Limit
    retry_after_seconds: int


def key_of(prefix: str, secret: bytes, tenant: str) -> str:
    """The tenant's only Redis key, with a hash tag for Redis Cluster. It reveals neither its name nor its API keys."""
    digest = hmac.digest(secret, b"spillway limits 1\0" + tenant.encode(), hashlib.sha256)
    return f"{prefix}{{{digest[:16].hex()}}}"


def arguments(
    tenant: Tenant,
    *,
    replica: str,
    number: int,
    running_requests: int,
    lease_seconds: float,
    asks: bool,
    prompt_tokens: int,
    owed: Settlement,
) -> list[str | int]:
    """ARGV of SCRIPT. number: of this report. running_requests: of this replica, the new one included. asks: whether
    there is a new request, or only a report. owed: of requests that ended since the last report."""
    return [
        replica,
        number,
        running_requests,
        int(lease_seconds * 1000),
        int(asks),
        tenant.concurrent_requests_max or 0,
        tenant.requests_per_minute or 0,
        tenant.prompt_tokens_per_minute or 0,
        tenant.tokens_per_minute or 0,
        prompt_tokens,
        *owed,
    ]


def refusal_of(reply: object) -> Refusal | None:
    """The reply of SCRIPT; None: admitted. Raises ValueError for a reply of another shape."""
    if not isinstance(reply, list) or len(reply) != 2 or not all(isinstance(number, int) for number in reply):
        raise ValueError("the answer is not a pair of numbers")
    limit, wait = reply
    return Refusal(Limit(limit), max(1, wait)) if limit else None
