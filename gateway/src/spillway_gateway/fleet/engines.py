"""The live state of engines, and the one step in which a decision is taken and counted.

`ModelFleet.choose` builds the frozen view, plans, and opens a Lease without an await between, so two requests never
decide on the same counters. A Lease keeps the counters of the engine it was opened on: when an engine is replaced or
restarted, old leases close against the old object and the new one never goes below zero.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol
from urllib.parse import urlsplit

from spillway_gateway.config import EngineConfig, ModelConfig, RoutingConfig
from spillway_gateway.errors import NoEngineReady
from spillway_gateway.fleet.prefix_index import PrefixIndex
from spillway_gateway.routing.fleet_view import NOTHING_HELD, EngineRates, EngineView, FleetView, RouteRequest
from spillway_gateway.routing.load import blend_rate
from spillway_gateway.routing.route import Decision, plan_route

RATE_SAMPLE_TOKENS_MIN = 256  # shorter prefills measure fixed costs, not a rate


class EngineState(StrEnum):
    UNKNOWN = "unknown"  # never answered yet
    READY = "ready"
    NOT_READY = "not_ready"  # answers, and says no: starting, self-check, draining
    DOWN = "down"  # refuses connections or does not answer


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """What routing needs of a prompt: keys of its full blocks, and its size."""

    keys: Sequence[int]
    tokens_per_block: int
    prompt_tokens: int
    spread_key: int


class WaitingRequest(Protocol):
    """A request that could still be answered by another engine."""

    def engine_went_down(self, engine: Engine) -> None: ...


class Engine:
    """One engine process as this gateway sees it. Lives on the event loop only."""

    def __init__(self, model: str, config: EngineConfig, routing: RoutingConfig) -> None:
        self.model = model
        self.name = config.name
        self.config = config
        parts = urlsplit(config.url)
        assert parts.hostname is not None
        self.host = parts.hostname
        self.tls = parts.scheme == "https"
        self.port = parts.port or (443 if self.tls else 80)
        self.base_path = parts.path.rstrip("/")
        default_port = self.port == (443 if self.tls else 80)
        host = f"[{self.host}]" if ":" in self.host else self.host
        self.host_header = (host if default_port else f"{host}:{self.port}").encode()
        self.state = EngineState.UNKNOWN
        self.answer = "no answer yet"  # what the engine last said, for error messages
        self.rates = EngineRates(
            prefill_tokens_per_second=routing.prefill_tokens_per_second,
            cpu_load_tokens_per_second=routing.cpu_load_tokens_per_second,
            shared_load_tokens_per_second=routing.shared_load_tokens_per_second,
            running_request_ms=routing.running_request_ms,
        )
        self.running_requests = 0
        self.queued_tokens = 0
        self.events_live = False  # KV events arrive, so the index follows this engine by itself
        self.on_state: list[Callable[[Engine], None]] = []
        self.waiting: set[WaitingRequest] = set()  # requests without a first byte
        self.poll_soon: Callable[[], None] = lambda: None

    @property
    def routable(self) -> bool:
        return self.state is EngineState.READY

    def set_state(self, state: EngineState, answer: str) -> None:
        self.answer = answer
        if state is self.state:
            return
        self.state = state
        for listener in list(self.on_state):
            listener(self)

    def refused(self, answer: str) -> None:
        """A request could not connect: out at once, back on the next good poll."""
        self.set_state(EngineState.DOWN, answer)
        self.poll_soon()

    def hung(self, answer: str) -> None:
        """Polls time out: connections stay open and silent, so requests waiting on them have to be told."""
        self.set_state(EngineState.DOWN, answer)
        for request in list(self.waiting):
            request.engine_went_down(self)

    def measured_prefill(self, tokens: int, seconds: float) -> None:
        if tokens >= RATE_SAMPLE_TOKENS_MIN and seconds > 0:
            rate = blend_rate(self.rates.prefill_tokens_per_second, tokens / seconds)
            self.rates = self.rates._replace(prefill_tokens_per_second=rate)


class Lease:
    """One request on one engine. Counted from creation to close(); each method may be called more than once."""

    __slots__ = ("_ahead_tokens", "_closed", "_queued", "_started", "decision", "engine")

    def __init__(self, engine: Engine, decision: Decision, now: float) -> None:
        self.engine = engine
        self.decision = decision
        self._ahead_tokens = engine.queued_tokens
        self._queued = decision.uncached_tokens
        self._started = now
        self._closed = False
        engine.running_requests += 1
        engine.queued_tokens += self._queued

    @property
    def expected_prefill_seconds(self) -> float:
        """Until the prompt is computed, by the engine's rate and what was queued before it."""
        return (self._ahead_tokens + self._queued) / self.engine.rates.prefill_tokens_per_second

    def prefill_assumed(self) -> None:
        """A plain reply shows no first byte before its last: its prompt leaves the queue when it should be done."""
        self._dequeue()

    def first_byte(self, now: float, *, measures_prefill: bool) -> None:
        """The prefill is over. measures_prefill: the reply streams, so the wait was queue and prefill alone."""
        if not self._queued:
            return
        if measures_prefill:
            self.engine.measured_prefill(self._ahead_tokens + self._queued, now - self._started)
        self._dequeue()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._dequeue()
        self.engine.running_requests -= 1

    def _dequeue(self) -> None:
        self.engine.queued_tokens -= self._queued
        self._queued = 0


class ModelFleet:
    """The engines of one model, their index, and the choice among them."""

    def __init__(
        self,
        config: ModelConfig,
        routing: RoutingConfig,
        index: PrefixIndex,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.name = config.name
        self.index = index
        self._routing = routing
        self._clock = clock
        self.engines: dict[str, Engine] = {}
        for engine in config.engines:
            self.add_engine(engine)

    def add_engine(self, config: EngineConfig) -> Engine:
        engine = Engine(self.name, config, self._routing)
        self.engines[config.name] = engine
        self.index.add_engine(config.name)
        return engine

    def has_routable(self) -> bool:
        return any(engine.routable for engine in self.engines.values())

    def choose(self, prompt: PromptBlocks, tried: frozenset[str]) -> Lease:
        """Decide and count in one step. Raises NoEngineReady, naming the engines and what they answered."""
        held = self.index.match(prompt.keys, prompt.tokens_per_block)
        view = FleetView(
            tuple(
                [
                    EngineView(
                        engine.name,
                        engine.state is EngineState.READY,
                        engine.running_requests,
                        engine.queued_tokens,
                        engine.rates,
                        held.get(engine.name, NOTHING_HELD),
                    )
                    for engine in self.engines.values()
                ]
            )
        )
        request = RouteRequest(prompt.prompt_tokens, prompt.spread_key, tried)
        decision = plan_route(request, view, self._routing.bounded_load_factor)
        if decision is None:
            raise NoEngineReady(self.unavailable_message(tried))
        engine = self.engines[decision.engine_name]
        now = self._clock()
        lease = Lease(engine, decision, now)
        if prompt.keys:
            live = engine.events_live
            seconds = self._routing.speculative_seconds if live else self._routing.approximate_seconds
            self.index.speculate(engine.name, prompt.keys, now + seconds)
        return lease

    def unavailable_message(self, tried: frozenset[str]) -> str:
        said = "; ".join(
            f"{engine.name}: {'failed for this request' if engine.name in tried and engine.routable else engine.answer}"
            for engine in self.engines.values()
        )
        return f"No engine of model {self.name!r} can take a request now ({said}). Try again shortly."
