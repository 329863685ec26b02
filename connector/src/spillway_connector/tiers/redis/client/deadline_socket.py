"""The socket under a redis-py connection, whose every wait ends at one absolute deadline.

redis-py bounds each wait alone (``socket_timeout``), so a reply that trickles in byte by byte never times out.
"""

from __future__ import annotations

import math
import select
import socket
import ssl
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import Any, cast

from redis.exceptions import InvalidResponse

from spillway_connector.tiers.borrow import Borrow, Span, taken_back
from spillway_connector.tiers.tier import Clock

REPLY_BYTES_MAX = 4 * 1024 * 1024  # that redis-py's parser may take in for one exchange; values do not pass through it
STRETCH_BYTES = 1024 * 1024  # of one read within a value: who gets it then finds it in the processor's caches
BULK_BYTES = 512 * 1024  # if at least this number of bytes is missing from a value, a wait ends once they have arrived
_STEP_BYTES = 512  # of one read while the length of a value is expected: the start of the value in it is copied
_LINE_BYTES_MAX = 64 * 1024
_POLL_SECONDS_MAX = 86_400.0  # poll(2) takes milliseconds in 31 bits
_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_CONNECT_DEADLINE: ContextVar[float] = ContextVar("connect_deadline")


class connect_by:
    """Return a context in which redis-py's connecting, and its name lookups, end at ``deadline``.

    Used like a function; as a generator it would take 1 us more for each use of a connection.
    """

    __slots__ = ("_deadline", "_token")

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline

    def __enter__(self) -> None:
        self._token = _CONNECT_DEADLINE.set(self._deadline)

    def __exit__(self, *_: object) -> None:
        _CONNECT_DEADLINE.reset(self._token)


def connect_deadline() -> float:
    return _CONNECT_DEADLINE.get()


