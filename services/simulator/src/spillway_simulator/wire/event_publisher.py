"""Publishes event batches as vLLM does: PUB with sequence numbers from 0, ROUTER for replays from a bounded memory.

Both sockets belong to the event loop's thread. A replay that does not fit the ROUTER's queue is cut off silently, as in
the engine (ZMQ's default of 1,000 messages).
"""

from __future__ import annotations

import asyncio
from collections import deque

import zmq
import zmq.asyncio

from spillway_simulator.wire.kv_event_encoding import EventForm

REBIND_SECONDS_MAX = 5.0
_END = b"\xff" * 8


class EventPublisher:
    """One engine's publisher. form: the map form comes with the topic in replays, as in the versions that send it."""

    def __init__(self, context: zmq.asyncio.Context, host: str, ports: tuple[int, int], form: EventForm, replay: int):
        self._form = form
        self._topic = b"kv@simulated"
        self._batches: deque[tuple[int, bytes]] = deque(maxlen=replay)
        self._next = 0
        self._drop_left = 0
        self._drop_replayable = True
        self._context = context
        self._host = host
        self._ports = ports
        self._open()

    def _open(self) -> None:
        shadow: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(self._context.underlying)
        self._pub = shadow.socket(zmq.PUB)
        self._pub.setsockopt(zmq.LINGER, 0)
        self._pub.setsockopt(zmq.SNDHWM, 100_000)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        addresses = []
        for socket, port in ((self._pub, self._ports[0]), (self._router, self._ports[1])):
            socket.bind(f"tcp://{self._host}:{port or '*'}")
            addresses.append(socket.getsockopt_string(zmq.LAST_ENDPOINT))
        self.events_url, self.replay_url = addresses
        self._ports = (int(addresses[0].rpartition(":")[2]), int(addresses[1].rpartition(":")[2]))
        self._task = asyncio.get_running_loop().create_task(self._serve_replays(self._router))

    @property
    def next_sequence(self) -> int:
        return self._next

    def drop(self, batches: int, *, replayable: bool) -> None:
        """Lose the next batches on their way; with replayable=False they cannot be asked for again either."""
        self._drop_left = batches
        self._drop_replayable = replayable

    def publish(self, payload: bytes) -> None:
        sequence = self._next
        self._next += 1
        if self._drop_left:
            self._drop_left -= 1
            if self._drop_replayable:
                self._batches.append((sequence, payload))
            return
        self._batches.append((sequence, payload))
        self._pub.send_multipart([self._topic, sequence.to_bytes(8, "big"), payload], zmq.NOBLOCK)

    async def _serve_replays(self, router: zmq.asyncio.Socket) -> None:
        topic = [self._topic] if self._form == "map" else []
        end_topic = [b""] if self._form == "map" else []
        while True:
            frames = await router.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                continue  # not a replay request; an engine ignores it too
            identity, first = frames[0], int.from_bytes(frames[2], "big")
            for sequence, payload in [batch for batch in self._batches if batch[0] >= first]:
                await router.send_multipart([identity, b"", *topic, sequence.to_bytes(8, "big"), payload])
            await router.send_multipart([identity, b"", *end_topic, _END, b""])

    async def restart(self) -> None:
        """Become another process at the same addresses: sequence numbers from 0, no history, connections new.

        Raises zmq.ZMQError when the addresses do not become free within REBIND_SECONDS_MAX.
        """
        self.close()
        self._batches.clear()
        self._next = 0
        self._drop_left = 0
        deadline = asyncio.get_running_loop().time() + REBIND_SECONDS_MAX
        while True:
            try:
                self._open()
                return
            except zmq.ZMQError as error:
                self._pub.close(linger=0)
                self._router.close(linger=0)
                if error.errno != zmq.EADDRINUSE or asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(0.01)  # ZMQ frees an address in a thread of its own, some time after close()

    def close(self) -> None:
        self._task.cancel()
        self._pub.close(linger=0)
        self._router.close(linger=0)
