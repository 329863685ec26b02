"""Memory that is filled or read piece by piece while its owner may take it back: a row of the CPU tier, until its job
ends.

A writer waits for the next piece without holding the memory, borrows it once the piece has arrived, and returns it when
the piece is in place and checksummed. A reader borrows it once there is room for a piece, and returns it when the piece
is copied. So the owner gets the memory back within one copy, whatever the borrower waits for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from spillway_connector.errors import RefusedReason, TierRefused


class Borrow(Protocol):
    """The use of rows by a tier. Several threads may use it at once."""

    def begin(self) -> memoryview | None:
        """Return the memory; None: the owner has taken it back for good.

        If it returns memory, :meth:`end` must follow within milliseconds, without a wait between the two. After ``end``
        the caller must not keep any view of the memory.
        """
        ...

    def end(self) -> None:
        """Return the memory to its owner."""
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
        """Return a span of all of ``memory``, which its owner never takes back."""
        return cls(Owned(memory), 0, memory.nbytes)

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    def behind(self, count: int) -> Span:
        """Return the span without its first ``count`` bytes."""
        return Span(self.borrow, self.start + count, self.end)


def taken_back() -> TierRefused:
    """Return the error that ends the filling or reading of memory that was taken back."""
    return TierRefused(RefusedReason.CLOSED, "the transfer was given up")
