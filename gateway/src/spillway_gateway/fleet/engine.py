"""The live state of one engine as this gateway sees it. On the event loop only."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Collection
from enum import StrEnum
from typing import Protocol
from urllib.parse import urlsplit

import msgspec
from msgspec import structs

from spillway_gateway.config.ranks import RankConfig
from spillway_gateway.config.settings import BreakerConfig, EngineConfig, RoutingConfig
from spillway_gateway.fleet.breaker import Breaker
from spillway_gateway.fleet.engine_metrics import EngineReading
from spillway_gateway.fleet.foreign_work import NO_FOREIGN_WORK, ForeignWork, foreign_work
from spillway_gateway.fleet.listed_models import ListedModels
from spillway_gateway.fleet.load_averages import BusyShare, RequestMeans
from spillway_gateway.fleet.prefill_queue import PrefillQueue
from spillway_gateway.fleet.prefill_rate import FleetSamples, PrefillRate
from spillway_gateway.fleet.tier_traffic import TierTraffic
from spillway_gateway.routing.fleet_view import EngineRates, EngineView, HeldPrefix
from spillway_settings.vllm_salts import Version

EXPECTED_ADAPTERS_MAX = 1000
FAILURES_MAX = 8
ENDING_SECONDS_MAX = 30.0  # after an engine has said that it ends; it drains or is gone by then
SLOW_START_SHARE = 0.1  # of its prefill rate, at the first moment
_serials = itertools.count(1)


class EngineState(StrEnum):
    """State by the engine's health route. Values of a metric's label."""

    UNKNOWN = "unknown"  # never answered yet
    READY = "ready"
    NOT_READY = "not_ready"  # answers that it is not: starting, self-check, draining
    DOWN = "down"  # refuses connections or does not answer


class StoreView(msgspec.Struct, frozen=True, gc=False):
    """The one store behind the shared tier, if its rate is configured: its queue of loads and its busy share."""

    wait_ms: float
    busy_share: float


NO_STORE = StoreView(0.0, 0.0)


class EngineRequest(Protocol):
    """A request that was sent to an engine."""

    def engine_went_down(self, engine: Engine) -> None:
        """Note that the engine answers no polls: another engine could take over. Called on all requests."""

    def engine_ends(self, engine: Engine) -> None:
        """Note that the engine's time is over. Called on all requests."""


