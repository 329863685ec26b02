"""Which keys' answers may have changed since someone last looked, so that who waits asks again only when it helps."""

from __future__ import annotations

from collections.abc import Iterable, Set

KEYS_MAX = 32_768


class ChangeLog:
    """Changed keys in order, the oldest forgotten. Readers keep a position and ask what came after it.

    position: of the next change.
    """

    def __init__(self, keys_max: int = KEYS_MAX) -> None:
        self._keys_max = keys_max
        self._keys: list[bytes] = []
        self._begin = 0  # the position of the first key still remembered
        self.position = 0

    def add(self, keys: Iterable[bytes]) -> None:
        self._keys.extend(keys)
        self.position = self._begin + len(self._keys)
        if len(self._keys) > self._keys_max:
            forgotten = len(self._keys) - self._keys_max // 2
            del self._keys[:forgotten]
            self._begin += forgotten

    def add_all(self) -> None:
        """Everything may have changed."""
        self.position = self._begin = self.position + 1
        self._keys.clear()

    def since(self, position: int) -> list[bytes] | None:
        """The keys that have changed since `position`; None when that is too long ago to tell: perhaps all."""
        return None if position < self._begin else self._keys[position - self._begin :]

    def touches(self, position: int, keys: Set[bytes]) -> bool:
        """Whether any of `keys` may have changed since `position`."""
        changed = self.since(position)
        return changed is None or not keys.isdisjoint(changed)
