"""One simulated engine: continuous batching over a block pool with tiers below it, driven by the owner of the clock.

The caller submits requests and calls advance(now) when `next_time` has come; nothing here looks at a clock. A step is
one forward pass: every decoding sequence gets a token, what is left of the token budget prefills prompts in order of
admission. Requests wait first come, first served, for a place in the batch and for blocks.

Simpler than an engine, on purpose: blocks for the whole answer are reserved at admission (so nothing is preempted), and
blocks of generated tokens are cached when their request ends.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections import deque
from dataclasses import dataclass, field

from spillway_simulator.errors import RequestTooLong
from spillway_simulator.model.blocks import block_keys
from spillway_simulator.model.counters import EngineCounters
from spillway_simulator.model.device_cache import DeviceCache
from spillway_simulator.model.events import BlocksRemoved, BlocksStored, DeviceCleared, KvEvent, Medium
from spillway_simulator.model.prefill_meter import PrefillMeter
from spillway_simulator.model.rates import EngineRates
from spillway_simulator.model.request import CachedTokens, EngineRequest, Progress, Sequence
from spillway_simulator.model.tiering import LoadPlan, Tiering
from spillway_simulator.model.tiers import SharedTier


@dataclass(frozen=True, slots=True)
class EngineShape:
    """Sizes of one engine. Capacities in blocks."""

    block_tokens: int = 128
    device_blocks: int = 4_800
    cpu_blocks: int = 4_800
    max_running: int = 256
    max_batched_tokens: int = 8_192
    max_model_tokens: int = 131_072
    announce_shared: bool = True  # events for the shared tier, as engines with Spillway's connector send them
    gates_loads: bool = True  # leave out loads that take longer than computing; other connectors make them
    whole_decodes: bool = True  # report runs of decode steps at once: for virtual time, in which no client reads tokens


@dataclass(slots=True)
class _Step:
    """One forward pass, or `count` equal ones in a row when only decoding happens.

    Pass i takes first_seconds + i * growth_seconds, as every sequence's context grows by a token.
    """

    started: float
    decoding: list[Sequence]
    prefilled: list[Sequence] = field(default_factory=list)  # prompts that are complete with this pass
    stores: list[int] = field(default_factory=list)  # keys computed by this pass
    prefill_tokens: int = 0
    count: int = 1
    first_seconds: float = 0.0
    growth_seconds: float = 0.0

    def seconds(self, count: int) -> float:
        return count * self.first_seconds + self.growth_seconds * (count * (count - 1) / 2)

    @property
    def ends_at(self) -> float:
        return self.started + self.seconds(self.count)

    def cut(self, at: float) -> None:
        """End with the pass that is under way at `at`."""
        elapsed = at - self.started
        if elapsed < 0 or elapsed >= self.seconds(self.count):
            return
        low, high = 1, self.count  # smallest count that reaches past `elapsed`
        while low < high:
            middle = (low + high) // 2
            if self.seconds(middle) > elapsed:
                high = middle
            else:
                low = middle + 1
        self.count = low


class SimulatedEngine:
    """All times are seconds of the caller's clock, which never goes back."""

    def __init__(self, name: str, shape: EngineShape, rates: EngineRates, shared: SharedTier | None = None) -> None:
        self.name = name
        self.shape = shape
        self.rates = rates
        self.slowdown = 1.0  # multiplies the time of every pass; a fault
        self.counters = EngineCounters()
        self.prefill_meter = PrefillMeter()
        self.next_time: float | None = None  # when advance() has something to do
        self._shared = shared
        self._events: list[KvEvent] = []
        self.device = self._new_device()
        self.tiers = self._new_tiers()
        self._arriving: deque[tuple[float, Sequence]] = deque()
        self._waiting: deque[Sequence] = deque()
        self._loading: list[tuple[float, int, Sequence, LoadPlan]] = []
        self._running: list[Sequence] = []
        self._sequences: dict[str, Sequence] = {}
        self._step: _Step | None = None
        self._loads_begun = 0

    def _new_device(self) -> DeviceCache:
        return DeviceCache(self.shape.device_blocks)

    def _new_tiers(self) -> Tiering:
        shape = self.shape
        return Tiering(
            block_tokens=shape.block_tokens,
            cpu_blocks=shape.cpu_blocks,
            shared=self._shared,
            rates=self.rates,
            counters=self.counters,
            emit=self._events.append,
            announce_shared=shape.announce_shared,
            gates_loads=shape.gates_loads,
        )

    # -- what the outside sees ---------------------------------------------------------------------------------------

    @property
    def running_requests(self) -> int:
        return len(self._running)

    @property
    def waiting_requests(self) -> int:
        return len(self._arriving) + len(self._waiting) + len(self._loading)

    @property
    def kv_usage(self) -> float:
        return self.device.used_blocks / self.shape.device_blocks

    def take_events(self) -> list[KvEvent]:
        """Events since the last call, in order."""
        events = self._events[:]
        self._events.clear()
        return events

    def check(self, prompt_tokens: int, answer_tokens: int) -> None:
        """Raises RequestTooLong for what an empty engine could not take."""
        total = prompt_tokens + answer_tokens
        room = min(self.shape.max_model_tokens, self.shape.device_blocks * self.shape.block_tokens)
        if total > room:
            raise RequestTooLong(
                f"prompt of {prompt_tokens} tokens and answer of {answer_tokens} given, at most {room} together fit; "
                "shorten the prompt or lower max_tokens"
            )

    def submit(self, request: EngineRequest, now: float) -> None:
        """Raises RequestTooLong. The id must not be in use."""
        self.check(len(request.prompt), len(request.answer))
        assert len(request.prompt) > 0 and len(request.answer) > 0
        assert request.id not in self._sequences
        keys = block_keys(request.prompt, self.shape.block_tokens, request.salt)
        sequence = Sequence(request, keys, now)
        self._sequences[request.id] = sequence
        due = now + self.rates.request_overhead_seconds
        self._arriving.append((due, sequence))
        if self._step is not None:
            self._step.cut(due)
        self._update_next_time()

    def cancel(self, request_id: str, now: float) -> bool:
        """Drop a request and free its blocks. False when it is not here (any more)."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return False
        step = self._step
        self._arriving = deque(pair for pair in self._arriving if pair[1] is not sequence)
        self._loading = [item for item in self._loading if item[2] is not sequence]
        heapq.heapify(self._loading)
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        if sequence in self._running:
            self._running.remove(sequence)
        if step is not None:
            step.cut(now)
            if sequence in step.decoding:
                self.counters.generated_tokens += step.count - 1  # passes that were complete; they are not reported
            step.decoding = [other for other in step.decoding if other is not sequence]
            step.prefilled = [other for other in step.prefilled if other is not sequence]
        self.device.release(sequence.held, sequence.private_blocks)
        self.counters.cancelled_requests += 1
        self._update_next_time()
        return True

    def restart(self) -> None:
        """The process dies and a new one takes its place: requests, device and CPU tier are gone, totals start again.
        The shared tier stays. Events of the old process that were not taken are lost with it."""
        self._events = []  # a new list: blocks left in the shared tier are not announced to the new process
        self.counters = EngineCounters()
        self.prefill_meter = PrefillMeter()
        self.device = self._new_device()
        self.tiers = self._new_tiers()
        self._arriving.clear()
        self._waiting.clear()
        self._loading.clear()
        self._running.clear()
        self._sequences.clear()
        self._step = None
        self.next_time = None

    def reset_prefix_cache(self) -> bool:
        """Clear the device's cache, not the lower tiers. False while requests run, as in the engine."""
        if self.device.used_blocks:
            return False
        self.device.forget_unreferenced()
        self._events.append(DeviceCleared())
        return True

    # -- time --------------------------------------------------------------------------------------------------------

    def advance(self, now: float) -> list[Progress]:
        """Do everything that is due up to `now`, in order. Returns what requests gained."""
        progress: list[Progress] = []
        while self.next_time is not None and self.next_time <= now:
            self._turn(self.next_time, progress)
        return progress

    def _turn(self, now: float, progress: list[Progress]) -> None:
        self.tiers.finish_stores(now)
        if self._step is not None and self._step.ends_at <= now:
            self._finish_step(self._step, now, progress)
        while self._arriving and self._arriving[0][0] <= now:
            self._waiting.append(self._arriving.popleft()[1])
        while self._loading and self._loading[0][0] <= now:
            _, _, sequence, plan = heapq.heappop(self._loading)
            self._loaded(sequence, plan, now)
        if self._step is None:
            self._begin_step(now)
        self._update_next_time()

    def _update_next_time(self) -> None:
        times = [self._step.ends_at] if self._step is not None else []
        if self._arriving:
            times.append(self._arriving[0][0])
        if self._loading:
            times.append(self._loading[0][0])
        stores = self.tiers.next_time
        if stores is not None:
            times.append(stores)
        self.next_time = min(times) if times else None

    # -- one pass ----------------------------------------------------------------------------------------------------

    def _begin_step(self, now: float) -> None:
        decoding = [sequence for sequence in self._running if sequence.generated]
        step = _Step(now, decoding)
        budget = self.shape.max_batched_tokens - len(decoding)
        prefill_seconds = 0.0
        for sequence in self._running:
            if not sequence.generated and budget > 0:
                tokens = min(budget, sequence.prompt_tokens - sequence.computed)
                prefill_seconds += self._prefill(sequence, tokens, step)
                budget -= tokens
        while self._waiting and budget > 0 and len(self._running) + len(self._loading) < self.shape.max_running:
            sequence = self._next_waiting(now)
            if not self._admit(sequence, now):
                break
            self._waiting.remove(sequence)
            if self._running and self._running[-1] is sequence:  # else it loads first
                tokens = min(budget, sequence.prompt_tokens - sequence.computed)
                prefill_seconds += self._prefill(sequence, tokens, step)
                budget -= tokens
        prefilling = budget < self.shape.max_batched_tokens - len(decoding)
        if not decoding and not prefilling:
            return
        context = sum(sequence.prompt_tokens + sequence.generated for sequence in decoding)
        step.first_seconds = self.slowdown * self.rates.step_duration(prefill_seconds, len(decoding), context)
        if self.shape.whole_decodes and not prefilling:
            step.count = min(sequence.remaining for sequence in decoding)
            step.growth_seconds = self.slowdown * len(decoding) * self.rates.decode_context_token_seconds
            if self._arriving:
                step.cut(self._arriving[0][0])
            if self._loading:
                step.cut(self._loading[0][0])
        self._step = step

    def _next_waiting(self, now: float) -> Sequence:
        """The one of the waiting requests that is admitted next, once there is room for it."""
        return self._waiting[0]

    def _admit(self, sequence: Sequence, now: float) -> bool:
        """Give a waiting request its blocks, and start it or its load. False while there is no room."""
        block_tokens = self.shape.block_tokens
        limit = (sequence.prompt_tokens - 1) // block_tokens  # the last token is always computed
        keys = sequence.keys
        found = self.device.longest_prefix(keys, limit)
        total = math.ceil((sequence.prompt_tokens + len(sequence.request.answer)) / block_tokens)
        pinned = self.device.unreferenced_among(keys[:found])
        if self.device.available_blocks - pinned < total - found:
            return False
        sequence.held = keys[:found]
        sequence.published = found
        sequence.private_blocks = total - found
        sequence.computed = found * block_tokens
        self.device.acquire(sequence.held)
        evicted = self.device.reserve(sequence.private_blocks)
        if evicted:
            self._events.append(BlocksRemoved(Medium.DEVICE, evicted))
        plan = self.tiers.plan_load(keys, found, limit, now)
        self.tiers.touch(keys[:limit])
        self._count_admission(sequence, found, plan)
        if plan is None:
            self._running.append(sequence)
        else:
            self.tiers.begin_load(plan, now)
            self._loads_begun += 1
            heapq.heappush(self._loading, (plan.ready_at, self._loads_begun, sequence, plan))
        return True

    def _count_admission(self, sequence: Sequence, found: int, plan: LoadPlan | None) -> None:
        block_tokens = self.shape.block_tokens
        cpu = plan.cpu_blocks * block_tokens if plan is not None else 0
        shared = plan.shared_blocks * block_tokens if plan is not None else 0
        sequence.cached = CachedTokens(found * block_tokens, cpu, shared)
        counters = self.counters
        counters.prompt_tokens += sequence.prompt_tokens
        counters.device_queried_tokens += sequence.prompt_tokens
        counters.device_hit_tokens += sequence.cached.device
        counters.external_queried_tokens += sequence.prompt_tokens - sequence.cached.device
        counters.cpu_hit_tokens += cpu
        counters.shared_hit_tokens += shared
        counters.computed_tokens += sequence.prompt_tokens - sequence.cached.total

    def _loaded(self, sequence: Sequence, plan: LoadPlan, now: float) -> None:
        self.tiers.end_load(plan, now)
        sequence.computed += plan.blocks * self.shape.block_tokens
        self._publish_prompt(sequence)
        self._running.append(sequence)

    def _prefill(self, sequence: Sequence, tokens: int, step: _Step) -> float:
        """Plan a chunk. Its blocks can be found from now on, as requests of the same pass may share them."""
        seconds = self.rates.prefill_seconds(tokens, sequence.computed)
        before = sequence.published
        sequence.computed += tokens
        step.prefill_tokens += tokens
        self._publish_prompt(sequence)
        step.stores.extend(sequence.keys[before : sequence.published])
        if sequence.computed == sequence.prompt_tokens:
            step.prefilled.append(sequence)
        return seconds

    def _finish_step(self, step: _Step, now: float, progress: list[Progress]) -> None:
        self._step = None
        self.counters.steps += step.count
        self.counters.step_seconds += now - step.started
        self.prefill_meter.add(step.prefill_tokens, now - step.started, now)
        self.tiers.store(step.stores, now)
        ended = False
        for sequence in step.prefilled:
            sequence.generated = 1
            ended |= self._report(sequence, 1, now, progress)
        for sequence in step.decoding:
            sequence.generated += step.count
            ended |= self._report(sequence, step.count, now, progress)
        if ended:
            self._running = [sequence for sequence in self._running if sequence.remaining]

    def _report(self, sequence: Sequence, tokens: int, now: float, progress: list[Progress]) -> bool:
        self.counters.generated_tokens += tokens
        finished = sequence.remaining == 0
        first = sequence.generated == tokens
        progress.append(Progress(sequence.request.id, now, tokens, first, finished, sequence.cached))
        if finished:
            self._finish(sequence)
        return finished

    def _finish(self, sequence: Sequence) -> None:
        keys = sequence.generated_keys(self.shape.block_tokens)
        if keys:
            every = sequence.request.prompt + sequence.request.answer
            self._publish(sequence, keys, len(sequence.keys), every)
        self.device.release(sequence.held, sequence.private_blocks)
        del self._sequences[sequence.request.id]
        self.counters.finished_requests += 1

    # -- caching -----------------------------------------------------------------------------------------------------

    def _publish_prompt(self, sequence: Sequence) -> None:
        full = sequence.computed // self.shape.block_tokens
        if full > sequence.published:
            keys = sequence.keys[sequence.published : full]
            self._publish(sequence, keys, sequence.published, sequence.request.prompt)
            sequence.published = full

    def _publish(self, sequence: Sequence, keys: list[int], position: int, tokens: array[int]) -> None:
        """Cache full blocks under their keys and announce those that were not cached yet. position: of the first."""
        size = self.shape.block_tokens
        runs: list[tuple[int, list[int]]] = []  # position of the first block, keys
        for at, key in enumerate(keys, position):
            if not self.device.publish(key):
                continue
            sequence.held.append(key)
            sequence.private_blocks -= 1
            if runs and runs[-1][0] + len(runs[-1][1]) == at:
                runs[-1][1].append(key)
            else:
                runs.append((at, [key]))
        for start, run in runs:
            parent = None
            if start:
                parent = keys[start - position - 1] if start > position else sequence.keys[start - 1]
            covered = tokens[start * size : (start + len(run)) * size]
            salt = sequence.request.salt if start == 0 else None
            self._events.append(BlocksStored(Medium.DEVICE, tuple(run), parent, covered, salt))
