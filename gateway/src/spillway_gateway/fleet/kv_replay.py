"""One request to the replay socket of an engine's event publisher. On the event loop.

vLLM's publisher answers on a ROUTER: every batch that it still has from a sequence number on, then an end marker. A
ROUTER drops what does not fit its queue (1,000 messages unless the engine sets more), the end marker included. Every
request brings at least one batch, so asking again from the first missing one comes to an end.
"""

from __future__ import annotations

import asyncio

import zmq
import zmq.asyncio

from spillway_gateway.fleet.event_decoder import replay_request

REPLAY_MESSAGE_SECONDS_MAX = 5.0  # for the first message; an idle publisher polls its replay socket every 0.1 s
REPLAY_PAUSE_SECONDS_MAX = 0.5  # between two messages
SOCKET_QUEUE_MAX = 100_000  # messages
MESSAGE_BYTES_MAX = 16 * 1024 * 1024  # larger than any batch of an engine step; ZMQ drops the connection instead


class ReplayFailed(Exception):
    """A replay did not begin in time, or stopped without a new batch."""


class Replay:
    """A replay whose first message has arrived. close() it."""

    def __init__(self, socket: zmq.asyncio.Socket, first: list[bytes]) -> None:
        self._socket = socket
        self.first = first

    @classmethod
    async def begin(cls, context: zmq.asyncio.Context, url: str, start_sequence: int) -> Replay:
        """Ask for all batches from `start_sequence` on. Raises ReplayFailed when no message arrives in time."""
        socket = context.socket(zmq.DEALER)  # a new one for each request: nothing of an earlier replay arrives on it
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, SOCKET_QUEUE_MAX)
            socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
            socket.setsockopt(zmq.IPV6, "[" in url)
            socket.connect(url)
            async with asyncio.timeout(REPLAY_MESSAGE_SECONDS_MAX):
                await socket.send_multipart(replay_request(start_sequence))
                return cls(socket, await socket.recv_multipart())
        except TimeoutError as error:
            socket.close(linger=0)
            raise ReplayFailed(f"no answer within {REPLAY_MESSAGE_SECONDS_MAX:g} s") from error
        except BaseException:
            socket.close(linger=0)
            raise

    async def next(self) -> list[bytes]:
        """The next message. Raises TimeoutError after REPLAY_PAUSE_SECONDS_MAX without one."""
        async with asyncio.timeout(REPLAY_PAUSE_SECONDS_MAX):
            frames: list[bytes] = await self._socket.recv_multipart()
        return frames

    def close(self) -> None:
        """Close the socket. May be called twice."""
        self._socket.close(linger=0)
