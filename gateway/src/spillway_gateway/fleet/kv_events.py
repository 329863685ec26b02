"""Follows one engine's KV events: subscribe, replay from the start, heal gaps, notice restarts.

PUB drops what was sent before the subscription stood and whatever a slow reader missed, so the sequence number is the
only truth: on every new connection the index's entries of this engine are dropped and rebuilt from a replay; a gap is
replayed from where it began; a number that was seen before with a later timestamp is another process at the same
address. Whatever cannot be healed ends with an empty index for this engine, never with a wrong one.

A replay is asked for beside the live events, which count meanwhile: they are true by themselves, only incomplete. Only
its first message makes room for it in the index, so a replay port that does not answer costs nothing that is known.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from spillway_gateway.fleet.engine import Engine, EngineState
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
REPLAY_BACKOFF_SECONDS = 2.0  # after the first failed replay; doubled by each further one
REPLAY_BACKOFF_SECONDS_MAX = 60.0
MESSAGE_BYTES_MAX = 16 * 1024 * 1024  # larger than any batch of an engine step; ZMQ drops the connection instead


class _Signal(Enum):
    CONNECTED = auto()
    DISCONNECTED = auto()
    ENGINE_DOWN = auto()
    ENGINE_UP = auto()


class ReplayFailed(Exception):
    """The replay did not come to its end marker in time."""


@dataclass(frozen=True, slots=True)
class _ReplayBegun:
    """A whole replay that was asked for beside the live events has its first message."""

    asked_by: asyncio.Task[None] | None
    socket: zmq.asyncio.Socket
    first: list[bytes]


@dataclass(frozen=True, slots=True)
class _ReplayUnanswered:
    asked_by: asyncio.Task[None] | None
    error: ReplayFailed


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
        self._queue: asyncio.Queue[_Signal | list[bytes] | _ReplayBegun | _ReplayUnanswered]
        self._queue = asyncio.Queue(LIVE_QUEUE_MAX)
        self._applied = -1  # sequence of the last batch in the index
        self._applied_at = 0.0  # the engine's clock on it
        self._clean = True  # nothing of this engine is in the index
        self._replay_due: float | None = None  # loop time of the next try after a failed replay
        self._replays_failed = 0  # in a row
        self._asking: asyncio.Task[None] | None = None  # for a whole replay
        self._undecodable_logged = False
        self._turn_started = 0.0
        self._parked: set[asyncio.Task[None]] = set()
        self._freeing: set[asyncio.Task[None]] = set()  # what was forgotten, on its way out of the index

    async def run(self) -> None:
        self._engine.on_state.append(self._engine_changed)
        subscriber = self._context.socket(zmq.SUB)
        subscriber.setsockopt(zmq.RCVHWM, SOCKET_QUEUE_MAX)
        subscriber.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
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
            asking = [self._asking] if self._asking is not None else []
            for task in [*readers, *self._parked, *asking]:
                task.cancel()
            await asyncio.gather(*readers, *asking, return_exceptions=True)
            while not self._queue.empty():
                if isinstance(left := self._queue.get_nowait(), _ReplayBegun):
                    left.socket.close(linger=0)
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
                self._ask_for_replay()
                continue
            self._turn_started = self._clock()
            if isinstance(item, list):
                await self._live(item)
            elif isinstance(item, _ReplayBegun | _ReplayUnanswered):
                await self._replay_answered(item)
            elif item is _Signal.CONNECTED:
                self._engine.events_live = True
                self._replays_failed = 0
                await self._rebuild()
            elif item is _Signal.ENGINE_UP:
                if self._clean and self._engine.events_live:
                    await self._rebuild()
            else:
                if item is _Signal.DISCONNECTED:
                    self._engine.events_live = False
                self._stop_asking()
                await self._forget()
            if self._replay_due is not None:
                self._replay_due = max(self._replay_due, loop.time())

    async def _live(self, frames: list[bytes]) -> None:
        try:
            frame = parse_live_frames(frames)
        except Undecodable as error:
            self._undecodable(error)
            return
        batch = self._decode(frame)
        if frame.sequence <= self._applied:
            if batch is not None and batch.timestamp_seconds > self._applied_at:
                logger.info("engine %s: its event stream began anew", self._engine.name)
                self._metrics.event_restarts.labels(self._engine.name).inc()
                await self._rebuild()
                await self._apply(frame, batch)
            return
        if frame.sequence > self._applied + 1:
            await self._heal(frame.sequence)
        if frame.sequence > self._applied:
            await self._apply(frame, batch)

    async def _heal(self, sequence: int) -> None:
        """Fetch what is missing before `sequence`, or drop the engine's entries and go on from there."""
        if self._replay_pending:  # which brings what is missing
            await self._forget()
            self._applied = sequence - 1
            return
        self._metrics.event_gaps.labels(self._engine.name).inc()
        logger.info("engine %s: events %d to %d are missing", self._engine.name, self._applied + 1, sequence - 1)
        # A port that did not answer the last time does not get the live events to wait for it again.
        if self._replays_failed or not await self._replay(self._applied + 1):
            await self._forget()
            self._applied = sequence - 1  # what follows is true by itself, only incomplete
            if not self._replay_pending:
                self._ask_for_replay()

    @property
    def _replay_pending(self) -> bool:
        return self._asking is not None or self._replay_due is not None

    async def _rebuild(self) -> None:
        await self._forget()
        self._ask_for_replay()

    def _ask_for_replay(self) -> None:
        """Of everything, from the start, beside the live events."""
        self._stop_asking()
        if self._replay_url is not None:
            self._asking = asyncio.create_task(self._ask(self._replay_url))

    def _stop_asking(self) -> None:
        self._replay_due = None
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None

    async def _ask(self, url: str) -> None:
        socket = self._replay_socket(url)
        try:
            first = await self._first_of_replay(socket, url, 0)
            await self._queue.put(_ReplayBegun(asyncio.current_task(), socket, first))
        except ReplayFailed as error:
            socket.close(linger=0)
            await self._queue.put(_ReplayUnanswered(asyncio.current_task(), error))
        except BaseException:
            socket.close(linger=0)
            raise

    async def _replay_answered(self, answer: _ReplayBegun | _ReplayUnanswered) -> None:
        """Everything again, in place of what the live events brought meanwhile."""
        wanted = answer.asked_by is self._asking
        if wanted:
            self._asking = None
        if isinstance(answer, _ReplayUnanswered):
            if wanted:
                self._replay_failed(answer.error)
        elif wanted:
            seen = self._applied
            await self._forget()
            if await self._replay(0, answer) and self._applied < seen:
                await self._replay(self._applied + 1)  # live events that the publisher did not have when it was asked
        else:
            answer.socket.close(linger=0)

    async def _forget(self) -> None:
        if not self._clean:
            freeing = asyncio.create_task(_in_turns(self._index.clear_engine(self._engine.name)))
            self._freeing.add(freeing)
            freeing.add_done_callback(self._freeing.discard)
        self._clean = True
        self._applied = -1
        self._applied_at = 0.0

    async def _replay(self, start: int, begun: _ReplayBegun | None = None) -> bool:
        """Apply everything from `start` on. False when the engine offers no replay or did not finish one."""
        if self._replay_url is None:
            return False
        outcome = "failed"
        try:
            resume = await self._replay_from(self._replay_url, start, begun)
            while resume is not None:
                if resume <= start:
                    raise ReplayFailed(f"it brought nothing new from event {start} on")
                start = resume
                resume = await self._replay_from(self._replay_url, start)
            outcome = "completed"
            self._replay_due = None
            self._replays_failed = 0
        except ReplayFailed as error:
            self._replay_failed(error)
        finally:
            if outcome == "completed":
                self._metrics.event_replays.labels(self._engine.name, outcome).inc()
        return outcome == "completed"

    def _replay_failed(self, error: ReplayFailed) -> None:
        pause = min(REPLAY_BACKOFF_SECONDS * 2**self._replays_failed, REPLAY_BACKOFF_SECONDS_MAX)
        say = logger.warning if not self._replays_failed else logger.debug
        say("engine %s: replay failed: %s; its live events count meanwhile", self._engine.name, error)
        self._metrics.event_replays.labels(self._engine.name, "failed").inc()
        self._replays_failed = min(self._replays_failed + 1, 10)
        self._replay_due = asyncio.get_running_loop().time() + pause

    def _replay_socket(self, url: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(zmq.DEALER)  # a fresh one: no rest of an earlier replay can arrive on it
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, SOCKET_QUEUE_MAX)
        socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
        socket.setsockopt(zmq.IPV6, "[" in url)
        return socket

    async def _first_of_replay(self, socket: zmq.asyncio.Socket, url: str, start: int) -> list[bytes]:
        """Raises ReplayFailed."""
        socket.connect(url)
        try:
            async with asyncio.timeout(REPLAY_MESSAGE_SECONDS_MAX):
                await socket.send_multipart(replay_request(start))
                first: list[bytes] = await socket.recv_multipart()
        except TimeoutError as error:
            raise ReplayFailed(f"no answer within {REPLAY_MESSAGE_SECONDS_MAX:g} s") from error
        return first

    async def _replay_from(self, url: str, start: int, begun: _ReplayBegun | None = None) -> int | None:
        """One request. Returns where to go on, or None at the end.

        A ROUTER drops what does not fit its queue (1,000 messages unless the engine sets more), the end marker
        included; every request brings at least one batch, so asking again from the hole comes to an end.
        """
        socket = begun.socket if begun is not None else self._replay_socket(url)
        try:
            first = begun.first if begun is not None else await self._first_of_replay(socket, url, start)
            return await self._replay_batches(socket, first)
        finally:
            socket.close(linger=0)

    async def _replay_batches(self, socket: zmq.asyncio.Socket, frames: list[bytes]) -> int | None:
        received = 0
        unreadable = 0  # messages since the last batch whose number could not be read
        before = self._applied
        while True:
            received += 1
            try:
                frame = parse_replay_frames(frames)
            except Undecodable as error:
                self._undecodable(error)
                unreadable += 1
            else:
                if isinstance(frame, ReplayEnd):
                    return None
                missing = frame.sequence - self._applied - 1
                if missing > unreadable and not self._clean:
                    if received > 1 and self._applied >= before:
                        return self._applied + 1
                    await self._forget()  # the publisher no longer has what is missing: removals among it are lost
                if frame.sequence > self._applied:
                    await self._apply(frame, self._decode(frame))
                unreadable = 0
            try:
                async with asyncio.timeout(REPLAY_PAUSE_SECONDS_MAX):
                    frames = await socket.recv_multipart()
            except TimeoutError as error:
                if self._applied > before:
                    return self._applied + 1
                raise ReplayFailed(f"it stopped after {received} messages, none of them new") from error

    def _decode(self, frame: BatchFrame) -> EventBatch | None:
        """None, counted, for a payload that is no batch: like a single unknown event it is skipped, and what it said
        is found out by the engine's own misses."""
        try:
            return decode_batch(frame.payload)
        except Undecodable as error:
            self._undecodable(error)
            return None

    async def _apply(self, frame: BatchFrame, batch: EventBatch | None) -> None:
        name = self._engine.name
        if batch is None:
            self._applied = frame.sequence
            return
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
        say = logger.debug if self._undecodable_logged else logger.warning
        say("engine %s: event message skipped, as will be others like it: %s", self._engine.name, error)
        self._undecodable_logged = True


async def _in_turns(steps: Iterator[None]) -> None:
    """A step in each turn of the loop, so that requests are not kept waiting."""
    for _ in steps:
        await asyncio.sleep(0)
