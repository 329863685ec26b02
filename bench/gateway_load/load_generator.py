"""A load generator: raw HTTP/1.1 on kept connections, with little work per request.

By default its loop is closed: a connection sends its next request once a reply is whole. At saturation latency is then
connections by rate, whatever is measured. With a rate the loop is open: requests arrive at random times that do not
depend on replies, and a request's time counts from its arrival, also if it waits for a connection.

Of a reply only the status line and the content length or the last chunk are read, and events are counted. A reply other
than 200 or one that breaks off is a failure.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter

CONNECT_SECONDS_MAX = 10.0
DRAIN_SECONDS_MAX = 10.0
_EVENT = b"data:"


@dataclass(slots=True)
class Measured:
    """The result of one run. Times in seconds, of requests that ended in the measured window."""

    whole: array[float] = field(default_factory=lambda: array("d"))  # request sent (open loop: arrived) -> last byte
    first_event: array[float] = field(default_factory=lambda: array("d"))  # request sent -> first event; streams
    events: int = 0
    failures: int = 0
    first_failure: str = ""
    seconds: float = 0.0


class Arrivals:
    """Requests that arrive at a mean rate, with exponential gaps. Each is sent at once if a connection is idle,
    otherwise by the first that becomes so. The event loops' timers are of milliseconds, so a timerfd is used.

    Args:
        per_second: the mean rate.
    """

    def __init__(self, per_second: float) -> None:
        self._gap: Callable[[], float] = lambda: random.expovariate(per_second)
        self._waiting: deque[float] = deque()  # times of arrival
        self._idle: list[Client] = []
        self._next = 0.0
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._timer = self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK)
        if self._timer < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")

    def start(self) -> None:
        self._next = perf_counter() + self._gap()
        asyncio.get_running_loop().add_reader(self._timer, self._due)
        self._arm()

    def stop(self) -> None:
        """Let no more arrive; those that wait are not sent."""
        asyncio.get_running_loop().remove_reader(self._timer)
        os.close(self._timer)
        self._waiting.clear()
        for client in self._idle:
            client.stop()

    def take(self, client: Client) -> float | None:
        """The arrival that the idle connection sends now; None: it is called later."""
        if self._waiting:
            return self._waiting.popleft()
        self._idle.append(client)
        return None

    def _due(self) -> None:
        os.read(self._timer, 8)
        now = perf_counter()
        while self._next <= now:
            self.arrive(self._next)
            self._next += self._gap()
        self._arm()

    def arrive(self, at: float) -> None:
        """One request, at that time."""
        self._waiting.append(at)
        if self._idle:
            self._idle.pop().send_next()

    def _arm(self) -> None:
        wait = max(1e-6, self._next - perf_counter())
        whole = int(wait)
        setting = (ctypes.c_long * 4)(0, 0, whole, int((wait - whole) * 1e9))
        self._libc.timerfd_settime(self._timer, 0, setting, None)


_CLOCK_MONOTONIC = 1


class Client(asyncio.Protocol):
    """One connection: the next request is sent when a reply is whole, or when one arrives."""

    def __init__(
        self, requests: Iterator[bytes], stream: bool, measured: Measured, arrivals: Arrivals | None = None
    ) -> None:
        self._requests = requests
        self._arrivals = arrivals
        self._stream = stream
        self._measured = measured
        self._sent = 0.0
        self._first = 0.0
        self._tail = b""
        self._left = -1  # bytes of the body to come; -1: before the head; -2: chunked
        self._head = b""
        self.measuring = False
        self.open = False
        self.stopping = False
        self.idle = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self.open = True

    def send_next(self) -> None:
        if self.stopping or not self.open:
            self._finish()
            return
        self._left = -1
        self._head = b""
        self._first = 0.0
        self._tail = b""
        arrived = None
        if self._arrivals is not None:
            arrived = self._arrivals.take(self)
            if arrived is None:
                return
        request = next(self._requests)
        self._sent = arrived or perf_counter()
        self._transport.write(request)

    def stop(self) -> None:
        """An idle connection has nothing to send any more."""
        self.stopping = True
        self._finish()

    def data_received(self, data: bytes) -> None:
        if self._left == -1:
            data = self._head + data if self._head else data
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._head = data
                return
            if not data.startswith(b"HTTP/1.1 200"):
                status = data.partition(b"\r\n")[0].decode("latin-1")
                self._fail(f"{status}: {data[end + 4 : end + 300].decode('latin-1')}")
                self.open = False  # so that the closed connection is not counted as a second failure
                self._finish()
                self._transport.abort()
                return
            head = data[:end].lower()
            at = head.find(b"content-length:")
            if at >= 0:
                stop = head.find(b"\r\n", at)
                self._left = int(head[at + 15 : stop if stop >= 0 else end])
            else:
                self._left = -2
            data = data[end + 4 :]
        seen = self._tail + data if self._tail else data
        self._tail = seen[-4:]  # shorter than an event's or a body's end, so nothing is counted twice
        if self._stream:
            count = seen.count(_EVENT)
            if count:
                if not self._first:
                    self._first = perf_counter()
                if self.measuring:
                    self._measured.events += count
        if self._left >= 0:
            self._left -= len(data)
            whole = self._left <= 0
        else:
            whole = seen.endswith(b"0\r\n\r\n")
        if whole:
            self._whole()

    def _whole(self) -> None:
        now = perf_counter()
        if self.measuring:
            measured = self._measured
            measured.whole.append(now - self._sent)
            if self._stream:
                measured.first_event.append(self._first - self._sent)
        self._left = -1
        self.send_next()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.open and not self.idle.done() and not self.stopping:
            self._fail(f"connection closed ({exc})")
        self.open = False
        self._finish()

    def _fail(self, failure: str) -> None:
        self._measured.failures += 1
        self._measured.first_failure = self._measured.first_failure or failure

    def _finish(self) -> None:
        if not self.idle.done():
            self.idle.set_result(None)

    def close(self) -> None:
        self.stopping = True
        if self.open:
            self._transport.abort()


def requests_of(bodies: Iterable[bytes], port: int, key: str | None = None) -> Iterator[bytes]:
    """Whole requests: the bodies with a client's usual head."""
    authorization = f"authorization: Bearer {key}\r\n" if key else ""
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
        f"accept: */*\r\nuser-agent: bench\r\n{authorization}content-length: "
    ).encode()
    for body in bodies:
        yield b"%b%d\r\n\r\n%b" % (head, len(body), body)


