"""Memory for replies that clients have not read yet: one budget for all of them.

It counts plain replies while they are collected, and what waits in the sockets' buffers of clients that read slower
than their engine sends. Beyond it plain replies are no longer collected: they pass as streams do, as fast as the client
reads, and the engine waits. If that is not enough, connections whose clients read nothing are closed, those first that
have read nothing for longest.
"""

from __future__ import annotations

from collections.abc import Callable

STALLED_SECONDS = 5.0  # without a byte read, after which a connection may be closed for room
ENDED_PER_TICK = 32  # closing thousands at once would stop the event loop


class ReplyBudget:
    """The budget of one gateway process. bytes_max: reads limits.repliesBytesMax, which may change while it runs."""

    def __init__(self, bytes_max: Callable[[], int]) -> None:
        self._bytes_max = bytes_max
        self.held_bytes = 0
        self.ended_total = 0  # connections that were closed for room

    @property
    def excess_bytes(self) -> int:
        return max(0, self.held_bytes - self._bytes_max())

    def hold(self, more_bytes: int) -> None:
        """Take bytes of the budget; a negative number gives them back."""
        self.held_bytes += more_bytes

    def count_ended(self) -> None:
        """A connection was closed for room."""
        self.ended_total += 1

    def take(self, more_bytes: int) -> bool:
        """Hold them if there is room. False, and nothing held, if there is none."""
        if self.held_bytes + more_bytes > self._bytes_max():
            return False
        self.held_bytes += more_bytes
        return True


class UnreadBytes:
    """The bytes that one client has not read yet. It counts in the budget until hold(0).

    Args:
        budget: for all clients.
        stalled_seconds: in which a client that reads none of it counts as gone.

    Attributes:
        since: seconds of the event loop's clock since which the client has read nothing, as far as look() has seen;
            None: it reads.
    """

    def __init__(self, budget: ReplyBudget, stalled_seconds: float) -> None:
        self._budget = budget
        self._stalled_seconds = stalled_seconds
        self._held_bytes = 0
        self._seen_read_bytes = 0  # by the client
        self.since: float | None = None

    def hold(self, unread_bytes: int) -> None:
        self._budget.hold(unread_bytes - self._held_bytes)
        self._held_bytes = unread_bytes

    def drained(self) -> None:
        """The client has read what it had not."""
        self.hold(0)
        self.since = None

    def look(self, unread_bytes: int | None, now: float, written_bytes: int = 0) -> bool:
        """Whether the client is gone. Called about once a second.

        unread_bytes: None if the client reads. written_bytes: all that was written for the client; by it one that reads
        while more is written differs from one that reads nothing. 0 if nothing is written before drained().
        """
        if unread_bytes is None:
            self.since = None
            return False
        self.hold(unread_bytes)
        read_bytes = written_bytes - unread_bytes
        if self.since is None or read_bytes > self._seen_read_bytes:
            self.since = now
        self._seen_read_bytes = read_bytes
        return self.is_stalled(now)

    def is_stalled(self, now: float) -> bool:
        return self.since is not None and now > self.since + self._stalled_seconds
