"""Server-sent events from a socket: whole events out, wherever the reads cut them.

A blank line ends an event, with any of the line endings of the specification
(https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream).
"""

from __future__ import annotations

EVENT_BYTES_MAX = 1024 * 1024  # a longer event is passed on in parts
_BLANK_LINES = (b"\n\n", b"\r\n\r\n", b"\r\r")


class EventFramer:
    """The events of one stream. Holds one back until it is whole, so that a stream that breaks ends between two."""

    __slots__ = ("_bytes_max", "_open", "_pending", "_tail")

    def __init__(self, bytes_max: int = EVENT_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._pending = bytearray()
        self._open = False
        self._tail = b""  # of an event that is passed on in parts

    @property
    def at_boundary(self) -> bool:
        """Whether the bytes returned so far end with a whole event."""
        return not self._open

    def feed(self, chunk: bytes) -> bytes:
        """All events that are whole now; empty while the first is not."""
        pending = self._pending
        if self._open:
            self._tail = (self._tail + chunk[-4:])[-4:]
            self._open = not self._tail.endswith(_BLANK_LINES)
            return chunk
        if not pending and chunk.endswith(b"\n\n"):
            return chunk
        start = max(0, len(pending) - 3)
        pending += chunk
        end = -1
        for blank_line in _BLANK_LINES:
            at = pending.rfind(blank_line, start)
            if at >= 0:
                end = max(end, at + len(blank_line))
        if end < 0 and len(pending) > self._bytes_max:
            self._open = True
            end = len(pending)
            self._tail = bytes(pending[-4:])
        if end < 0:
            return b""
        whole = bytes(pending[:end])
        del pending[:end]
        return whole

    @property
    def holds_part(self) -> bool:
        """Whether the beginning of an event is held back."""
        return bool(self._pending)

    def part(self) -> bytes:
        """Return the beginning of an event that is held back. The rest of it is passed on in parts."""
        self._open, self._tail = True, bytes(self._pending[-4:])
        return self.rest()

    def rest(self) -> bytes:
        """Return the last event at the end of a stream, if no blank line follows it."""
        rest = bytes(self._pending)
        self._pending.clear()
        return rest


def count_events(events: bytes) -> int:
    """Events with data among whole events, [DONE] not counted."""
    count = events.count(b"\ndata:") + events.startswith(b"data:")
    return count - is_done(events)


def is_done(events: bytes) -> bool:
    """Whether whole events end with [DONE], behind which nothing follows."""
    end = events[-24:].rstrip()
    return end.endswith(b"[DONE]") and end[:-6].rstrip(b" ").endswith(b"data:")
