"""Follows one engine's KV events: subscribes, replays from the start, fills gaps, detects restarts.

A PUB socket drops messages sent before the subscription is established and messages that a slow reader misses, so only
sequence numbers show what is missing. On every new connection the index's entries of this engine are dropped and
rebuilt from a replay. A gap is replayed from its first missing number. A number that was applied before, with a later
timestamp, comes from a new process at the same address. If a gap cannot be filled, the index of this engine is
emptied: it may be incomplete, never wrong.

A replay is requested beside the live events, which are applied meanwhile: each is valid by itself. Entries are dropped
only when the replay's first message arrives, so a replay socket that does not answer costs no entries.
"""

from __future__ import annotations

import asyncio
import contextlib
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
    parse_live_frames,
    parse_replay_frames,
)
from spillway_gateway.fleet.kv_replay import MESSAGE_BYTES_MAX, SOCKET_QUEUE_MAX, Replay, ReplayFailed
from spillway_gateway.fleet.large_batches import decode_in_steps
from spillway_gateway.fleet.prefix_index import PrefixIndex
from spillway_gateway.metrics import GatewayMetrics

logger = logging.getLogger(__name__)

LIVE_QUEUE_MAX = 1_000  # messages between socket and index; further ones stay in ZMQ's bounded buffer
ITERATION_SECONDS_MAX = 0.002  # of event work per event loop iteration; bounds the delay of requests
RECONNECT_SECONDS = 1.0  # after a connection that ended, if ZMQ has not connected again by then
REPLAY_BACKOFF_SECONDS = 2.0  # after the first failed replay; doubled by each further one
REPLAY_BACKOFF_SECONDS_MAX = 60.0


class _Signal(Enum):
    CONNECTED = auto()
    DISCONNECTED = auto()
    ENGINE_DOWN = auto()
    ENGINE_UP = auto()


@dataclass(frozen=True, slots=True)
class _ReplayBegun:
    """A whole replay, requested beside the live events, has its first message."""

    requested_by: asyncio.Task[None] | None
    replay: Replay


@dataclass(frozen=True, slots=True)
class _ReplayUnanswered:
    requested_by: asyncio.Task[None] | None
    error: ReplayFailed


