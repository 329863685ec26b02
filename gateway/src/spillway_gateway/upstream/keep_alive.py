"""Comments for a client whose stream is silent: while its request waits for an engine, for the first part of an answer,
or for arguments of a tool call that a parser holds back. Proxies on the way cut silent connections, mostly after 60 s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

COMMENT = b": keep-alive\n\n"


def _nothing() -> None:
    pass


class KeepAlive:
    """Times the comments of one streaming request, from its creation to close(). On the event loop.

    sent() is called after each write to the client.
    """

    __slots__ = ("_comment", "_loop", "_seconds", "_sent_at", "_timer")

    def __init__(self, seconds: float, comment: Callable[[], None]) -> None:
        """seconds: the silence before a comment; 0: none is sent. comment: sends one, if that is possible now."""
        self._loop = asyncio.get_running_loop()
        self._seconds = seconds
        self._comment = comment
        self._sent_at = self._loop.time()
        self._timer = self._loop.call_later(seconds, self.on_timer) if seconds else None

    def sent(self) -> None:
        """The client has got bytes."""
        self._sent_at = self._loop.time()

    def on_timer(self) -> None:
        """Send a comment if one is due, and look again when the next one may be."""
        now = self._loop.time()
        if now - self._sent_at >= self._seconds:
            self._sent_at = now
            self._comment()
        self._timer = self._loop.call_at(self._sent_at + self._seconds, self.on_timer)

    def close(self) -> None:
        """Send no further comment. Forget the sender, which holds this object; otherwise each request would be a
        reference cycle."""
        self._comment = _nothing
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
