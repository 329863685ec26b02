"""Blocks of prompts that were routed and that no event has confirmed yet: their engines are expected to hold them soon.

A client decides what is in its prompt, and an engine may refuse it. So these blocks lie beside the index, in room of
their own: however many are expected, no block that an engine has announced is evicted for them. All blocks that one
prompt brought share one object, so a long prompt costs little. On the event loop only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

EXPECTED_BYTES = 140  # of a block: its keys and its places in a dict and a list, with tracemalloc on CPython 3.11


class Expected:
    """Blocks that were first expected together. mask: device bits of the engines. until: monotonic seconds. prompts:
    routed there, not ended, that share blocks of it."""

    __slots__ = ("keys", "mask", "prompts", "until")

    def __init__(self, mask: int, until: float) -> None:
        self.mask = mask
        self.until = until
        self.keys: list[int] = []
        self.prompts = 1


class ExpectedBlocks:
    """by_key: the entries, which the index reads for each block of a prompt; an entry counts until its `until`."""

    def __init__(self) -> None:
        self.by_key: dict[int, Expected] = {}
        self._oldest: deque[Expected] = deque()

    @property
    def bytes(self) -> int:
        """Memory that they take."""
        return len(self.by_key) * EXPECTED_BYTES

    def expect(
        self, device: int, keys: Sequence[int], until: float, *, now: float, bytes_max: int
    ) -> tuple[Expected, ...]:
        """An engine was sent a prompt of these blocks. device: its bit. Returns what withdraw() takes."""
        own = Expected(device, until)
        joined: dict[Expected, Expected] = {}  # blocks that others expect -> what stands for them now
        by_key = self.by_key
        if by_key.keys().isdisjoint(keys):  # most prompts
            by_key.update(dict.fromkeys(keys, own))
            own.keys, keys = list(keys), ()
        for key in keys:
            known = by_key.get(key)
            if known is None or known.until <= now:
                by_key[key] = own
                own.keys.append(key)
                continue
            other = joined.get(known)
            if other is None:
                other = joined[known] = self._join(known, device, until)
            if other is not known:
                by_key[key] = other
                other.keys.append(key)
        made = [own, *(other for known, other in joined.items() if other is not known)]
        self._oldest.extend([each for each in made if each.keys])
        while self._oldest and (self._oldest[0].until <= now or self.bytes > bytes_max):
            self._drop(self._oldest.popleft())
        return (own, *joined.values())

    @staticmethod
    def _join(known: Expected, device: int, until: float) -> Expected:
        if known.mask & device:
            known.prompts += 1
            known.until = max(known.until, until)
            return known
        return Expected(known.mask | device, max(known.until, until))

    def withdraw(self, expected: tuple[Expected, ...]) -> None:
        """The prompt was not accepted: forget the blocks that no other prompt expects."""
        for each in expected:
            each.prompts -= 1
            if not each.prompts:
                self._drop(each)

    def announced(self, key: int, device: int) -> None:
        """An engine has announced the block. device: its bit. A block that no other engine is expected to have is
        forgotten."""
        expected = self.by_key.get(key)
        if expected is not None and not expected.mask & ~device:
            del self.by_key[key]

    def forget(self, key: int) -> None:
        """An engine has removed the block."""
        self.by_key.pop(key, None)

    def forget_devices(self, devices: int) -> None:
        """The devices were cleared, or their engines are gone."""
        for each in self._oldest:
            each.mask &= ~devices

    def _drop(self, expected: Expected) -> None:
        by_key = self.by_key
        for key in expected.keys:
            if by_key.get(key) is expected:
                del by_key[key]
        expected.keys = []
        expected.until = 0.0
