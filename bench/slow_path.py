"""A network path to a server on this machine that takes a while: a proxy on loopback that delays what it carries.

Each direction is late by half of the round trip, whatever its size, so that requests under way at once wait together,
as they do on a long path. A new connection costs another round trip, as TCP's handshake does. The bandwidth of each
direction, of all connections together, has a bound if one is set.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_READ_BYTES = 1 << 18
_WAITING_BYTES_MAX = 4 << 20  # of one connection and direction: what a fast sender may be ahead


class SlowPath:
    """The proxy.

    Attributes:
        port: Port of loopback on which it listens.
        round_trip_seconds: Round trip of what arrives from now on.
        bytes_per_second: Bandwidth of each direction for what arrives from now on; None: no bound.
    """

    def __init__(self, target_port: int) -> None:
        self.round_trip_seconds = 0.0
        self.bytes_per_second: float | None = None
        self._free_at: dict[str, float] = {}  # by direction: when what was read before has passed
        self.port = 0
        self._target_port = target_port

    async def serve(self, ready: threading.Event, ended: asyncio.Event) -> None:
        server = await asyncio.start_server(self._carry, "127.0.0.1", 0, limit=_READ_BYTES)
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        await ended.wait()
        server.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(self.round_trip_seconds)
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port, limit=_READ_BYTES)
        except OSError:
            writer.close()
            return
        await asyncio.gather(self._pass("there", reader, far_writer), self._pass("back", far_reader, writer))

    def _due(self, direction: str, size: int, now: float) -> float:
        passed = now
        if self.bytes_per_second is not None:
            passed = self._free_at[direction] = max(now, self._free_at.get(direction, 0)) + size / self.bytes_per_second
        return passed + self.round_trip_seconds / 2

    async def _pass(self, direction: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One direction: read at once, written when it is due."""
        loop = asyncio.get_running_loop()
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_WAITING_BYTES_MAX // _READ_BYTES)

        async def read() -> None:
            data = b" "
            while data:
                try:
                    data = await reader.read(_READ_BYTES)
                except OSError:
                    data = b""
                await waiting.put((self._due(direction, len(data), loop.time()), data))

        reading = asyncio.ensure_future(read())
        try:
            while True:
                due, data = await waiting.get()
                if (left := due - loop.time()) > 0:
                    await asyncio.sleep(left)
                if not data:
                    break
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            reading.cancel()
            writer.close()


@contextmanager
def slow_path(target_port: int) -> Iterator[SlowPath]:
    """A path that is open within this context, served by a thread."""
    path, ready = SlowPath(target_port), threading.Event()
    loop = asyncio.new_event_loop()
    ended = asyncio.Event()

    def serve() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(path.serve(ready, ended))
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()

    thread = threading.Thread(target=serve, name="slow-path", daemon=True)
    thread.start()
    ready.wait()
    try:
        yield path
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(5)