class Engine:
    """One engine process, or one data parallel rank of it, as this gateway sees it. On the event loop only; clock in
    monotonic seconds."""

    def __init__(
        self,
        model: str,
        config: EngineConfig,
        routing: RoutingConfig,
        *,
        instance: str = "",
        newcomer: bool = False,
        fleet_samples: FleetSamples | None = None,
        means: RequestMeans | None = None,
        breaker: BreakerConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """instance: the instance of the process at the address, if discovery gives it. newcomer: the process was just
        started, so its first readiness begins a slow start. fleet_samples, means: shared by the engines of a model."""
        self.serial = next(_serials)  # of this object: a name may get another address
        self.model = model
        self.name = config.name
        self.config = config
        rank = config if isinstance(config, RankConfig) else None
        self.rank = rank.rank if rank is not None else None  # data parallel rank that requests name
        self.process = rank.process if rank is not None else config.name  # behind one address, with all its ranks
        self.same_process = rank.siblings if rank is not None else frozenset((config.name,))  # names, its own included
        self.instance = instance
        self.withheld: str | None = None  # why discovery keeps new requests away; None: it does not
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
        self.routable = False  # whether new requests may be sent, the breaker aside
        self.prompt_tokens_max: int | None = None  # max_model_len as the engine reports it
        self.listed: ListedModels | None = None  # as last read; None: it never gave a list
        self.vllm: Version | None = None  # as last read; None: not read yet
        self.adapters: frozenset[str] | None = None  # LoRA adapters loaded there; None: unknown
        self._expected_adapters: set[str] = set()  # that a request has the engine load, until its next list
        self.answer = "no answer yet"  # the engine's last answer, for error messages
        self.breaker = Breaker(breaker or BreakerConfig())
        self._clock = clock
        self._slow_start_seconds = routing.slow_start_seconds
        self._warm_start_seconds = routing.warm_start_seconds
        self._warm_start_until = float("-inf")  # of the warm start, which comes before the slow start's ramp
        self._warm_start_is_due = False
        self._warm_at = float("-inf")  # when both are over
        self._default_rates = self._rates = EngineRates(
            prefill_tokens_per_second=routing.prefill_tokens_per_second,
            cpu_load_tokens_per_second=routing.cpu_load_tokens_per_second,
            shared_load_tokens_per_second=routing.shared_load_tokens_per_second,
            running_request_ms=routing.running_request_ms,
            below_load_tokens_per_second=routing.shared_load_tokens_per_second,
        )
        self._fleet_samples = FleetSamples() if fleet_samples is None else fleet_samples
        self._rates_as_of = 0  # samples of the fleet
        self.prefill = PrefillRate(self._fleet_samples, routing.prefill_tokens_per_second)
        self.busy = BusyShare()
        self.shared_busy = BusyShare()  # of its link to the shared tier
        self.running_requests = 0
        self.prefills = PrefillQueue(clock)
        self.cpu_link_tokens = 0
        self.shared_link_tokens = self.below_link_tokens = 0
        self.foreign: ForeignWork = NO_FOREIGN_WORK
        self.means = means if means is not None else RequestMeans()
        self.resident_tokens = 0  # uncached prompt tokens of unfinished requests: their part of the KV cache
        self._kv_usage = 0.0  # of the device's KV cache at the last reading; 0..1
        self._kv_capacity_tokens = 0  # 0: unknown
        self._resident_at_reading = 0
        self.traffic = TierTraffic()  # for the operations page; routing does not read it
        self.reports_cached_tokens = False  # in its replies' usage, wherever the number is not 0
        self.token_ms = 0.0  # between two tokens of its answers, between the last two readings; 0: there were none
        self._token_intervals = self._token_seconds = 0.0  # at the last reading
        self.declined_tiers: frozenset[str] = frozenset()  # at the last reading
        self.on_declined: Callable[[frozenset[str]], None] = lambda types: None
        self.events_live = False  # KV events arrive, so the index does not depend on speculation
        self.on_state: list[Callable[[Engine], None]] = []
        self.on_read: Callable[[], None] = lambda: None  # called when another version or longest prompt was read
        self.failed_at: deque[float] = deque(maxlen=FAILURES_MAX)  # when it last failed requests, monotonic seconds
        self.requests: set[EngineRequest] = set()  # of this gateway, on this engine
        self.progressed_at = float("-inf")  # when it was last seen to compute; monotonic seconds
        self.progressed_by: object = None  # the request that showed it; None: its metrics
        self._computed_tokens: float | None = None  # at the last reading
        self.terminating = False  # reported by discovery; its pod is being deleted, or is gone
        self.draining = False  # reported by the engine
        self._said_ending_at: float | None = None  # in an answer, since the state changed; monotonic seconds
        self._lost_at = float("-inf")  # when it was ready and then went down; monotonic seconds
        self.poll_soon: Callable[[], None] = lambda: None
        self.on_idle: Callable[[], None] = lambda: None  # the last request has ended

    @property
    def queued_tokens(self) -> int:
        """Uncached prompt tokens of requests without a first byte."""
        return self.prefills.tokens

    @property
    def was_to_end(self) -> bool:
        """Whether its process ends for a reason other than a request."""
        return self.terminating or self.draining

    @property
    def reason(self) -> str:
        """Reason for which it takes requests or does not."""
        return self.withheld or self.answer

    def withhold(self, why: str | None, *, terminating: bool = False) -> None:
        """why: the reason to keep new requests away; None: allow them again. terminating: the process will end."""
        self.terminating = terminating
        if why != self.withheld:
            self.withheld = why
            self._notify()

    def set_state(self, state: EngineState, answer: str) -> None:
        """Set the state and notify the listeners if it changed. answer: the engine's, for error messages."""
        self.answer = answer
        if state is self.state:
            return
        # A first answer does not show for how long the engine has been ready, unless it is known to be new.
        if state is EngineState.READY and (self.state is not EngineState.UNKNOWN or self._newcomer):
            self._warm_at = self._clock() + self._slow_start_seconds
            self._warm_start_is_due = self._warm_start_seconds > 0
        if state is EngineState.DOWN and self.state is EngineState.READY:
            self._lost_at = self._clock()
        self.state = state
        self._said_ending_at = None
        self._notify()

    def may_return_for(self, seconds: float) -> float:
        """Return how much longer an engine that was lost is expected back: `seconds` from then on, unless it was to
        end. A network that takes nothing for a moment, as while its policies change, looks like an engine that is
        gone."""
        if self.state is not EngineState.DOWN or self.withheld is not None or self.was_to_end:
            return 0.0
        return max(0.0, self._lost_at + seconds - self._clock())

    def says_it_ends(self, now: float) -> bool:
        """An answer says that the engine's process ends. Returns whether to believe it: not if it has said so for long
        and is still ready. now: monotonic seconds."""
        if self._said_ending_at is None:
            self._said_ending_at = now
        return self.state is not EngineState.READY or now - self._said_ending_at <= ENDING_SECONDS_MAX

    def models_listed(self, listed: ListedModels | None) -> None:
        """A reading of /v1/models. None: a page without a list, so that nothing is known of what the engine serves."""
        self.listed = listed
        self.adapters = listed.adapters if listed is not None else None
        before = self.prompt_tokens_max
        self.prompt_tokens_max = listed.prompt_tokens_max(self.model) if listed is not None else None
        self._expected_adapters.clear()
        if self.prompt_tokens_max != before:
            self.on_read()

    def set_version(self, vllm: Version | None) -> None:
        """A reading of /version."""
        if vllm != self.vllm:
            self.vllm = vllm
            self.on_read()

    def expect_adapter(self, name: str) -> None:
        """Note that a request makes this engine load the adapter: further ones need not load it on another engine."""
        if len(self._expected_adapters) >= EXPECTED_ADAPTERS_MAX:  # names are the clients', and lists may be missing
            self._expected_adapters.clear()
        self._expected_adapters.add(name)

    def expects_adapter(self, name: str) -> bool:
        return name in self._expected_adapters

    def lacks_adapter(self, name: str) -> None:
        """The engine answered that it has no such adapter, whatever it listed last."""
        self._expected_adapters.discard(name)
        if self.adapters is not None:
            self.adapters -= {name}
        self.poll_soon()

    def _notify(self) -> None:
        self.routable = self.state is EngineState.READY and self.withheld is None
        for listener in list(self.on_state):
            listener(self)

    def refused(self, answer: str) -> None:
        """A request could not connect: down at once, ready again on the next good poll."""
        self.set_state(EngineState.DOWN, answer)
        self.poll_soon()

    def hung(self, answer: str) -> None:
        """Polls time out: connections stay open and silent, so requests waiting on them must be notified."""
        self.set_state(EngineState.DOWN, answer)
        for request in list(self.requests):
            request.engine_went_down(self)

    def end_requests(self) -> None:
        """The engine's process is about to end; vLLM may hang while a client stays connected."""
        for request in list(self.requests):
            request.engine_ends(self)

    @property
    def rates(self) -> EngineRates:
        """Measured rates, the configured ones if nothing was measured."""
        if self._rates_as_of != self._fleet_samples.added:
            self._rates_as_of = self._fleet_samples.added
            self._rates = structs.replace(self._rates, prefill_tokens_per_second=self.prefill.tokens_per_second)
        return self._rates

    def served(self, computed_tokens: int, seconds: float) -> None:
        """The engine has answered a whole request. computed_tokens: of its prompt; 0: unknown."""
        self.means.finished(seconds)
        self.prefill.sample_whole(computed_tokens, seconds)

    def progressed(self, now: float, by: object = None) -> None:
        """The engine has computed something. by: the request that got it; None: its metrics show it."""
        self.progressed_at = now
        self.progressed_by = by

    def observed(self, reading: EngineReading, requests_before: int) -> None:
        """A scrape arrived. requests_before: this gateway's on the engine when it was requested."""
        if self._computed_tokens not in (None, reading.computed_tokens) and reading.computed_tokens is not None:
            self.progressed(self._clock())
        self._computed_tokens = reading.computed_tokens
        tokens = reading.token_intervals - self._token_intervals
        self.token_ms = 1000.0 * (reading.token_seconds - self._token_seconds) / tokens if tokens > 0 else 0.0
        self._token_intervals, self._token_seconds = reading.token_intervals, reading.token_seconds
        self.foreign = foreign_work(reading, requests_before, self.running_requests)
        if reading.declined_tiers != self.declined_tiers:
            self.declined_tiers = reading.declined_tiers
            self.on_declined(self.declined_tiers)
        self._kv_usage = reading.kv_usage or 0.0
        self._kv_capacity_tokens = reading.kv_capacity_tokens or 0
        self._resident_at_reading = self.resident_tokens
        self.prefill.reported = reading.prefill_tokens_per_second
        default = self._default_rates
        shared = reading.shared_load_tokens_per_second or default.shared_load_tokens_per_second
        self._rates = structs.replace(
            self._rates,
            prefill_tokens_per_second=self.prefill.tokens_per_second,
            cpu_load_tokens_per_second=reading.cpu_load_tokens_per_second or default.cpu_load_tokens_per_second,
            shared_load_tokens_per_second=shared,
            below_load_tokens_per_second=reading.below_load_tokens_per_second
            or min(shared, default.shared_load_tokens_per_second),
        )

    def unobserved(self) -> None:
        """The last reading is stale: drop other work. Rates stay, they change slowly."""
        self.foreign = NO_FOREIGN_WORK
        self._kv_capacity_tokens = 0

    def is_warming(self, now: float) -> bool:
        """Whether it is in its slow start. now: monotonic seconds."""
        return now < self._warm_at

    def take_warm_start(self) -> bool:
        """Whether a warm start is due; True once for each."""
        due, self._warm_start_is_due = self._warm_start_is_due, False
        return due

    def begin_warm_start(self) -> None:
        """The slow start waits until the warm start has ended."""
        self._warm_start_until = self._clock() + self._warm_start_seconds
        self._warm_at = self._warm_start_until + self._slow_start_seconds

    def in_warm_start(self, now: float) -> bool:
        """Whether there is time left for it. now: monotonic seconds."""
        return now < self._warm_start_until

    def end_warm_start(self) -> None:
        """The warm start has ended, or there is none: the slow start goes on."""
        self._warm_start_until = min(self._warm_start_until, self._clock())
        self._warm_at = min(self._warm_at, self._warm_start_until + self._slow_start_seconds)

    def current_rates(self, now: float) -> EngineRates:
        """Slow start: an engine that has just become ready compiles and fills its caches. Until it is warm its prefill
        counts as slower than measured, so its share of requests grows gradually, from the end of its warm start on."""
        rates = self.rates
        if not self.is_warming(now):
            return rates
        warm = SLOW_START_SHARE
        if now >= self._warm_start_until:
            warm = max(warm, 1.0 - (self._warm_at - now) / self._slow_start_seconds)
        return structs.replace(rates, prefill_tokens_per_second=warm * rates.prefill_tokens_per_second)

    def view(self, held: HeldPrefix, now: float, *, ejected: bool, store: StoreView = NO_STORE) -> EngineView:
        """The engine's frozen view. ejected: its breaker keeps requests away. now: monotonic seconds."""
        foreign, means = self.foreign, self.means
        kv_usage = kv_token_ms = 0.0
        if self._kv_capacity_tokens:
            since = self.resident_tokens - self._resident_at_reading
            kv_usage = self._kv_usage + since / self._kv_capacity_tokens
            kv_token_ms = 1000.0 * means.seconds / self._kv_capacity_tokens
        rates = self.current_rates(now) if now < self._warm_at else self.rates
        queued_tokens = 0
        if self.prefills.tokens:
            queued_tokens = self.prefills.tokens_left(now, rates.prefill_tokens_per_second)
        if foreign.waiting_requests:
            queued_tokens += int(foreign.waiting_requests * means.uncached_tokens)
        shared_busy = self.shared_busy.at(now) if self.shared_busy.share else 0.0
        return EngineView(
            self.name,
            self.routable and not ejected,
            self.running_requests + foreign.requests,
            queued_tokens,
            rates,
            held,
            self.busy.at(now) * foreign.share,
            self.cpu_link_tokens,
            self.shared_link_tokens,
            store.wait_ms,
            shared_busy if store is NO_STORE else max(shared_busy, store.busy_share),
            kv_usage,
            kv_token_ms,
            means.device_share,
            means.reload_token_ms,
            self.events_live,
            self.config.role,
            token_ms=self.token_ms,
            below_link_tokens=self.below_link_tokens,
        )


def may_return_for(engines: Collection[Engine], seconds: float) -> float:
    """Return how much longer one of a model's engines is expected back, if none takes requests; see
    Engine.may_return_for."""
    if any(engine.routable for engine in engines):
        return 0.0
    return max((engine.may_return_for(seconds) for engine in engines), default=0.0)
