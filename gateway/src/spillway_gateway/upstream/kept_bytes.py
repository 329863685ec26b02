"""Room for the token ids of all streams together."""

from __future__ import annotations


class KeptBytes:
    """Counts bytes up to a bound, which a new configuration may change. On the event loop."""

    __slots__ = ("bytes_max", "taken")

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.taken = 0

    def take(self, more: int) -> bool:
        """False, and nothing taken, where it would exceed the bound."""
        if self.taken + more > self.bytes_max:
            return False
        self.taken += more
        return True

    def give(self, back: int) -> None:
        self.taken -= back
