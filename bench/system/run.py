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
from spillway_simulator.model.request import Progress
from spillway_simulator.model.tiers import LoadLink, SharedTier
from system.agent_request import AgentRequest
from system.agents import AgentLoad
from system.design import Design
from system.engine import SystemEngine
from system.memory import NodeRows
from system.rates import ENDLESS_BLOCKS, H200_QWEN3_8B, SHAPE, SHARED_BLOCKS, with_bucket
from system.report import Answered

EVENT_DELAY_SECONDS = 0.002
ENGINES = 4


@dataclass(frozen=True, slots=True)
class Kill:
    """The process of one engine dies. at, back_at: seconds of load; back_at: an empty one answers, None: none does."""

    engine: int
    at: float
    back_at: float | None = None


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
    engine: int = -1
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
        engines: int = ENGINES,
        shape: EngineShape = SHAPE,
        rates: EngineRates = H200_QWEN3_8B,
        shared_blocks: int = SHARED_BLOCKS,
        kill: Kill | None = None,
    ) -> None:
        below = None
        if design.bucket_ms is not None:
            below = SharedTier(ENDLESS_BLOCKS, LoadLink())
            rates = with_bucket(rates, design.bucket_ms / 1000, engines)
        shared = SharedTier(shared_blocks, LoadLink(), below) if design.shared else None
        self._node = NodeRows(engines * shape.cpu_blocks) if design.node else None
        self.engines = [
            SystemEngine(f"engine-{at}", shape, rates, design, shared, node=self._node) for at in range(engines)
        ]
        self.in_flight = [0] * engines
        self.answered: list[Answered] = []
        self._policy = policy
        self._load = load
        self._kill = kill
        self._time = FastForward(self.engines, self._progress, self._events)
        self._open: dict[str, _Open] = {}
        self._context_tokens: dict[int, int] = {}  # of each place's session
        policy.start(self, engines, load.seed)

    @property
    def now(self) -> float:
        return float(self._time.now)

    @property
    def working_set_blocks(self) -> int:
        """Number of blocks that the sessions which have not ended will ask for again."""
        common = self._load.common_tokens
        own = sum(tokens - common for tokens in self._context_tokens.values())
        return (common + own) // self.engines[0].shape.block_tokens

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
            None if read.rates.below is None else read.rates.below.load_tokens_per_second,
            read.tiers.declined_tiers,
        )

    def run(self) -> list[Answered]:
        for place in range(self._load.places):
            self._time.at(self._load.start_of(place), partial(self._begin, place, 0))
        if self._kill is not None:
            self._time.at(self._kill.at, self._die)
            if self._kill.back_at is not None:
                self._time.at(self._kill.back_at, partial(self._policy.engine_up, self._kill.engine))
        self._time.run(until=self._load.seconds)
        for engine in self.engines:
            engine.close()
        if self._node is not None:
            self._node.close()
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
        name = f"{place}/{number}/{turn}"
        self._open[name] = request = _Open(place, number, turn, turns, pause, prompt, self.now, 0)
        self._send(name, request)

    def _send(self, name: str, request: _Open) -> None:
        prompt = request.prompt
        routed = RoutedRequest(name, prompt, f"{request.place}/{request.number}")

        def again() -> None:
            self._time.at(self.now, send)

        def send() -> None:
            if request.engine < 0:
                self._send(name, request)

        request.engine = -1
        until = self._policy.held_back(routed, again)
        if until is not None:
            self._time.at(until, send)
            return
        request.engine = engine = self._policy.choose(routed)
        asked = self.engines[engine]
        if isinstance(self._policy, Spillway):
            request.promised = self._policy.promised_tokens(name)
        else:
            keys = block_keys(prompt, asked.shape.block_tokens)
            request.promised = asked.held_tokens(keys, (len(prompt) - 1) // asked.shape.block_tokens)
        self.in_flight[engine] += 1
        place, load = request.place, self._load
        answer = load.generated(place, request.number, request.turn).ids()
        asked_for = AgentRequest(name, prompt, answer, None, routed.session, load.program(place), load.retains(place))
        self._time.submit(engine, asked_for)

    def _die(self) -> None:
        """End the engine, and send the requests that it had not answered to others."""
        assert self._kill is not None
        killed = self._kill.engine
        self.engines[killed].restart()
        self._policy.engine_down(killed)
        for name, request in list(self._open.items()):
            if request.engine == killed:
                self.in_flight[killed] -= 1
                self._policy.finished(name)
                self._send(name, request)

    def _progress(self, engine: int, progress: Progress) -> None:
        request = self._open[progress.request_id]
        if progress.first and not request.first_token:
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
                self._load.retains(request.place),
            )
        )
        self._context_tokens[request.place] = len(request.prompt)
        context = request.prompt + self._load.answer(request.place, request.number, request.turn).ids()
        at = self.now + request.pause
        self._time.at(at, lambda: self._ask(request.place, request.number, request.turn + 1, request.turns, context))

    def _events(self, engine: int, events: list[KvEvent]) -> None:
        self._time.at(self.now + EVENT_DELAY_SECONDS, lambda: self._policy.events(engine, events))
