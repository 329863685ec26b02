"""What this process believes a tier holds: a bounded memory of answers, each good for a while.

The keys are spread over many small dicts: one that holds 200,000 takes 10 ms to grow, and its oldest key is found only
by passing over all that were deleted before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

from spillway_connector.tiers.tier import Clock

PRESENT_SECONDS = 30.0  # another engine may evict; a wrong "present" costs one failed load
ABSENT_SECONDS = 5.0  # another engine may store; a wrong "absent" costs one recomputation
KEYS_MAX = 200_000  # about 30 MB with 36-byte keys
_SHARDS = 128  # a power of two; each grows in 0.1 ms at most, and not all of them at the same time


class PresenceIndex:
    """Answers by key, the key that was learnt first forgotten first. For one thread: the scheduler's."""

    def __init__(
        self,
        clock: Clock,
        *,
        keys_max: int = KEYS_MAX,
        present_seconds: float = PRESENT_SECONDS,
        absent_seconds: float = ABSENT_SECONDS,
    ) -> None:
        self._clock = clock
        self._keys_max = keys_max
        self._present_seconds = present_seconds
        self._absent_seconds = absent_seconds
        # When an answer expires; negative for "absent".
        self._shards: tuple[dict[bytes, float], ...]
        self._order: deque[bytes]  # every key once
        self.clear()

    def __len__(self) -> int:
        return len(self._order)

    def get(self, key: bytes, now: float) -> bool | None:
        """True, False, or None where nothing is known at ``now``."""
        expiry = self._shards[hash(key) % _SHARDS].get(key)
        return None if expiry is None or now >= abs(expiry) else expiry > 0

    def get_many(self, keys: Iterable[bytes]) -> list[float | None]:
        """Per key: None, or when its answer expires, negative where the answer is "absent"; the caller compares."""
        shards = self._shards
        return [shards[hash(key) % _SHARDS].get(key) for key in keys]

    def present_of(self, keys: Collection[bytes], now: float) -> set[bytes]:
        """Those of ``keys`` believed to be there at ``now``."""
        expiries = self.get_many(keys)
        return {key for key, expiry in zip(keys, expiries, strict=True) if expiry is not None and expiry > now}

    def absent_until(self, key: bytes) -> float:
        """When what was last said of an absent key expires."""
        return -self._shards[hash(key) % _SHARDS][key]

    def put(self, key: bytes, present: bool) -> None:
        """Believe this from now on."""
        self.put_many((key,), present)

    def put_many(self, keys: Collection[bytes], present: bool) -> None:
        """Believe this of all of them from now on."""
        shards, order = self._shards, self._order
        now = self._clock()
        expiry = now + self._present_seconds if present else -(now + self._absent_seconds)
        for key in keys:
            shard = shards[hash(key) % _SHARDS]
            if key not in shard:
                order.append(key)
            shard[key] = expiry
        while len(order) > self._keys_max:
            oldest = order.popleft()
            del shards[hash(oldest) % _SHARDS][oldest]

    def clear(self) -> None:
        self._shards = tuple({} for _ in range(_SHARDS))
        self._order = deque()
