"""A closed-loop load generator: raw HTTP/1.1 on kept connections, as few instructions per request as Python can do.

Replies are not parsed but recognised: status line, then the length or the last chunk, and events counted. A reply that
is not a 200 or breaks off is a failure and is counted as one.
"""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from gateway_load.prompts import NUMBER

CONNECT_SECONDS_MAX = 10.0
DRAIN_SECONDS_MAX = 10.0
_EVENT = b"data:"
_numbers = itertools.count(1)  # of this run, so that a router's second round brings nothing that it knows


@dataclass(slots=True)
class Asked:
    """What one run saw. Times in seconds, of requests that ended in the measured window."""

    whole: array[float] = field(default_factory=lambda: array("d"))  # request sent -> last byte
    first_event: array[float] = field(default_factory=lambda: array("d"))  # request sent -> first event; streams
    events: int = 0
    failures: int = 0
    said: str = ""  # what the first failure looked like
    seconds: float = 0.0


class Client(asyncio.Protocol):
    """One connection: the next request leaves when a reply is whole."""

    def __init__(self, requests: Iterator[bytes], stream: bool, asked: Asked) -> None:
        self._requests = requests
        self._stream = stream
        self._asked = asked
        self._sent = 0.0
        self._first = 0.0
        self._tail = b""
        self._left = -1  # bytes of the body still to come; -1: head not seen; -2: chunked
        self._head = b""
        self.measuring = False
        self.open = False
        self.stopping = False
        self.idle = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self.open = True

    def ask(self) -> None:
        if self.stopping or not self.open:
            self._rest()
            return
        self._left = -1
        self._head = b""
        self._first = 0.0
        self._tail = b""
        request = next(self._requests)
        self._sent = perf_counter()
        self._transport.write(request)

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
                self.open = False  # this client ends here, and its connection is no second failure
                self._rest()
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
        self._tail = seen[-4:]  # too short to hold an event's or a body's end as a whole, so nothing counts twice
        if self._stream:
            count = seen.count(_EVENT)
            if count:
                if not self._first:
                    self._first = perf_counter()
                if self.measuring:
                    self._asked.events += count
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
            asked = self._asked
            asked.whole.append(now - self._sent)
            if self._stream:
                asked.first_event.append(self._first - self._sent)
        self._left = -1
        self.ask()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.open and not self.idle.done() and not self.stopping:
            self._fail(f"connection closed ({exc})")
        self.open = False
        self._rest()

    def _fail(self, said: str) -> None:
        self._asked.failures += 1
        self._asked.said = self._asked.said or said

    def _rest(self) -> None:
        if not self.idle.done():
            self.idle.set_result(None)

    def close(self) -> None:
        self.stopping = True
        if self.open:
            self._transport.abort()


def requests_of(bodies: Sequence[bytes], port: int, key: str | None = None) -> list[bytes]:
    """Whole requests: the bodies with a client's usual head."""
    authorization = f"authorization: Bearer {key}\r\n" if key else ""
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
        f"accept: */*\r\nuser-agent: bench\r\n{authorization}content-length: "
    ).encode()
    return [head + str(len(body)).encode() + b"\r\n\r\n" + body for body in bodies]


def numbered(requests: Sequence[bytes], numbers: Iterator[int]) -> Iterator[bytes]:
    """The requests in turn and for ever, with a new number for NUMBER in each that has it."""
    cut = [request.partition(NUMBER.encode()) for request in requests]
    for before, found, after in itertools.cycle(cut):
        yield before + b"%08d" % next(numbers) + after if found else before


async def ask(
    ports: Sequence[int],
    requests: Sequence[bytes],
    *,
    stream: bool,
    concurrent: int,
    warm_seconds: float,
    seconds: float,
    at_start: Callable[[], None],
    at_end: Callable[[], None],
) -> Asked:
    """Keep `concurrent` requests open for warm_seconds + seconds; only the latter count. at_start and
    at_end are called when that window opens and closes."""
    loop = asyncio.get_running_loop()
    asked = Asked()
    source = numbered(requests, _numbers)
    clients: list[Client] = []
    for at in range(concurrent):
        async with asyncio.timeout(CONNECT_SECONDS_MAX):
            _, client = await loop.create_connection(
                lambda: Client(source, stream, asked), "127.0.0.1", ports[at % len(ports)]
            )
        clients.append(client)
    for client in clients:
        client.ask()
    await asyncio.sleep(warm_seconds)
    for client in clients:
        client.measuring = True
    at_start()
    started = perf_counter()
    await asyncio.sleep(seconds)
    asked.seconds = perf_counter() - started
    at_end()
    for client in clients:
        client.measuring = False
        client.stopping = True
    return await _ended(clients, asked)


async def _ended(clients: list[Client], asked: Asked) -> Asked:
    """Requests on their way get some time, so that no router starts its next run with leftovers."""
    await asyncio.wait([client.idle for client in clients], timeout=DRAIN_SECONDS_MAX)
    for client in clients:
        client.close()
    await asyncio.sleep(0.1)
    return asked
