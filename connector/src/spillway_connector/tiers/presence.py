"""What this process believes a tier holds: a bounded memory of answers, each good for a while."""

from __future__ import annotations

from spillway_connector.tiers.tier import Clock

PRESENT_SECONDS = 30.0  # another engine may evict; a wrong "present" costs one failed load
ABSENT_SECONDS = 5.0  # another engine may store; a wrong "absent" costs one recomputation
KEYS_MAX = 200_000  # about 35 MB with 36-byte keys


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
        self._expiry: dict[bytes, tuple[bool, float]] = {}

    def __len__(self) -> int:
        return len(self._expiry)

    def get(self, key: bytes, now: float) -> bool | None:
        """True, False, or None where nothing is known at ``now``."""
        entry = self._expiry.get(key)
        if entry is None:
            return None
        present, expires = entry
        if now < expires:
            return present
        del self._expiry[key]
        return None

    def put(self, key: bytes, present: bool) -> None:
        """Believe this from now on."""
        self._expiry.pop(key, None)  # so that it becomes the youngest
        while len(self._expiry) >= self._keys_max:
            del self._expiry[next(iter(self._expiry))]
        good_for = self._present_seconds if present else self._absent_seconds
        self._expiry[key] = (present, self._clock() + good_for)

    def clear(self) -> None:
        self._expiry.clear()
