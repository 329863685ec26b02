"""One gRPC call: messages in both directions over one HTTP/2 stream.

The listener treats a call like a connection with a request: it counts among the connections that may be open, and it
ends if its client is silent before the first message or reads nothing. Bytes that have arrived and are not read yet
count in the budget for bodies, or in the one for replies once they are a reply.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable, Coroutine
from enum import IntEnum
from typing import Any, Protocol

from spillway_gateway.client.body_budget import BodyBudget, BodyBudgetSpent
from spillway_gateway.client.reply_budget import ReplyBudget, UnreadBytes

MESSAGE_BYTES_MAX = 4 * 1024 * 1024
CALL_WINDOW_BYTES = 256 * 1024
UNCOUNTED_BYTES = 64 * 1024  # of what a call has unread, as for a body's first bytes on a connection
END_SECONDS = 5.0  # for a call to end after its client has ended it
NEVER = float("inf")
_PREFIX = struct.Struct(">BI")  # compressed or not, bytes of the message

Handler = Callable[["Call"], Coroutine[Any, Any, None]]


class Status(IntEnum):
    """The status codes of gRPC that are used here."""

    OK = 0
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    UNAVAILABLE = 14


class CallFailed(Exception):
    """Ends a call with this status."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class MessageTooLong(CallFailed):
    """The client's message has more bytes than the call takes."""

    def __init__(self, bytes_max: int) -> None:
        super().__init__(Status.RESOURCE_EXHAUSTED, f"a message has more than {bytes_max} bytes")


class Connection(Protocol):
    """The interface of its connection that a call needs."""

    def send(self, call: Call) -> None:
        """Send the part of the call's unsent bytes that fits into the windows."""

    def open_window(self, call: Call, more_bytes: int) -> None: ...

    def reset(self, call: Call) -> None:
        """End the call, as if its client had done it."""

    def due(self, call: Call) -> None:
        """Report that the call's handler, which has not begun, has something to read."""

    def start(self, call: Call) -> None:
        """Begin the call's handler: it is its turn."""


def nothing() -> None:
    pass


