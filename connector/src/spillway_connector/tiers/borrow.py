"""Memory that is filled or read piece by piece while its owner may take it back: a row of the CPU tier, until its job
ends.

What fills it waits for the next piece without the memory, asks for it once the piece is there, and gives it back when
the piece is in place and read for its checksum. What reads it asks for it once there is room for a piece, and gives it
back when the piece is copied. So the owner gets it back within one copy, whatever the wait is for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from spillway_connector.errors import RefusedReason, TierRefused


class Borrow(Protocol):
    """Several threads may use it at once."""

    def begin(self) -> memoryview | None:
        """The memory; None: it was taken back, for good. After a memory :meth:`end` must follow within milliseconds.

        Between the two is no wait; after ``end`` nothing may be kept of the memory.
        """
        ...

    def end(self) -> None:
        """The memory is not needed any more."""
        ...


class Owned:
    """A borrow of memory that its owner never takes back."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    def begin(self) -> memoryview:
        return self._memory

    def end(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes ``start`` to ``end`` of borrowed memory."""

    borrow: Borrow
    start: int
    end: int

    @classmethod
    def of(cls, memory: memoryview) -> Span:
        """All of ``memory``, which nobody takes back."""
        return cls(Owned(memory), 0, memory.nbytes)

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    def behind(self, count: int) -> Span:
        """Return the span without its first ``count`` bytes."""
        return Span(self.borrow, self.start + count, self.end)


def taken_back() -> TierRefused:
    """Why what fills or reads borrowed memory stops."""
    return TierRefused(RefusedReason.CLOSED, "the transfer was given up")
