"""What this process believes a tier holds: a bounded memory of answers, each good for a while."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from spillway_connector.tiers.tier import Clock

PRESENT_SECONDS = 30.0  # another engine may evict; a wrong "present" costs one failed load
ABSENT_SECONDS = 5.0  # another engine may store; a wrong "absent" costs one recomputation
KEYS_MAX = 200_000  # about 30 MB with 36-byte keys


class PresenceIndex:
    """Answers by key, the oldest forgotten first. For one thread: the scheduler's."""

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
        # When an answer expires; negative for "absent". One float a key keeps batches inside the dict's own loops.
        self._expiry: dict[bytes, float] = {}

    def __len__(self) -> int:
        return len(self._expiry)

    def get(self, key: bytes, now: float) -> bool | None:
        """True, False, or None where nothing is known at ``now``."""
        expiry = self._expiry.get(key)
        if expiry is None:
            return None
        if now < abs(expiry):
            return expiry > 0
        del self._expiry[key]
        return None

    def get_many(self, keys: Iterable[bytes]) -> list[float | None]:
        """Per key: None, or when its answer expires, negative where the answer is "absent"; the caller compares."""
        return list(map(self._expiry.get, keys))

    def present_of(self, keys: Collection[bytes], now: float) -> set[bytes]:
        """Those of ``keys`` believed to be there at ``now``."""
        if self._expiry.keys().isdisjoint(keys):
            return set()
        expiries = self.get_many(keys)
        return {key for key, expiry in zip(keys, expiries, strict=True) if expiry is not None and expiry > now}

    def absent_until(self, key: bytes) -> float:
        """When what was last said of an absent key expires."""
        return -self._expiry[key]

    def put(self, key: bytes, present: bool) -> None:
        """Believe this from now on."""
        entries = self._expiry
        entries.pop(key, None)  # so that it becomes the youngest
        if len(entries) >= self._keys_max:
            self._make_room(1)
        now = self._clock()
        entries[key] = now + self._present_seconds if present else -(now + self._absent_seconds)

    def put_many(self, keys: Collection[bytes], present: bool) -> None:
        """Believe this of all of them from now on."""
        entries = self._expiry
        if not entries.keys().isdisjoint(keys):
            for known in entries.keys() & keys:
                del entries[known]  # so that it becomes the youngest
        if len(entries) + len(keys) > self._keys_max:
            self._make_room(len(keys))
        good_for = self._present_seconds if present else self._absent_seconds
        expiry = self._clock() + good_for
        entries.update(dict.fromkeys(keys, expiry if present else -expiry))

    def _make_room(self, count: int) -> None:
        entries = self._expiry
        for _ in range(min(len(entries), len(entries) + count - self._keys_max)):
            del entries[next(iter(entries))]

    def clear(self) -> None:
        self._expiry.clear()
