"""What answers may have changed since someone last looked, so that a request asks again only when it helps."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Set
from typing import Generic, TypeVar

KEYS_MAX = 32_768

_Key = TypeVar("_Key", bound=Hashable)


class ChangeLog(Generic[_Key]):
    """Changed keys in order, the oldest forgotten. Readers keep a position and ask what came after it.

    position: of the next change.
    """

    def __init__(self, keys_max: int = KEYS_MAX) -> None:
        self._keys_max = keys_max
        self._keys: list[_Key] = []
        self._begin = 0  # the position of the first key still remembered
        self.position = 0

    def add(self, keys: Iterable[_Key]) -> None:
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

    def since(self, position: int) -> list[_Key] | None:
        """The keys that have changed since `position`; None when that is too long ago to tell: perhaps all."""
        return None if position < self._begin else self._keys[position - self._begin :]

    def touches(self, position: int, keys: Set[_Key]) -> bool:
        """Whether any of `keys` may have changed since `position`."""
        changed = self.since(position)
        return changed is None or not keys.isdisjoint(changed)
