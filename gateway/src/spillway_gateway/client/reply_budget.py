"""Memory for replies that clients have not read yet: one budget for all of them.

It counts plain replies while they are collected, and what waits in the sockets' buffers of clients that read slower
than their engine sends. Beyond it plain replies are no longer collected: they pass as streams do, as fast as the client
reads, and the engine waits. If that is not enough, connections whose clients read nothing are closed, those first that
have read nothing for longest.
"""

from __future__ import annotations

STALLED_SECONDS = 5.0  # without a byte read, after which a connection may be closed for room
ENDED_PER_TICK = 32  # closing thousands at once would stop the event loop


class ReplyBudget:
    """The budget of one gateway process. bytes_max: limits.repliesBytesMax, which may change while it runs."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.held_bytes = 0
        self.ended_total = 0  # connections that were closed for room

    @property
    def excess_bytes(self) -> int:
        return max(0, self.held_bytes - self.bytes_max)

    def hold(self, more_bytes: int) -> None:
        """Negative: give back."""
        self.held_bytes += more_bytes

    def take(self, more_bytes: int) -> bool:
        """Hold them if there is room. False, and nothing held, if there is none."""
        if self.held_bytes + more_bytes > self.bytes_max:
            return False
        self.held_bytes += more_bytes
        return True
