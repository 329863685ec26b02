"""The live state of engines, and the one step in which a decision is taken and counted.

`ModelFleet.choose` builds the frozen view, plans, and opens a Lease without an await between, so two requests never
decide on the same counters. A Lease keeps the counters of the engine it was opened on: when an engine is replaced or
restarted, old leases close against the old object and the new one never goes below zero.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Protocol
from urllib.parse import urlsplit

import msgspec
from msgspec import structs

from spillway_gateway.config.settings import BreakerConfig, EngineConfig, ModelConfig, RoutingConfig
from spillway_gateway.errors import NoEngineReady
from spillway_gateway.fleet.breaker import Breaker
from spillway_gateway.fleet.busy_share import BusyShare
from spillway_gateway.fleet.engine_metrics import EngineReading
from spillway_gateway.fleet.foreign_work import NO_FOREIGN_WORK, ForeignWork, OwnWork, foreign_work
from spillway_gateway.fleet.prefill_rate import FLEET_SAMPLES, PrefillRate, RateSamples
from spillway_gateway.fleet.prefix_index import PrefixIndex
from spillway_gateway.fleet.request_means import RequestMeans
from spillway_gateway.fleet.tier_traffic import TierTraffic
from spillway_gateway.routing.fleet_view import (
    NOTHING_HELD,
    EngineRates,
    EngineView,
    FleetView,
    HeldPrefix,
    RouteRequest,
)
from spillway_gateway.routing.route import Decision, plan_route

SLOW_START_SHARE = 0.1  # of its prefill rate, at the first moment


class EngineState(StrEnum):
    UNKNOWN = "unknown"  # never answered yet
    READY = "ready"
    NOT_READY = "not_ready"  # answers, and says no: starting, self-check, draining
    DOWN = "down"  # refuses connections or does not answer


class PromptBlocks(msgspec.Struct, frozen=True, gc=False):
    """What routing needs of a prompt: keys of its full blocks, and its size.

    other_keys: by tokens per block, its keys for the engines whose blocks have another size.
    """

    keys: Sequence[int]
    tokens_per_block: int
    prompt_tokens: int
    spread_key: int
    other_keys: Mapping[int, Sequence[int]] = msgspec.field(default_factory=dict)

    def keys_for(self, tokens_per_block: int) -> Sequence[int]:
        """Those of an engine with blocks of that size."""
        return self.other_keys.get(tokens_per_block, self.keys)


class StoreView(msgspec.Struct, frozen=True, gc=False):
    """The one store behind the shared tier, where its rate is configured: loads ahead there, and its busy share."""

    wait_ms: float
    busy_share: float


NO_STORE = StoreView(0.0, 0.0)


class EngineRequest(Protocol):
    """A request that was sent to an engine."""

    def engine_went_down(self, engine: Engine) -> None:
        """Told to requests without a first byte: another engine could still answer."""

    def engine_ends(self, engine: Engine) -> None:
        """Told to all when the engine's time is over."""