class DeadlineSocket:
    """A socket for one thread at a time, except ``shutdown``, which ends a wait in progress. Raises OSError.

    It takes what there is and waits only if there is nothing; the socket itself never blocks.
    ``unread``: bytes that were received with the line before them; the next read gets them, also one of redis-py's.
    ``answered``: whether anything was received since :meth:`begin`; on a stale connection nothing is.
    """

    def __init__(self, plain: socket.socket, clock: Clock, deadline: float) -> None:
        plain.setblocking(False)
        self._plain = plain
        self._clock = clock
        self._encrypted = False
        self._step = memoryview(bytearray(_STEP_BYTES))
        self._in_bulk = False  # the kernel wakes us for BULK_BYTES only
        self.unread = bytearray()
        self._waits = {event: select.poll() for event in (select.POLLIN, select.POLLOUT)}
        for event, wait in self._waits.items():
            wait.register(plain, event)
        self.begin(deadline)

    def encrypt(self, context: ssl.SSLContext, server_hostname: str) -> None:
        """Speak TLS from now on. Raises OSError, ssl.SSLError, TimeoutError; the socket is closed then."""
        try:
            self._plain.settimeout(self._remaining("encrypting"))
            self._plain = context.wrap_socket(self._plain, server_hostname=server_hostname)
            self._plain.setblocking(False)
        except BaseException:
            self._plain.close()
            raise
        self._encrypted = True

    def has_something(self) -> bool:
        """Whether a read would return at once: with bytes, or with the end of the connection."""
        if self.unread or (self._encrypted and cast("ssl.SSLSocket", self._plain).pending()):
            return True
        return bool(self._waits[select.POLLIN].poll(0))

    def begin(self, deadline: float) -> None:
        """Begin an exchange that ends at ``deadline``."""
        self._deadline = deadline
        self._allowance = REPLY_BYTES_MAX
        self.answered = False

    def send(self, parts: Sequence[bytes | Span]) -> None:
        """Send all of ``parts`` from where they are.

        A span is held while bytes of it are taken, never while waiting until more can be. Raises TimeoutError at the
        deadline, TierRefused(CLOSED) if a span was taken back.
        """
        spans = [part if isinstance(part, Span) else Span.of(memoryview(part)) for part in parts]
        rest = deque(span for span in spans if span.nbytes)
        while rest:
            self._remaining("sending")
            try:
                sent = self._offer(rest)
            except _NOT_NOW as error:
                self._wait(error, select.POLLOUT, "sending")
                continue
            while rest and sent >= rest[0].nbytes:
                sent -= rest.popleft().nbytes
            if sent:
                rest[0] = rest[0].behind(sent)

    def bulk_length(self) -> int | None:
        """The length of the bulk string that comes next; None, and nothing is consumed, if another reply comes."""
        while (end := self.unread.find(b"\r\n")) < 0:
            if len(self.unread) > _LINE_BYTES_MAX or self.unread[:1] not in (bytearray(), b"$"):
                return None
            count = self._receive(self._step)
            self.unread += self._step[:count]
        digits = bytes(self.unread[1:end])
        if self.unread[:1] != b"$" or not digits.isdigit() or len(digits) > 18:
            return None
        del self.unread[: end + 2]
        return int(digits)

    def fill(self, span: Span, arrived: Callable[[memoryview], None]) -> None:
        """Receive until ``span`` is full, calling ``arrived`` with each stretch of it that has been filled.

        The span is held while bytes that are there are taken and ``arrived`` runs, never while waiting for more. Raises
        TierRefused(CLOSED) if it was taken back.
        """
        at, end = span.start, span.end
        try:
            while at < end:
                self._remaining("receiving")
                until = min(end, at + STRETCH_BYTES)
                memory = span.borrow.begin()
                if memory is None:
                    raise taken_back()
                try:
                    filled, more = self._take(memory[at:until])
                    if filled:
                        arrived(memory[at : at + filled])
                finally:
                    del memory
                    span.borrow.end()
                at += filled
                if at < end and not more:
                    self._wake_at_bulk(end - at >= BULK_BYTES)
                    self._await(select.POLLIN, "receiving")
        finally:
            self._wake_at_bulk(False)

    # Methods that redis-py calls; everything else that it calls is the plain socket's.

    def recv(self, size: int) -> bytes:
        if self.unread:
            taken = bytes(self.unread[:size])
            del self.unread[:size]
            return taken
        if self._allowance <= 0:
            raise InvalidResponse(f"a reply of more than {REPLY_BYTES_MAX} bytes")
        while True:
            self._remaining("receiving")
            try:
                received = self._plain.recv(size)
                break
            except _NOT_NOW as error:
                self._wait(error, select.POLLIN, "receiving")
        self._allowance -= len(received)
        self.answered = self.answered or bool(received)
        return received

    def sendall(self, data: bytes) -> None:
        self.send([data])

    def settimeout(self, seconds: float | None) -> None:
        """The deadline alone counts."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def _offer(self, spans: Iterable[Span]) -> int:
        """Give the start of ``spans`` to the socket, of one at most STRETCH_BYTES: how many bytes it took."""
        held: list[Borrow] = []
        views: list[memoryview] = []
        try:
            for span in spans:
                memory = span.borrow.begin()
                if memory is None:
                    raise taken_back()
                held.append(span.borrow)
                views.append(memory[span.start : min(span.end, span.start + STRETCH_BYTES)])
                del memory
                if self._encrypted or views[-1].nbytes < span.nbytes:
                    break  # TLS has no sendmsg; it copies into its records anyway
            return self._plain.send(views[0]) if self._encrypted else self._plain.sendmsg(views)
        finally:
            views.clear()
            for borrow in held:
                borrow.end()

    def _receive(self, target: memoryview) -> int:
        while True:
            self._remaining("receiving")
            try:
                return self._counted(self._plain.recv_into(target))
            except _NOT_NOW as error:
                self._wait(error, select.POLLIN, "receiving")

    def _take(self, target: memoryview) -> tuple[int, bool]:
        """Take what has arrived, without waiting. Return how many bytes (0: none), and whether there may be more."""
        if self.unread:
            count = min(len(self.unread), target.nbytes)
            target[:count] = self.unread[:count]
            del self.unread[:count]
            return count, True
        try:
            count = self._counted(self._plain.recv_into(target))
        except _NOT_NOW:
            return 0, False
        return count, self._encrypted or count == target.nbytes  # a read from TLS ends with its record

    def _counted(self, received: int) -> int:
        if not received:
            raise ConnectionResetError("the server closed the connection")
        self.answered = True
        return received

    def _wake_at_bulk(self, wanted: bool) -> None:
        """Whether poll() ends a wait for bytes at BULK_BYTES of them, or at the first; the end always ends it."""
        if wanted == self._in_bulk or self._encrypted:
            return
        try:
            self._plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, BULK_BYTES if wanted else 1)
        except OSError:
            return  # the connection is closed, or the system has no such option: then waits are shorter
        self._in_bulk = wanted

    def _wait(self, error: Exception, event: int, doing: str) -> None:
        """Wait until the operation that failed with ``error`` may be tried again.

        If the error does not tell what to wait for, wait for ``event``.
        TLS may have to read in order to write, and the reverse.
        """
        if isinstance(error, ssl.SSLWantReadError):
            event = select.POLLIN
        elif isinstance(error, ssl.SSLWantWriteError):
            event = select.POLLOUT
        self._await(event, doing)

    def _await(self, event: int, doing: str) -> None:
        """Wait for ``event`` or the end of the connection."""
        seconds = min(self._remaining(doing), _POLL_SECONDS_MAX)
        if not self._waits[event].poll(math.ceil(seconds * 1000)):
            raise _passed(doing)

    def _remaining(self, doing: str) -> float:
        """Seconds until the deadline, more than 0. Raises TimeoutError when it has passed."""
        remaining = self._deadline - self._clock()
        if remaining <= 0:
            raise _passed(doing)
        return remaining


def _passed(doing: str) -> TimeoutError:
    return TimeoutError(f"the deadline passed while {doing}")