class Call:
    """A handler reads and writes messages; its return ends the call with OK. A Connection of client.open_connections.

    The handler begins once there is something to read. Until then a call is few objects and no task, as thousands may
    be opened and reset, or left silent: the garbage collector looks at all that is alive in one go.

    Args:
        connection: the connection of the call.
        number: the number of the HTTP/2 stream.
        budget: the budget for bytes that have arrived and are not read.
        unread: the bytes that the client has not read.
        handler: the function that serves the call.

    Attributes:
        number: the number of the HTTP/2 stream.
        ended: the client or the end of the connection has ended the call.
        half_closed: the client sends no more.
        unsent: bytes that wait for the connection's or the call's window.
        window_in: bytes that the client may send.
        deadline: the deadline of the first message, by the event loop's clock.
        window_change: the window for messages to the client less its initial size: the sum of updates less the bytes
            that were sent.
        on_end: called once the client has ended the call.
        message_bytes_max: the most bytes of one message of the client.
        task: the handler's task; None before it begins.
    """

    def __init__(
        self, connection: Connection, number: int, budget: BodyBudget, unread: UnreadBytes, handler: Handler
    ) -> None:
        self._connection = connection
        self.number = number
        self._budget = budget
        self._unread = unread
        self.handler = handler
        self.deadline = NEVER
        self.ended = False
        self.half_closed = False
        self.head_sent = False
        self.unsent: deque[memoryview] = deque()
        self.window_in = CALL_WINDOW_BYTES
        self.window_change = 0
        self.on_end: Callable[[], None] = nothing
        self.message_bytes_max = MESSAGE_BYTES_MAX
        self.task: asyncio.Task[None] | None = None
        self._due = False  # the handler has begun, or waits for its turn
        self._messages: deque[bytes] = deque()
        self._partial = bytearray()
        self._failure: CallFailed | BodyBudgetSpent | None = None
        self._written_bytes = 0  # of all messages to the client
        self._queued_bytes = 0  # of unread messages
        self._reserved_bytes = 0  # of the budget
        self._replies: ReplyBudget | None = None  # once messages hold a reply: in place of the budget for bodies
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None

    # -- for the handler ---------------------------------------------------------------------------------------------

    async def read(self) -> bytes | None:
        """Return the next message; None after the last, or once the call has ended. Raises CallFailed, or
        BodyBudgetSpent if the budget has no room for the client's bytes."""
        while True:
            message = self.take()
            if message is not None:
                return message
            if self._failure is not None:
                raise self._failure
            if self.ended or self.half_closed:
                return None
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader

    def take(self) -> bytes | None:
        """Return the next message if it has arrived; else None."""
        if not self._messages:
            return None
        message = self._messages.popleft()
        self._queued_bytes -= _PREFIX.size + len(message)
        self._reserve()
        self._give_back()
        return message

    async def write(self, message: bytes) -> None:
        """Send a message, and wait until its last byte has left. Does nothing once the call has ended."""
        if self.ended:
            return
        self.unsent.append(memoryview(_PREFIX.pack(0, len(message)) + message))
        self._written_bytes += _PREFIX.size + len(message)
        self._connection.send(self)
        while self.unsent and not self.ended:
            if self._writer is None:
                self._writer = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._writer)

    def begin_reply(self, budget: ReplyBudget) -> None:
        """Count the client's further messages, which hold a reply, in this budget, which bodies do not fill. The call
        ends only if a message longer than the window finds no room."""
        self._budget.release(self._reserved_bytes)
        self._replies = budget
        budget.hold(self._reserved_bytes)

    # -- for the connection ------------------------------------------------------------------------------------------

    def feed(self, data: bytes) -> None:
        """Add bytes of the client."""
        if self._failure is None:
            self._partial += data
            try:
                self._reserve()
                self._cut()
            except (BodyBudgetSpent, CallFailed) as spent:
                self._fail(spent)
        self._give_back()

    def _reserve(self) -> None:
        """Raises BodyBudgetSpent, or CallFailed for a reply. Less than before always fits."""
        unread = self._queued_bytes + len(self._partial)
        counted = max(0, unread - UNCOUNTED_BYTES)
        more_bytes = counted - self._reserved_bytes
        if self._replies is not None:
            if more_bytes <= 0 or unread <= CALL_WINDOW_BYTES:
                self._replies.hold(more_bytes)
            elif not self._replies.take(more_bytes):
                raise CallFailed(Status.RESOURCE_EXHAUSTED, "limits.repliesBytesMax has no room for this reply")
        elif more_bytes > 0:
            self._budget.reserve(more_bytes, unread)
        else:
            self._budget.release(-more_bytes)
        self._reserved_bytes = counted

    def _cut(self) -> None:
        at = 0
        while len(self._partial) >= at + _PREFIX.size:
            compressed, message_bytes = _PREFIX.unpack_from(self._partial, at)
            if compressed:
                self._fail(CallFailed(Status.UNIMPLEMENTED, "messages are taken uncompressed"))
                return
            if message_bytes > self.message_bytes_max:
                self._fail(MessageTooLong(self.message_bytes_max))
                return
            end = at + _PREFIX.size + message_bytes
            if len(self._partial) < end:
                break
            with memoryview(self._partial) as view:
                self._messages.append(bytes(view[at + _PREFIX.size : end]))
            self._queued_bytes += end - at
            at = end
        if at:
            del self._partial[:at]
            self.deadline = NEVER
            self._wake()

    def _fail(self, failure: CallFailed | BodyBudgetSpent) -> None:
        self._partial = bytearray()
        self._reserve()
        self._failure = failure
        self._wake()

    def _give_back(self) -> None:
        """Unread messages keep their bytes of the window. What is here of a message that is not yet whole does not,
        as it may be longer than the window."""
        due = CALL_WINDOW_BYTES - self.window_in - self._queued_bytes
        if due >= CALL_WINDOW_BYTES // 2 and not self.ended and not self.half_closed:
            self.window_in += due
            self._connection.open_window(self, due)

    def close_input(self) -> None:
        """Note that the client sends no more."""
        self.half_closed = True
        self.deadline = NEVER
        if self._partial:
            self._fail(CallFailed(Status.INVALID_ARGUMENT, "the last message is not whole"))
        self._wake()

    def forget(self) -> None:
        """Release what the call holds. The client has ended it, or it is complete."""
        self.ended = True
        self.unsent.clear()
        self._messages.clear()
        self._partial = bytearray()
        self._queued_bytes = 0
        self._reserve()
        self._unread.hold(0)

    def end(self) -> None:
        """End the handler, which has begun, after forget()."""
        self._wake()
        self.sent()
        self.on_end()
        assert self.task is not None
        timer = asyncio.get_running_loop().call_later(END_SECONDS, self.task.cancel)
        self.task.add_done_callback(lambda done: timer.cancel())  # else a flood of resets piles up timers

    def start(self) -> None:
        """Begin the handler: it is its turn."""
        self._connection.start(self)

    def sent(self) -> None:
        """Note that nothing is unsent any more."""
        if self._writer is not None:
            self._writer.set_result(None)
            self._writer = None

    # -- client.open_connections.Connection --------------------------------------------------------------------------

    def is_expired(self, now: float) -> bool:
        unsent = sum(map(len, self.unsent))
        return self._unread.look(unsent or None, now, self._written_bytes) or now > self.deadline

    def expire(self, now: float) -> None:
        if self._unread.is_stalled(now):
            self._connection.reset(self)
        elif now > self.deadline:
            self.deadline = NEVER
            self._fail(
                CallFailed(Status.DEADLINE_EXCEEDED, "the first message took longer than connections.headSeconds")
            )

    def evict(self) -> None:
        self._connection.reset(self)

    def stalled_since(self) -> float | None:
        return self._unread.since

    def _wake(self) -> None:
        if not self._due:
            self._due = True
            self._connection.due(self)
        elif self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
