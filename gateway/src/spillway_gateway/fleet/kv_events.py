"""Follows one engine's KV events: subscribe, replay from the start, heal gaps, notice restarts.

PUB drops what was sent before the subscription stood and whatever a slow reader missed, so the sequence number is the
only truth: on every new connection the index's entries of this engine are dropped and rebuilt from a replay; a gap is
replayed from where it began; a number that was seen before with a later timestamp is another process at the same
address. Whatever cannot be healed ends with an empty index for this engine, never with a wrong one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from enum import Enum, auto
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from spillway_gateway.fleet.engines import Engine, EngineState
from spillway_gateway.fleet.event_decoder import (
    AllBlocksCleared,
    BatchFrame,
    EventBatch,
    ReplayEnd,
    Undecodable,
    decode_batch,
    parse_live_frames,
    parse_replay_frames,
    replay_request,
)
from spillway_gateway.fleet.prefix_index import PrefixIndex
from spillway_gateway.metrics import GatewayMetrics

logger = logging.getLogger(__name__)

LIVE_QUEUE_MAX = 1_000  # messages between socket and index; beyond it ZMQ's own bounded buffer holds them
SOCKET_QUEUE_MAX = 100_000
TURN_SECONDS_MAX = 0.002  # event work per turn of the loop, so that requests are not kept waiting
REPLAY_MESSAGE_SECONDS_MAX = 5.0  # an idle publisher polls its replay socket every 0.1 s
REPLAY_PAUSE_SECONDS_MAX = 0.5  # between two messages of a replay that has begun
REPLAY_BACKOFF_SECONDS = 2.0


class _Signal(Enum):
    CONNECTED = auto()
    DISCONNECTED = auto()
    ENGINE_DOWN = auto()
    ENGINE_UP = auto()


class ReplayFailed(Exception):
    """The replay did not come to its end marker in time."""


class EventFollower:
    """One task per engine; ends by cancellation and leaves no socket open."""

    def __init__(
        self,
        engine: Engine,
        index: PrefixIndex,
        metrics: GatewayMetrics,
        context: zmq.asyncio.Context,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        assert engine.config.kv_events is not None
        self._engine = engine
        self._index = index
        self._metrics = metrics
        self._context = context
        self._clock = clock
        self._events_url = engine.config.kv_events
        self._replay_url = engine.config.kv_replay
        self._queue: asyncio.Queue[_Signal | list[bytes]] = asyncio.Queue(LIVE_QUEUE_MAX)
        self._applied = -1  # sequence of the last batch in the index
        self._applied_at = 0.0  # the engine's clock on it
        self._clean = True  # nothing of this engine is in the index
        self._replay_due: float | None = None  # loop time of the next try after a failed replay
        self._turn_started = 0.0
        self._parked: set[asyncio.Task[None]] = set()
        self._freeing: set[asyncio.Task[None]] = set()  # what was forgotten, on its way out of the index

    async def run(self) -> None:
        self._engine.on_state.append(self._engine_changed)
        subscriber = self._context.socket(zmq.SUB)
        subscriber.setsockopt(zmq.RCVHWM, SOCKET_QUEUE_MAX)
        subscriber.setsockopt(zmq.LINGER, 0)
        subscriber.setsockopt(zmq.RECONNECT_IVL, 100)
        subscriber.setsockopt(zmq.RECONNECT_IVL_MAX, 2_000)
        subscriber.setsockopt(zmq.SUBSCRIBE, b"")
        subscriber.setsockopt(zmq.IPV6, "[" in self._events_url)
        monitor = subscriber.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        readers = [
            asyncio.create_task(self._read_monitor(monitor)),
            asyncio.create_task(self._read_live(subscriber)),
        ]
        try:
            subscriber.connect(self._events_url)
            await self._consume()
        finally:
            self._engine.on_state.remove(self._engine_changed)
            self._engine.events_live = False
            for reader in [*readers, *self._parked]:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
            subscriber.disable_monitor()
            monitor.close(linger=0)
            subscriber.close(linger=0)

    # -- producers ---------------------------------------------------------------------------------------------------

    async def _read_live(self, subscriber: zmq.asyncio.Socket) -> None:
        while True:
            await self._queue.put(await subscriber.recv_multipart())

    async def _read_monitor(self, monitor: Any) -> None:
        while True:
            event = (await recv_monitor_message(monitor))["event"]
            signal = _Signal.CONNECTED if event == zmq.EVENT_HANDSHAKE_SUCCEEDED else _Signal.DISCONNECTED
            await self._queue.put(signal)

    def _engine_changed(self, engine: Engine) -> None:
        if engine.state is EngineState.DOWN:
            self._signal(_Signal.ENGINE_DOWN)
        elif engine.state is EngineState.READY:
            self._signal(_Signal.ENGINE_UP)

    def _signal(self, signal: _Signal) -> None:
        try:
            self._queue.put_nowait(signal)
        except asyncio.QueueFull:
            task = asyncio.ensure_future(self._queue.put(signal))
            self._parked.add(task)
            task.add_done_callback(self._parked.discard)

    # -- consumer ----------------------------------------------------------------------------------------------------

    async def _consume(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                async with asyncio.timeout_at(self._replay_due):
                    item = await self._queue.get()
            except TimeoutError:
                self._replay_due = None
                await self._rebuild()
                continue
            self._turn_started = self._clock()
            if isinstance(item, list):
                await self._live(item)
            elif item is _Signal.CONNECTED:
                self._engine.events_live = True
                await self._rebuild()
            elif item is _Signal.ENGINE_UP:
                if self._clean and self._engine.events_live:
                    await self._rebuild()
            else:
                if item is _Signal.DISCONNECTED:
                    self._engine.events_live = False
                await self._forget()
            if self._replay_due is not None:
                self._replay_due = max(self._replay_due, loop.time())

    async def _live(self, frames: list[bytes]) -> None:
        try:
            frame = parse_live_frames(frames)
            batch = decode_batch(frame.payload)
        except Undecodable as error:
            self._undecodable(error)
            return
        if frame.sequence <= self._applied:
            if batch.timestamp_seconds > self._applied_at:
                logger.info("engine %s: its event stream began anew", self._engine.name)
                self._metrics.event_restarts.labels(self._engine.name).inc()
                await self._rebuild()
                if frame.sequence > self._applied:
                    await self._apply(frame, batch)
            return
        if frame.sequence > self._applied + 1 and not await self._heal(frame.sequence):
            return
        if frame.sequence > self._applied:
            await self._apply(frame, batch)

    async def _heal(self, sequence: int) -> bool:
        """Fetch what is missing before `sequence`. False: the gap stays, and the engine's entries were dropped."""
        self._metrics.event_gaps.labels(self._engine.name).inc()
        logger.info("engine %s: events %d to %d are missing", self._engine.name, self._applied + 1, sequence - 1)
        if await self._replay(self._applied + 1):
            return True
        await self._forget()
        self._applied = sequence - 1  # what follows is true by itself, only incomplete
        return True

    async def _rebuild(self) -> None:
        await self._forget()
        await self._replay(0)

    async def _forget(self) -> None:
        if not self._clean:
            freeing = asyncio.create_task(_in_turns(self._index.clear_engine(self._engine.name)))
            self._freeing.add(freeing)
            freeing.add_done_callback(self._freeing.discard)
        self._clean = True
        self._applied = -1
        self._applied_at = 0.0

    async def _replay(self, start: int) -> bool:
        """Apply everything from `start` on. False when the engine offers no replay or did not finish one."""
        if self._replay_url is None:
            return False
        outcome = "failed"
        try:
            resume: int | None = start
            while resume is not None:
                resume = await self._replay_from(self._replay_url, resume)
            outcome = "completed"
            self._replay_due = None
        except ReplayFailed as error:
            logger.warning("engine %s: replay failed: %s", self._engine.name, error)
            self._replay_due = asyncio.get_running_loop().time() + REPLAY_BACKOFF_SECONDS
        finally:
            self._metrics.event_replays.labels(self._engine.name, outcome).inc()
        return outcome == "completed"

    async def _replay_from(self, url: str, start: int) -> int | None:
        """One request. Returns where to go on, or None at the end.

        A ROUTER drops what does not fit its queue (1,000 messages unless the engine sets more), the end marker
        included; every request brings at least one batch, so asking again from the hole comes to an end.
        """
        socket = self._context.socket(zmq.DEALER)  # a fresh one: no rest of an earlier replay can arrive on it
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, SOCKET_QUEUE_MAX)
        socket.setsockopt(zmq.IPV6, "[" in url)
        try:
            socket.connect(url)
            await socket.send_multipart(replay_request(start))
            return await self._replay_batches(socket)
        finally:
            socket.close(linger=0)

    async def _replay_batches(self, socket: zmq.asyncio.Socket) -> int | None:
        received = 0
        before = self._applied
        while True:
            patience = REPLAY_PAUSE_SECONDS_MAX if received else REPLAY_MESSAGE_SECONDS_MAX
            try:
                async with asyncio.timeout(patience):
                    frames = await socket.recv_multipart()
            except TimeoutError as error:
                if self._applied > before:
                    return self._applied + 1
                raise ReplayFailed(f"no answer within {patience:g} s") from error
            received += 1
            try:
                frame = parse_replay_frames(frames)
                if isinstance(frame, ReplayEnd):
                    return None
                batch = decode_batch(frame.payload)
            except Undecodable as error:
                self._undecodable(error)
                continue
            if frame.sequence > self._applied + 1 and not self._clean:
                if received > 1:
                    return self._applied + 1
                await self._forget()  # the publisher no longer has what is missing: removals among it are lost
            if frame.sequence > self._applied:
                await self._apply(frame, batch)

    async def _apply(self, frame: BatchFrame, batch: EventBatch) -> None:
        name = self._engine.name
        self._clean = False
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                await _in_turns(self._index.clear_device(name))
                continue
            self._index.apply(name, event)
            if self._clock() - self._turn_started > TURN_SECONDS_MAX:
                await asyncio.sleep(0)
                self._turn_started = self._clock()
        self._applied = frame.sequence
        self._applied_at = batch.timestamp_seconds
        self._metrics.event_batches.labels(name).inc()
        self._metrics.event_last_batch.labels(name).set(batch.timestamp_seconds)
        if batch.undecodable:
            self._metrics.events_undecodable.labels(name).inc(batch.undecodable)

    def _undecodable(self, error: Undecodable) -> None:
        self._metrics.events_undecodable.labels(self._engine.name).inc()
        logger.warning("engine %s: event message ignored: %s", self._engine.name, error)


async def _in_turns(steps: Iterator[None]) -> None:
    """A step in each turn of the loop, so that requests are not kept waiting."""
    for _ in steps:
        await asyncio.sleep(0)