class Engine:
    """One engine process as this gateway sees it. Lives on the event loop only."""

    def __init__(
        self,
        model: str,
        config: EngineConfig,
        routing: RoutingConfig,
        *,
        instance: str = "",
        newcomer: bool = False,
        fleet_samples: RateSamples | None = None,
        means: RequestMeans | None = None,
        breaker: BreakerConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """instance: of the process at the address, where discovery knows it. newcomer: its process is young, so that
        its first readiness begins a slow start. fleet_samples, means: shared by the engines of a model."""
        self.model = model
        self.name = config.name
        self.config = config
        self.instance = instance
        self.withheld: str | None = None  # why discovery wants no new request here; None: it does not mind
        self._newcomer = newcomer
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
        self.prompt_tokens_max: int | None = None  # of one request, as the engine tells
        self.answer = "no answer yet"  # what the engine last said, for error messages
        self.breaker = Breaker(breaker or BreakerConfig())
        self._clock = clock
        self._slow_start_seconds = routing.slow_start_seconds
        self._warm_at = float("-inf")  # when the slow start is over
        self._default_rates = self._rates = EngineRates(
            prefill_tokens_per_second=routing.prefill_tokens_per_second,
            cpu_load_tokens_per_second=routing.cpu_load_tokens_per_second,
            shared_load_tokens_per_second=routing.shared_load_tokens_per_second,
            running_request_ms=routing.running_request_ms,
        )
        self.prefill = PrefillRate(
            RateSamples(FLEET_SAMPLES) if fleet_samples is None else fleet_samples, routing.prefill_tokens_per_second
        )
        self.busy = BusyShare()
        self.shared_busy = BusyShare()  # of its own link to the shared tier
        self.running_requests = 0
        self.queued_tokens = 0
        self.cpu_link_tokens = 0
        self.shared_link_tokens = 0
        self.foreign: ForeignWork = NO_FOREIGN_WORK
        self.means = means if means is not None else RequestMeans()
        self.resident_tokens = 0  # uncached prompt tokens of requests sent and not finished: what they take of the KV
        self._kv_usage = 0.0  # of the device's KV cache when it was last read; 0..1
        self._kv_capacity_tokens = 0  # 0: unknown
        self._resident_at_reading = 0
        self.traffic = TierTraffic()  # shown to people; routing does not read it
        self.events_live = False  # KV events arrive, so the index follows this engine by itself
        self.on_state: list[Callable[[Engine], None]] = []
        self.waiting: set[EngineRequest] = set()  # requests without a first byte
        self.requests: set[EngineRequest] = set()  # all that it has
        self.terminating = False  # says discovery
        self.draining = False  # says the engine
        self.poll_soon: Callable[[], None] = lambda: None
        self.on_idle: Callable[[], None] = lambda: None  # the last request here is over

    @property
    def routable(self) -> bool:
        return self.state is EngineState.READY and self.withheld is None

    @property
    def says(self) -> str:
        """Why it takes requests or does not, for error messages."""
        return self.withheld or self.answer

    def withhold(self, why: str | None, *, terminating: bool = False) -> None:
        """New requests may not go there any more, or may again; those it has go on. terminating: not for ever."""
        self.terminating = terminating
        if why != self.withheld:
            self.withheld = why
            self._tell()

    def set_state(self, state: EngineState, answer: str) -> None:
        self.answer = answer
        if state is self.state:
            return
        # The first answer of all says nothing of how long the engine has been ready, unless it is known to be new.
        if state is EngineState.READY and (self.state is not EngineState.UNKNOWN or self._newcomer):
            self._warm_at = self._clock() + self._slow_start_seconds
        self.state = state
        self._tell()

    def _tell(self) -> None:
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

    def end_requests(self) -> None:
        """The engine's process is about to end. With a client that stays connected vLLM may never get there."""
        for request in list(self.requests):
            request.engine_ends(self)

    @property
    def rates(self) -> EngineRates:
        prefill = self.prefill.tokens_per_second
        if prefill != self._rates.prefill_tokens_per_second:
            self._rates = structs.replace(self._rates, prefill_tokens_per_second=prefill)
        return self._rates

    def own_work(self) -> OwnWork:
        return OwnWork(self.running_requests)

    def observed(self, reading: EngineReading, before: OwnWork) -> None:
        """A scrape came back. before: this gateway's own work when it was asked for."""
        self.foreign = foreign_work(reading, before, self.own_work())
        self._kv_usage = reading.kv_usage or 0.0
        self._kv_capacity_tokens = reading.kv_capacity_tokens or 0
        self._resident_at_reading = self.resident_tokens
        self.prefill.reported = reading.prefill_tokens_per_second
        default = self._default_rates
        self._rates = structs.replace(
            self._rates,
            cpu_load_tokens_per_second=reading.cpu_load_tokens_per_second or default.cpu_load_tokens_per_second,
            shared_load_tokens_per_second=reading.shared_load_tokens_per_second
            or default.shared_load_tokens_per_second,
        )

    def unobserved(self) -> None:
        """The last reading is too old to say anything about the present; rates stay, they change slowly."""
        self.foreign = NO_FOREIGN_WORK
        self._kv_capacity_tokens = 0

    def current_rates(self, now: float) -> EngineRates:
        """An engine that became ready a moment ago compiles and fills its caches: until it is warm its prefill counts
        as slower than measured, so that it gets its share of requests step by step."""
        rates = self.rates
        if now >= self._warm_at:
            return rates
        warm = max(SLOW_START_SHARE, 1.0 - (self._warm_at - now) / self._slow_start_seconds)
        return structs.replace(rates, prefill_tokens_per_second=warm * rates.prefill_tokens_per_second)

    def view(self, held: HeldPrefix, now: float, *, ejected: bool, store: StoreView = NO_STORE) -> EngineView:
        """What routing may know now. ejected: its breaker keeps requests away."""
        foreign = self.foreign
        kv_usage = kv_token_ms = 0.0
        if self._kv_capacity_tokens:
            since = self.resident_tokens - self._resident_at_reading
            kv_usage = self._kv_usage + since / self._kv_capacity_tokens
            kv_token_ms = 1000.0 * self.means.seconds / self._kv_capacity_tokens
        return EngineView(
            self.name,
            self.state is EngineState.READY and self.withheld is None and not ejected,
            self.running_requests + foreign.requests,
            self.queued_tokens + int(foreign.waiting_requests * self.means.uncached_tokens)
            if foreign.waiting_requests
            else self.queued_tokens,
            self.current_rates(now) if now < self._warm_at else self.rates,
            held,
            self.busy.at(now) * foreign.share,
            self.cpu_link_tokens,
            self.shared_link_tokens,
            store.wait_ms,
            self.shared_busy.at(now) if store is NO_STORE else max(self.shared_busy.at(now), store.busy_share),
            kv_usage,
            kv_token_ms,
        )


class Lease:
    """One request on one engine. Counted from creation to close(); each method may be called more than once."""

    __slots__ = ("_ahead_tokens", "_closed", "_held", "_probe", "_queued", "_started", "decision", "engine")

    def __init__(self, engine: Engine, decision: Decision, now: float) -> None:
        self.engine = engine
        self.decision = decision
        self._ahead_tokens = engine.queued_tokens
        self._queued = decision.uncached_tokens
        self._held = decision.held
        self._probe = engine.breaker.sent()
        self._started = now
        self._closed = False
        engine.running_requests += 1
        engine.queued_tokens += self._queued
        engine.resident_tokens += self._queued
        engine.means.sent(self._queued)
        engine.cpu_link_tokens += self._held.cpu_tokens
        engine.shared_link_tokens += self._held.shared_tokens
        if self._held.shared_tokens:
            engine.shared_busy.add(self._held.shared_tokens / engine.rates.shared_load_tokens_per_second, now)
        engine.busy.add(self._queued / engine.rates.prefill_tokens_per_second, now)

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
            self.engine.prefill.sample(self._ahead_tokens + self._queued, now - self._started)
        self._dequeue()

    def began(self) -> None:
        """The reply's first byte has come."""
        if self._probe:
            self.engine.breaker.probe_began()

    def succeeded(self) -> None:
        """The engine answered this request properly, to its end."""
        self.engine.breaker.succeeded(probe=self._probe)
        self._probe = False

    def failed(self, now: float) -> None:
        """The engine, not the request, is to blame."""
        self.engine.breaker.failed(now)

    def close(self, now: float | None = None) -> None:
        """now: of a whole reply, which tells how long a request stays."""
        if self._closed:
            return
        self._closed = True
        self._dequeue()
        engine = self.engine
        if self._probe:
            engine.breaker.probe_ended()
        engine.running_requests -= 1
        engine.resident_tokens -= self.decision.uncached_tokens
        if not engine.running_requests:
            engine.on_idle()
        if now is not None:
            engine.means.finished(now - self._started)

    def _dequeue(self) -> None:
        engine = self.engine
        engine.queued_tokens -= self._queued
        engine.cpu_link_tokens -= self._held.cpu_tokens
        engine.shared_link_tokens -= self._held.shared_tokens
        self._queued = 0
        self._held = NOTHING_HELD


class ModelFleet:
    """The engines of one model, their index, and the choice among them."""

    def __init__(
        self,
        config: ModelConfig,
        routing: RoutingConfig,
        index: PrefixIndex,
        clock: Callable[[], float] = time.monotonic,
        breaker: BreakerConfig | None = None,
    ) -> None:
        self._breaker = breaker
        self.config = config
        self.name = config.name
        self.index = index
        self._routing = routing
        self._clock = clock
        self._samples = RateSamples(FLEET_SAMPLES)
        self._means = RequestMeans()
        self._store_busy = BusyShare()
        self.engines: dict[str, Engine] = {}
        for engine in config.engines:
            self.add_engine(engine)

    @property
    def prompt_tokens_max(self) -> int | None:
        """No engine takes a longer prompt; None where one has not said what it takes."""
        lengths = [engine.prompt_tokens_max for engine in self.engines.values()]
        known = [length for length in lengths if length is not None]
        return max(known) if known and len(known) == len(lengths) else None

    def add_engine(self, config: EngineConfig, *, instance: str = "", newcomer: bool = False) -> Engine:
        engine = Engine(
            self.name,
            config,
            self._routing,
            instance=instance,
            newcomer=newcomer,
            fleet_samples=self._samples,
            means=self._means,
            breaker=self._breaker,
            clock=self._clock,
        )
        self.engines[config.name] = engine
        self.index.add_engine(config.name)
        return engine

    def remove_engine(self, name: str) -> Engine:
        """No new request goes there; those it has keep their leases, counters and connections. What the index holds of
        it is the caller's to free: index.retire_engine."""
        return self.engines.pop(name)

    def choose(self, prompt: PromptBlocks, tried: frozenset[str], only: str | None = None) -> Lease:
        """Decide and count in one step. Raises NoEngineReady, naming the engines and what they answered."""
        held = self.index.match(prompt.keys, prompt.tokens_per_block)
        for tokens_per_block, keys in prompt.other_keys.items():
            for name, found in self.index.match(keys, tokens_per_block).items():
                if found.total_tokens > held.get(name, NOTHING_HELD).total_tokens:
                    held[name] = found
        now = self._clock()
        request = RouteRequest(prompt.prompt_tokens, prompt.spread_key, tried, only)
        factor = self._routing.bounded_load_factor
        decision = plan_route(request, self._view(held, now, breakers=True), factor)
        if decision is None:  # every breaker is open: an engine that may fail is better than a certain refusal
            decision = plan_route(request, self._view(held, now, breakers=False), factor)
        if decision is None:
            raise NoEngineReady(self.unavailable_message(tried))
        engine = self.engines[decision.engine_name]
        lease = Lease(engine, decision, now)
        store_rate = self._routing.shared_store_tokens_per_second
        if store_rate is not None and decision.held.shared_tokens:
            self._store_busy.add(decision.held.shared_tokens / store_rate, now)
        if prompt.keys:
            live = engine.events_live
            seconds = self._routing.speculative_seconds if live else self._routing.approximate_seconds
            keys = prompt.keys_for(self.index.block_tokens_of(engine.name)) if prompt.other_keys else prompt.keys
            self.index.speculate(engine.name, keys, now + seconds)
        return lease

    def _view(self, held: Mapping[str, HeldPrefix], now: float, *, breakers: bool) -> FleetView:
        engines = self.engines.values()
        store = NO_STORE
        store_rate = self._routing.shared_store_tokens_per_second
        if store_rate is not None:
            ahead = sum(engine.shared_link_tokens for engine in engines)
            store = StoreView(1000.0 * ahead / store_rate, self._store_busy.at(now))
        views = []
        for engine in engines:
            ejected = breakers and not engine.breaker.closed and not engine.breaker.allows(now)
            views.append(engine.view(held.get(engine.name, NOTHING_HELD), now, ejected=ejected, store=store))
        return FleetView(tuple(views))

    def unavailable_message(self, tried: frozenset[str]) -> str:
        said = "; ".join(
            f"{engine.name}: {'failed for this request' if engine.name in tried and engine.routable else engine.says}"
            for engine in self.engines.values()
        )
        said = said or "none is known"
        return f"No engine of model {self.name!r} can take a request now ({said}). Try again shortly."