async def generate_load(
    ports: Sequence[int],
    requests: Iterator[bytes],
    *,
    stream: bool,
    concurrent: int,
    warm_seconds: float,
    seconds: float,
    at_start: Callable[[], None],
    at_end: Callable[[], None],
    rate: float = 0.0,
) -> Measured:
    """Keep `concurrent` requests open for warm_seconds + seconds; only the latter count. requests: more than are sent.
    at_start and at_end are called when that window opens and closes. With a rate, so many requests arrive in a second,
    for as many connections."""
    loop = asyncio.get_running_loop()
    measured = Measured()
    arrivals = Arrivals(rate) if rate else None
    clients: list[Client] = []
    for at in range(concurrent):
        async with asyncio.timeout(CONNECT_SECONDS_MAX):
            _, client = await loop.create_connection(
                lambda: Client(requests, stream, measured, arrivals), "127.0.0.1", ports[at % len(ports)]
            )
        clients.append(client)
    for client in clients:
        client.send_next()
    if arrivals is not None:
        arrivals.start()
    await asyncio.sleep(warm_seconds)
    for client in clients:
        client.measuring = True
    at_start()
    started = perf_counter()
    await asyncio.sleep(seconds)
    measured.seconds = perf_counter() - started
    at_end()
    for client in clients:
        client.measuring = False
        client.stopping = True
    if arrivals is not None:
        arrivals.stop()
    return await _ended(clients, measured)


async def _ended(clients: list[Client], measured: Measured) -> Measured:
    """Wait for requests in flight, so that no router starts its next run with them."""
    await asyncio.wait([client.idle for client in clients], timeout=DRAIN_SECONDS_MAX)
    for client in clients:
        client.close()
    await asyncio.sleep(0.1)
    return measured
