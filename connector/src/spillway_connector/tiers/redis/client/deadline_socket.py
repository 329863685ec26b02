"""The socket under a redis-py connection, whose every wait ends at one absolute deadline.

redis-py bounds each wait alone (``socket_timeout``), so a reply that trickles in byte by byte never times out.
"""

from __future__ import annotations

import math
import select
import socket
import ssl
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, cast

from redis.exceptions import InvalidResponse

from spillway_connector.tiers.lease import Span, taken_back
from spillway_connector.tiers.tier import Clock

REPLY_BYTES_MAX = 4 * 1024 * 1024  # that redis-py's parser may take in for one exchange; values do not pass through it
STRETCH_BYTES = 512 * 1024  # of one read within a value: who gets it then finds it in the processor's caches
_STEP_BYTES = 4096  # of one read while the length of a value is expected: the start of the value in it is copied
_LINE_BYTES_MAX = 64 * 1024
_POLL_SECONDS_MAX = 86_400.0  # poll(2) takes milliseconds in 31 bits
_CONNECT_DEADLINE: ContextVar[float] = ContextVar("connect_deadline")


class connect_by:
    """Within it, what redis-py connects, and whom it asks where to, ends at ``deadline``.

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
    """Not for several threads at once, but for ``shutdown``, which ends a wait in progress. Raises OSError.

    ``unread``: bytes that were received with the line before them; the next read gets them, also one of redis-py's.
    ``answered``: whether anything was received since :meth:`begin`; on a stale connection nothing is.
    """

    def __init__(self, plain: socket.socket, clock: Clock, deadline: float) -> None:
        self._plain = plain
        self._clock = clock
        self._encrypted = False
        self._step = memoryview(bytearray(_STEP_BYTES))
        self.unread = bytearray()
        self._arrivals = select.poll()
        self._arrivals.register(plain, select.POLLIN)
        self.begin(deadline)

    def encrypt(self, context: ssl.SSLContext, server_hostname: str) -> None:
        """From now on speak TLS. Raises OSError, ssl.SSLError, TimeoutError; the socket is closed then."""
        try:
            self._allow_wait("encrypting")
            self._plain = context.wrap_socket(self._plain, server_hostname=server_hostname)
        except BaseException:
            self._plain.close()
            raise
        self._encrypted = True

    def has_something(self) -> bool:
        """Whether a read would return at once: with bytes, or with the end of the connection."""
        if self.unread or (self._encrypted and cast("ssl.SSLSocket", self._plain).pending()):
            return True
        return bool(self._arrivals.poll(0))

    def begin(self, deadline: float) -> None:
        """Begin an exchange that ends at ``deadline``."""
        self._deadline = deadline
        self._allowance = REPLY_BYTES_MAX
        self.answered = False

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send all of ``parts`` from where they are. Raises TimeoutError at the deadline."""
        views = [memoryview(part) for part in parts if len(part)]
        while views:
            self._allow_wait("sending")
            try:  # TLS has no sendmsg; it copies into its records anyway
                sent = self._plain.send(views[0]) if self._encrypted else self._plain.sendmsg(views)
            except TimeoutError:
                raise _passed("sending") from None
            while views and sent >= views[0].nbytes:
                sent -= views.pop(0).nbytes
            if sent:
                views[0] = views[0][sent:]

    def bulk_length(self) -> int | None:
        """The length of the bulk string that comes next; None, and nothing is consumed, where another reply comes."""
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
        TierRefused(CLOSED) where it was taken back.
        """
        at = span.start
        self._plain.settimeout(0)
        while at < span.end:
            if not self.unread:
                self._await_bytes()
            memory = span.lease.begin()
            if memory is None:
                raise taken_back()
            try:
                filled = self._take(memory[at : min(span.end, at + STRETCH_BYTES)])
                if filled:
                    arrived(memory[at : at + filled])
            finally:
                del memory
                span.lease.end()
            at += filled

    # What redis-py calls; everything else that it calls is the plain socket's.

    def recv(self, size: int) -> bytes:
        if self.unread:
            taken = bytes(self.unread[:size])
            del self.unread[:size]
            return taken
        if self._allowance <= 0:
            raise InvalidResponse(f"a reply of more than {REPLY_BYTES_MAX} bytes")
        self._allow_wait("receiving")
        received = self._plain.recv(size)
        self._allowance -= len(received)
        self.answered = self.answered or bool(received)
        return received

    def sendall(self, data: bytes) -> None:
        self.send([data])

    def settimeout(self, seconds: float | None) -> None:
        """The deadline alone counts."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def _receive(self, target: memoryview) -> int:
        self._allow_wait("receiving")
        try:
            count = self._plain.recv_into(target)
        except TimeoutError:
            raise _passed("receiving") from None
        return self._counted(count)

    def _take(self, target: memoryview) -> int:
        """What has arrived, without waiting: how many bytes, 0 for none. The socket does not block."""
        if self.unread:
            count = min(len(self.unread), target.nbytes)
            target[:count] = self.unread[:count]
            del self.unread[:count]
            return count
        try:
            return self._counted(self._plain.recv_into(target))
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return 0

    def _counted(self, received: int) -> int:
        if not received:
            raise ConnectionResetError("the server closed the connection")
        self.answered = True
        return received

    def _await_bytes(self) -> None:
        """Wait until something has arrived, or the end of the connection."""
        remaining = self._deadline - self._clock()
        if remaining <= 0:
            raise _passed("receiving")
        if self._encrypted and cast("ssl.SSLSocket", self._plain).pending():
            return
        if not self._arrivals.poll(math.ceil(min(remaining, _POLL_SECONDS_MAX) * 1000)):
            raise _passed("receiving")

    def _allow_wait(self, doing: str) -> None:
        remaining = self._deadline - self._clock()
        if remaining <= 0:
            raise _passed(doing)  # settimeout(0) would mean "do not block" and surface as another error
        self._plain.settimeout(remaining)


def _passed(doing: str) -> TimeoutError:
    return TimeoutError(f"the deadline passed while {doing}")