class EventFollower:
    """One task per engine, on the event loop. Ends by cancellation or failure, leaves no socket open, and may be run
    again."""

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
        self._applied_at = 0.0  # its timestamp, by the engine's clock
        self._seen_until = 0.0  # newest timestamp whose batches were applied before the entries were last dropped
        self._clean = True  # the index has no entry of this engine
        self._replayed = False  # a whole replay was applied since the entries were last dropped
        self._replay_due: float | None = None  # loop time of the next attempt after a failed replay
        self._replays_failed = 0  # in a row
        self._request_task: asyncio.Task[None] | None = None  # of a whole replay
        self._undecodable_logged = False
        self._iteration_started = 0.0
        self._blocked_puts: set[asyncio.Task[None]] = set()
        self._freeing: set[asyncio.Task[None]] = set()  # dropped entries being freed

    async def run(self) -> None:
        """Subscribe and apply events until cancelled."""
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
        try:
            subscriber.connect(self._events_url)
            async with asyncio.TaskGroup() as tasks:  # the failure of one is that of all
                tasks.create_task(self._read_monitor(monitor, subscriber))
                tasks.create_task(self._read_live(subscriber))
                tasks.create_task(self._consume())
        finally:
            self._engine.on_state.remove(self._engine_changed)
            self._engine.events_live = False
            self._replay_due = None
            requests, self._request_task = [self._request_task] if self._request_task is not None else [], None
            for task in [*self._blocked_puts, *requests]:
                task.cancel()
            await asyncio.gather(*requests, return_exceptions=True)
            while not self._queue.empty():
                if isinstance(left := self._queue.get_nowait(), _ReplayBegun):
                    left.replay.close()
            subscriber.disable_monitor()
            monitor.close(linger=0)
            subscriber.close(linger=0)

    # -- producers ---------------------------------------------------------------------------------------------------

    async def _read_live(self, subscriber: zmq.asyncio.Socket) -> None:
        yielded_at = self._clock()
        while True:
            # Neither call returns to the event loop while messages and room for them are there.
            await self._queue.put(await subscriber.recv_multipart())
            if self._clock() - yielded_at > ITERATION_SECONDS_MAX:
                await asyncio.sleep(0)
                yielded_at = self._clock()

    async def _read_monitor(self, monitor: Any, subscriber: zmq.asyncio.Socket) -> None:
        reconnect: asyncio.TimerHandle | None = None
        try:
            while True:
                event = (await recv_monitor_message(monitor))["event"]
                if reconnect is not None:
                    reconnect.cancel()
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    await self._queue.put(_Signal.CONNECTED)
                else:
                    loop = asyncio.get_running_loop()
                    reconnect = loop.call_later(RECONNECT_SECONDS, self._reconnect, subscriber)
                    await self._queue.put(_Signal.DISCONNECTED)
        finally:
            if reconnect is not None:
                reconnect.cancel()

    def _reconnect(self, subscriber: zmq.asyncio.Socket) -> None:
        """ZMQ connects again by itself, but not behind a message that was longer than MESSAGE_BYTES_MAX."""
        with contextlib.suppress(zmq.ZMQError):  # it may know the address no more
            subscriber.disconnect(self._events_url)
        subscriber.connect(self._events_url)

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
            self._blocked_puts.add(task)
            task.add_done_callback(self._blocked_puts.discard)

    # -- consumer ----------------------------------------------------------------------------------------------------

    async def _consume(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            waits = self._queue.empty()  # else get() returns in the same event loop iteration
            try:
                async with asyncio.timeout_at(self._replay_due):
                    item = await self._queue.get()
            except TimeoutError:
                self._request_replay()
                continue
            if waits:
                self._iteration_started = self._clock()
            else:
                await self._yield_when_due()
            if isinstance(item, list):
                await self._live(item)
            elif isinstance(item, _ReplayBegun | _ReplayUnanswered):
                await self._replay_answered(item)
            elif item is _Signal.CONNECTED:
                logger.debug("engine %s: its events are connected; all it holds is replayed", self._engine.name)
                self._engine.events_live = True
                self._replays_failed = 0
                await self._rebuild()
            elif item is _Signal.ENGINE_UP:
                # A connection that was made first needs no second replay, which would only replace live events.
                if self._clean and self._engine.events_live and not (self._replayed or self._replay_pending):
                    await self._rebuild()
            else:
                logger.debug("engine %s: its entries are dropped: %s", self._engine.name, item.name)
                if item is _Signal.DISCONNECTED:
                    self._engine.events_live = False
                self._cancel_request()
                await self._clear()
            if self._replay_due is not None:
                self._replay_due = max(self._replay_due, loop.time())

    async def _live(self, frames: list[bytes]) -> None:
        try:
            frame = parse_live_frames(frames)
        except Undecodable as error:
            self._undecodable(error)
            return
        batch = await self._decode(frame)
        if frame.sequence <= self._applied:
            if batch is not None and batch.timestamp_seconds > self._applied_at:
                logger.info("engine %s: its event stream restarted", self._engine.name)
                self._metrics.event_restarts.labels(self._engine.name).inc()
                await self._rebuild()
                await self._apply(frame, batch)
            else:
                logger.debug("engine %s: batch %d was applied before", self._engine.name, frame.sequence)
            return
        if frame.sequence > self._applied + 1:
            await self._fill_gap(frame.sequence)
        if frame.sequence > self._applied:
            await self._apply(frame, batch)

    async def _fill_gap(self, sequence: int) -> None:
        """Replay what is missing before `sequence`; if that fails, drop the engine's entries and go on from there."""
        if self._replay_pending:  # a whole replay, which includes what is missing
            logger.debug("engine %s: batches up to %d come with the replay", self._engine.name, sequence - 1)
            await self._clear()
            self._applied = sequence - 1
            return
        self._metrics.event_gaps.labels(self._engine.name).inc()
        logger.info("engine %s: events %d to %d are missing", self._engine.name, self._applied + 1, sequence - 1)
        # Live events do not wait again for a replay socket that did not answer the last time.
        if self._replays_failed or not await self._replay(self._applied + 1):
            await self._clear()
            self._applied = sequence - 1  # later events are valid by themselves
            if not self._replay_pending:
                self._request_replay()

    @property
    def _replay_pending(self) -> bool:
        return self._request_task is not None or self._replay_due is not None

    async def _rebuild(self) -> None:
        await self._clear()
        self._request_replay()

    def _request_replay(self) -> None:
        """A whole replay, beside the live events."""
        self._cancel_request()
        if self._replay_url is not None:
            self._request_task = asyncio.create_task(self._request(self._replay_url))

    def _cancel_request(self) -> None:
        self._replay_due = None
        if self._request_task is not None:
            self._request_task.cancel()
            self._request_task = None

    async def _request(self, url: str) -> None:
        try:
            replay = await Replay.begin(self._context, url, 0)
        except ReplayFailed as error:
            await self._queue.put(_ReplayUnanswered(asyncio.current_task(), error))
            return
        try:
            await self._queue.put(_ReplayBegun(asyncio.current_task(), replay))
        except BaseException:
            replay.close()
            raise

    async def _replay_answered(self, answer: _ReplayBegun | _ReplayUnanswered) -> None:
        """Replace what the live events brought meanwhile by the whole replay."""
        wanted = answer.requested_by is self._request_task
        if wanted:
            self._request_task = None
        if isinstance(answer, _ReplayUnanswered):
            if wanted:
                self._replay_failed(answer.error)
        elif wanted:
            seen = self._applied
            await self._clear()
            self._replayed = await self._replay(0, answer.replay)
            if self._replayed and self._applied < seen:
                await self._replay(self._applied + 1)  # live events newer than the replay
        else:
            logger.debug("engine %s: a replay that is no longer wanted is dropped", self._engine.name)
            answer.replay.close()

    async def _clear(self) -> None:
        if not self._clean:
            freeing = asyncio.create_task(in_turns(self._index, self._index.clear_engine(self._engine.name)))
            self._freeing.add(freeing)
            freeing.add_done_callback(self._freeing.discard)
        self._clean = True
        self._replayed = False
        self._applied = -1
        self._seen_until = max(self._seen_until, self._applied_at)
        self._applied_at = 0.0

    async def _replay(self, start: int, begun: Replay | None = None) -> bool:
        """Apply everything from `start` on. False if the engine has no replay socket or the replay failed."""
        if self._replay_url is None:
            return False
        outcome = "failed"
        try:
            resume = await self._replay_from(self._replay_url, start, begun)
            while resume is not None:
                if resume <= start:
                    raise ReplayFailed(f"no new event from {start} on")
                start = resume
                resume = await self._replay_from(self._replay_url, start)
            outcome = "completed"
            logger.debug("engine %s: replayed up to batch %d", self._engine.name, self._applied)
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
        log = logger.warning if not self._replays_failed else logger.debug
        log("engine %s: replay failed: %s; its live events are applied meanwhile", self._engine.name, error)
        self._metrics.event_replays.labels(self._engine.name, "failed").inc()
        self._replays_failed = min(self._replays_failed + 1, 10)
        self._replay_due = asyncio.get_running_loop().time() + pause

    async def _replay_from(self, url: str, start: int, begun: Replay | None = None) -> int | None:
        """One request. Returns the sequence number to go on from, or None at the end. Raises ReplayFailed."""
        replay = begun if begun is not None else await Replay.begin(self._context, url, start)
        try:
            return await self._apply_replay(replay)
        finally:
            replay.close()

    async def _apply_replay(self, replay: Replay) -> int | None:
        frames = replay.first
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
                    await self._clear()  # the publisher has dropped it, and any removals in it are lost
                if frame.sequence > self._applied:
                    await self._apply(frame, await self._decode(frame))
                unreadable = 0
            try:
                frames = await replay.next()
            except TimeoutError as error:
                if self._applied > before:
                    return self._applied + 1
                raise ReplayFailed(f"stopped after {received} messages, none of them new") from error

    async def _decode(self, frame: BatchFrame) -> EventBatch | None:
        """Decode a batch, or return None for a payload that is no batch. It is counted and skipped like an unknown
        event; a stale entry that it leaves behind costs one misplaced request."""
        try:
            steps = decode_in_steps(frame.payload)
            while True:
                try:
                    next(steps)
                except StopIteration as decoded:
                    batch: EventBatch = decoded.value
                    return batch
                await self._yield_when_due()
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
                await in_turns(self._index, self._index.clear_device(name))
            else:
                for _ in self._index.apply_in_steps(name, event, seen=batch.timestamp_seconds <= self._seen_until):
                    await self._yield_when_due()
            await self._yield_when_due()
        self._applied = frame.sequence
        self._applied_at = batch.timestamp_seconds
        logger.debug("engine %s: batch %d applied: %d events", name, frame.sequence, len(batch.events))
        self._metrics.event_batches.labels(name).inc()
        self._metrics.event_last_batch.labels(name).set(batch.timestamp_seconds)
        if batch.undecodable:
            self._metrics.events_undecodable.labels(name).inc(batch.undecodable)

    async def _yield_when_due(self) -> None:
        """Let requests be served once events have taken ITERATION_SECONDS_MAX of this event loop iteration."""
        if self._clock() - self._iteration_started > ITERATION_SECONDS_MAX:
            await asyncio.sleep(0)
            self._iteration_started = self._clock()

    def _undecodable(self, error: Undecodable) -> None:
        self._metrics.events_undecodable.labels(self._engine.name).inc()
        log = logger.debug if self._undecodable_logged else logger.warning
        log("engine %s: event message skipped (further ones are logged at debug level): %s", self._engine.name, error)
        self._undecodable_logged = True


async def in_turns(index: PrefixIndex, steps: Iterator[None]) -> None:
    """Take steps over all blocks of the index, one per event loop iteration at most, so that requests are served in
    between."""
    await index.sweeps.wait()
    for _ in steps:
        await asyncio.sleep(0)
        await index.sweeps.wait()
