"""One system under one load, in virtual time."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from routing_policies.policy import Policy, RoutedRequest, Scrape
from routing_policies.spillway import Spillway
from traces.session import Segment

from spillway_simulator.fast_forward import FastForward
from spillway_simulator.model.blocks import block_keys
from spillway_simulator.model.engine import EngineShape
from spillway_simulator.model.events import KvEvent
from spillway_simulator.model.rates import EngineRates
from spillway_simulator.model.request import EngineRequest, Progress
from spillway_simulator.model.tiers import LoadLink, SharedTier
from system.agents import AgentLoad
from system.design import Design
from system.engine import SystemEngine
from system.rates import H200_QWEN3_8B, SHAPE, SHARED_BLOCKS
from system.report import Answered

EVENT_DELAY_SECONDS = 0.002


@dataclass(slots=True)
class _Open:
    place: int
    number: int
    turn: int
    turns: Iterator[tuple[Segment, float]]
    pause: float
    prompt: array[int]
    sent: float
    promised: int
    engine: int
    first_token: float = 0.0
    cached: int = 0


class SystemRun:
    """Implements policy.Fleet."""

    def __init__(
        self,
        policy: Policy,
        design: Design,
        load: AgentLoad,
        *,
        engines: int = 4,
        shape: EngineShape = SHAPE,
        rates: EngineRates = H200_QWEN3_8B,
    ) -> None:
        shared = SharedTier(SHARED_BLOCKS, LoadLink()) if design.shared else None
        self.engines = [SystemEngine(f"engine-{at}", shape, rates, design, shared) for at in range(engines)]
        self.in_flight = [0] * engines
        self.answered: list[Answered] = []
        self._policy = policy
        self._load = load
        self._time = FastForward(self.engines, self._progress, self._events)
        self._open: dict[str, _Open] = {}
        policy.start(self, engines, load.seed)

    @property
    def now(self) -> float:
        return float(self._time.now)

    def scrape(self, engine: int) -> Scrape:
        return self.scrape_now(engine)

    def scrape_now(self, engine: int) -> Scrape:
        read = self.engines[engine]
        return Scrape(
            read.waiting_requests,
            read.running_requests,
            read.kv_usage,
            read.shape.device_blocks * read.shape.block_tokens,
            read.prefill_meter.per_second,
            read.rates.shared.load_tokens_per_second,
        )

    def run(self) -> list[Answered]:
        for place in range(self._load.places):
            self._time.at(self._load.start_of(place), partial(self._begin, place, 0))
        self._time.run(until=self._load.seconds)
        for engine in self.engines:
            engine.close()
        return self.answered

    def _begin(self, place: int, number: int) -> None:
        self._ask(place, number, 0, self._load.session(place, number), self._load.common(place).ids())

    def _ask(
        self, place: int, number: int, turn: int, turns: Iterator[tuple[Segment, float]], context: array[int]
    ) -> None:
        said = next(turns, None)
        if said is None:
            self._begin(place, number + 1)
            return
        message, pause = said
        prompt = context + message.ids()
        request = RoutedRequest(f"{place}/{number}/{turn}", prompt, f"{place}/{number}")
        engine = self._policy.choose(request)
        asked = self.engines[engine]
        if isinstance(self._policy, Spillway):
            promised = self._policy.promised_tokens(request.id)
        else:
            keys = block_keys(prompt, asked.shape.block_tokens)
            promised = asked.held_tokens(keys, (len(prompt) - 1) // asked.shape.block_tokens)
        self._open[request.id] = _Open(place, number, turn, turns, pause, prompt, self.now, promised, engine)
        self.in_flight[engine] += 1
        answer = Segment(f"generated-{request.id}", self._load.answer_tokens).ids()
        self._time.submit(engine, EngineRequest(request.id, prompt, answer))

    def _progress(self, engine: int, progress: Progress) -> None:
        request = self._open[progress.request_id]
        if progress.first:
            request.first_token = self.now
            request.cached = progress.cached.total
            self._policy.first_token(progress.request_id)
        if not progress.finished:
            return
        del self._open[progress.request_id]
        self.in_flight[engine] -= 1
        self._policy.finished(progress.request_id)
        self.answered.append(
            Answered(
                request.sent,
                request.first_token - request.sent,
                self.now,
                len(request.prompt),
                request.cached,
                request.promised,
                self._load.answer_tokens,
                self._load.is_crowd(request.place),
            )
        )
        context = request.prompt + self._load.answer(request.place, request.number, request.turn).ids()
        at = self.now + request.pause
        self._time.at(at, lambda: self._ask(request.place, request.number, request.turn + 1, request.turns, context))

    def _events(self, engine: int, events: list[KvEvent]) -> None:
        self._time.at(self.now + EVENT_DELAY_SECONDS, lambda: self._policy.events(engine, events))
