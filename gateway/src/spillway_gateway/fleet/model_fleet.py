"""The engines of one model, and the one step in which a routing decision is taken and counted.

`ModelFleet.choose` builds the frozen view, plans, and opens an Attempt without an await between, so two requests never
decide on the same counters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

from msgspec import structs

from spillway_gateway.config.disaggregation import DisaggregationConfig
from spillway_gateway.config.ranks import ranks_of
from spillway_gateway.config.settings import BreakerConfig, EngineConfig, ModelConfig, RoutingConfig
from spillway_gateway.errors import ModelNotFound, NoEngineReady
from spillway_gateway.fleet.attempt import Attempt
from spillway_gateway.fleet.cold_prompts import ColdPrompts, ColdTurn, being_computed, is_cold
from spillway_gateway.fleet.conversations import Conversation, Conversations
from spillway_gateway.fleet.engine import NO_STORE, Engine, StoreView
from spillway_gateway.fleet.hand_over import LOOKS_PER_ITERATION, HandOver, HandOverPrices
from spillway_gateway.fleet.load_averages import BusyShare, RequestMeans
from spillway_gateway.fleet.prefill_queue import ColdPrompt
from spillway_gateway.fleet.prefill_rate import FleetSamples
from spillway_gateway.fleet.prefix_index import PrefixIndex
from spillway_gateway.fleet.prefix_match import used
from spillway_gateway.fleet.routed_blocks import RoutedBlocks
from spillway_gateway.fleet.sessions import SessionKey, Sessions
from spillway_gateway.fleet.steps import Steps
from spillway_gateway.routing.fleet_view import NOTHING_HELD, FleetView, HeldPrefix, Leg, RouteRequest
from spillway_gateway.routing.legs import handed_over
from spillway_gateway.routing.prefix import PromptBlocks
from spillway_gateway.routing.route import Decision, plan_route
from spillway_gateway.turns import Turns
from spillway_settings.roles import EngineRole
from spillway_settings.vllm_salts import OLDEST, Version

FAILED_TOGETHER_SECONDS = 5.0


class ModelFleet:
    """The engines of one model, their index, and the choice among them."""

    def __init__(
        self,
        config: ModelConfig,
        routing: RoutingConfig,
        index: PrefixIndex,
        clock: Callable[[], float] = time.monotonic,
        breaker: BreakerConfig | None = None,
        *,
        disaggregation: DisaggregationConfig | None = None,
    ) -> None:
        self._breaker = breaker
        self.disaggregation = disaggregation or DisaggregationConfig()
        asked = self.disaggregation
        self._hand_overs = HandOverPrices(asked.hand_over_ms, asked.hand_over_seconds_max, clock)
        self._hand_over_looks = Turns(LOOKS_PER_ITERATION)
        self.config = config
        self.name = config.name
        self.index = index
        self._routing = routing
        self._clock = clock
        self._samples = FleetSamples()
        self._means = RequestMeans()
        self._store_busy = BusyShare()
        self._steps = Steps()
        self.cold = ColdPrompts(clock)
        self.conversations = Conversations(routing.sessions_max)
        self.sessions = Sessions(routing.tenant_sessions_max, routing.sessions_max)
        self.engines: dict[str, Engine] = {}
        # The part of all engines' state that each request reads; computed again (_look_at_engines) when one of them
        # changes.
        self.has_roles = False  # whether a request may take two legs
        self.spreads = False  # whether conversations have a choice of engines that each take whole requests
        self.ready_engines = 0  # that take requests, breakers aside
        self.prompt_tokens_max: int | None = None  # that any engine takes; None while one has not reported its limit
        # That an engine reports; while none does, the last one that engines reported.
        self.oldest_vllm: Version = OLDEST
        for engine in config.engines:
            for each in ranks_of(engine):
                self.add_engine(each)

    def configure(self, config: ModelConfig) -> None:
        """A reload has changed the model's settings. Its engines come and go by themselves."""
        self.config = config

    def _look_at_engines(self) -> None:
        engines = self.engines.values()
        self.has_roles = any(engine.config.role is not EngineRole.BOTH for engine in engines)
        self.spreads = len(engines) > 1 and not self.has_roles
        self.ready_engines = sum(engine.routable for engine in engines)
        lengths = [engine.prompt_tokens_max for engine in engines if engine.prompt_tokens_max is not None]
        self.prompt_tokens_max = max(lengths) if lengths and len(lengths) == len(engines) else None
        versions = [engine.vllm for engine in engines if engine.vllm is not None]
        self.oldest_vllm = min(versions, default=self.oldest_vllm)

    def _engines_changed(self) -> None:
        self._look_at_engines()
        self.cold.changed()

    def add_engine(self, config: EngineConfig, *, instance: str = "", newcomer: bool = False) -> Engine:
        """Add an engine to the choice and to the index."""
        engine = self._engine(config, instance=instance, newcomer=newcomer)
        self.engines[config.name] = engine
        self._look_at_engines()
        self.index.add_engine(config.name)
        engine.on_state.append(lambda _: self._engines_changed())
        engine.on_read = self._look_at_engines
        engine.on_declined = partial(self.index.decline, config.name)
        return engine

    def _engine(self, config: EngineConfig, *, instance: str, newcomer: bool) -> Engine:
        return Engine(
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

    def remove_engine(self, name: str) -> Engine:
        """Send no new request there; running ones keep their attempts, counters and connections. The caller frees its
        entries in the index: index.retire_engine()."""
        engine = self.engines.pop(name)
        self._engines_changed()
        return engine

    def lists_adapter(self, name: str) -> bool:
        """Whether an engine has this LoRA adapter, as last read."""
        return any(engine.adapters is not None and name in engine.adapters for engine in self.engines.values())

    def loaded_adapters(self) -> frozenset[str]:
        """The adapters of all engines, as last read."""
        return frozenset().union(*(engine.adapters or () for engine in self.engines.values()))

    def offers_adapter(self, name: str) -> bool:
        """Whether an engine has this adapter, would load it, or may have it: a configured adapter is unknown as long as
        an engine has not listed what it serves."""
        if self.config.loads(name) or self.lists_adapter(name):
            return True
        unknown = not self.engines or any(engine.adapters is None for engine in self.engines.values())
        return name in self.config.adapters and unknown

    def _adapter_load_ms(self, engine: Engine, name: str) -> float | None:
        """Return the time until the engine can use the adapter; None if it cannot."""
        listed = engine.adapters
        if (name in self.config.adapters) if listed is None else (name in listed):
            return 0.0
        if not self.config.loads(name):
            return None
        return 0.0 if engine.expects_adapter(name) else 1000.0 * self._routing.adapter_load_seconds

    def choose(
        self,
        prompt: PromptBlocks,
        tried: frozenset[str],
        only: str | None = None,
        session: SessionKey | None = None,
        adapter: str | None = None,
    ) -> Attempt:
        """Decide and count in one step. adapter: the LoRA adapter that the engine must have, or be able to load.

        Raises NoEngineReady, naming the engines and what they answered, and ModelNotFound if none has the adapter
        any more.
        """
        attempt = self.choose_unless_held(prompt, tried, only, session, adapter, turn=ColdTurn(urgent=True))
        assert attempt is not None
        return attempt

    def choose_unless_held(
        self,
        prompt: PromptBlocks,
        tried: frozenset[str],
        only: str | None = None,
        session: SessionKey | None = None,
        adapter: str | None = None,
        *,
        turn: ColdTurn,
        leg: Leg = Leg.WHOLE,
        tenant: str = "",
    ) -> Attempt | None:
        """choose() for a part of the request, or None if the prompt has to wait for its turn: self.cold.wait(), in the
        end self.cold.leave()."""
        now = self._clock()
        if spreads := self.spreads and only is None:
            self.conversations.pass_on(tenant, now)
        conversation = self.conversations.of(tenant, session, prompt)
        decision = self._decide(prompt, tried, only, session, conversation, now=now, adapter=adapter, leg=leg)
        if decision is None and adapter is not None and not self.offers_adapter(adapter):
            raise ModelNotFound(f"The adapter {adapter!r} of the model {self.name!r} is loaded on no engine")
        if decision is None:
            raise NoEngineReady(self.unavailable_message(tried))
        engine = self.engines[decision.engine_name]
        cold = None
        if is_cold(engine, decision):
            if self.cold.holds(turn, engine):
                return None
            cold = ColdPrompt(prompt.spread_key, decision.held.total_tokens)
        routed = None
        if prompt.keys:
            keys = prompt.keys_for(self.index.block_tokens_of(engine.name)) if prompt.other_keys else prompt.keys
            live = engine.events_live
            seconds = self._routing.speculative_seconds if live else self._routing.approximate_seconds
            routed = RoutedBlocks(self.index, self._steps, engine.name, keys, held_seconds=None if live else seconds)
            on_device = decision.held.device_tokens // prompt.tokens_per_block
            routed.expect(now + seconds, None if prompt.other_keys else on_device)
        awaited = self._hand_overs.await_second_leg(decision) if leg is Leg.SECOND else None
        attempt = Attempt(engine, decision, now, routed, self.cold.left, cold=cold, awaited=awaited)
        if session is not None and (decision.legs is None or decision.legs.prefill is None):
            self.sessions.served(session, engine.name, now)
        if spreads:
            whose = conversation, tenant, session, prompt
            self.conversations.routed(*whose, engine.name, now=now, means=self._means, again=bool(tried))
        if adapter is not None and (engine.adapters is None or adapter not in engine.adapters):
            engine.expect_adapter(adapter)
        store_rate = self._routing.shared_store_tokens_per_second
        if store_rate is not None and decision.held.shared_tokens:
            self._store_busy.add((decision.held.shared_tokens - decision.held.below_tokens) / store_rate, now)
        if self.cold.waiting:
            self.cold.leave(turn)
            self.cold.left(engine)
        return attempt

    def loading_engine(self, decision: Decision) -> str | None:
        """The engine that is to load from a store what the decision's engine computes; None: none."""
        if decision.legs is None or self.disaggregation.by_connector:
            return None
        return decision.legs.decode_engine

    def hand_over(self, prompt: PromptBlocks, engine: str, tell: Callable[[int], object]) -> HandOver:
        """Follow a prompt that another engine computes, until this one can load it; if it takes no requests any more,
        until another one can. tell: as HandOver."""
        blocks = min((prompt.prompt_tokens - 1) // prompt.tokens_per_block, len(prompt.keys))
        wanted_tokens = blocks * prompt.tokens_per_block

        def arrived_tokens() -> int:
            loading = [each for name, each in self.engines.items() if name == engine and each.routable] or [
                each for each in self.engines.values() if each.routable and each.config.role is not EngineRole.PREFILL
            ]
            held = self.held(prompt)
            return max((held.get(each.name, NOTHING_HELD).total_tokens for each in loading), default=wanted_tokens)

        price, looks = self._hand_overs.waits, self._hand_over_looks
        return HandOver(arrived_tokens, wanted_tokens, tell, price, looks, clock=self._clock)

    def expected_choice(
        self, prompt: PromptBlocks, only: str | None = None, session: SessionKey | None = None, tenant: str = ""
    ) -> Decision | None:
        """The decision that `choose` would make now; counts nothing. None: no engine could take the request."""
        conversation = self.conversations.of(tenant, session, prompt)
        return self._decide(prompt, frozenset(), only, session, conversation, now=self._clock(), adapter=None)

    def _decide(
        self,
        prompt: PromptBlocks,
        tried: frozenset[str],
        only: str | None,
        session: SessionKey | None,
        conversation: Conversation | None,
        *,
        now: float,
        adapter: str | None,
        leg: Leg = Leg.WHOLE,
    ) -> Decision | None:
        held = self.held(prompt)
        if leg is Leg.SECOND and self.disaggregation.by_connector:  # no event shows what is transferred
            whole = prompt.prompt_tokens, prompt.tokens_per_block
            reading = [each.name for each in self.engines.values() if each.config.role is not EngineRole.PREFILL]
            held |= {name: handed_over(held.get(name, NOTHING_HELD), *whole, near=True) for name in reading}
        last = self.sessions.engine_of(session) if session is not None else None
        request = RouteRequest(
            prompt.prompt_tokens,
            prompt.spread_key,
            tried,
            only,
            session is not None,
            last,
            prompt.text_tokens,
            *being_computed(prompt.spread_key, self.engines, tried, held),
            leg=leg,
            any_role=not (self.has_roles and self.disaggregation.roles_bind),
            splitting=self._hand_overs.terms(self.disaggregation, prompt.tokens_per_block)
            if leg is Leg.OPEN and self.has_roles
            else None,
        )
        factor = self._routing.bounded_load_factor
        settles = only is None and self.spreads and self.conversations.settles(conversation, self.engines, tried)
        decision = plan_route(request, self._view(held, now, adapter, settles, breakers=True), factor)
        if decision is None:  # every breaker is open: trying an engine is better than refusing
            decision = plan_route(request, self._view(held, now, adapter, settles, breakers=False), factor)
        return decision

    def held(self, prompt: PromptBlocks) -> dict[str, HeldPrefix]:
        """The blocks that each engine would use of those that it holds."""
        held = used(
            self.index.match(prompt.keys, prompt.tokens_per_block), prompt, prompt.keys, prompt.tokens_per_block
        )
        for tokens_per_block, keys in prompt.other_keys.items():
            for name, found in used(self.index.match(keys, tokens_per_block), prompt, keys, tokens_per_block).items():
                if found.total_tokens > held.get(name, NOTHING_HELD).total_tokens:
                    held[name] = found
        return held

    def _view(
        self, held: Mapping[str, HeldPrefix], now: float, adapter: str | None, settles: bool, *, breakers: bool
    ) -> FleetView:
        engines = self.engines.values()
        store = NO_STORE
        store_rate = self._routing.shared_store_tokens_per_second
        if store_rate is not None:
            ahead = sum(engine.shared_link_tokens - engine.below_link_tokens for engine in engines)
            store = StoreView(1000.0 * ahead / store_rate, self._store_busy.at(now))
        views = []
        has_roles = self.has_roles
        for engine in engines:
            ejected = breakers and not engine.breaker.closed and not engine.breaker.allows(now)
            view = engine.view(held.get(engine.name, NOTHING_HELD), now, ejected=ejected, store=store)
            if has_roles:
                view = structs.replace(
                    view,
                    stores=self.index.stores_of(engine.name),
                    declined_stores=self.index.declined_stores_of(engine.name),
                )
            if adapter is not None:
                load_ms = self._adapter_load_ms(engine, adapter)
                if load_ms is None:
                    continue
                if load_ms:
                    view = structs.replace(view, adapter_load_ms=load_ms)
            if settles:
                view = structs.replace(view, later_ms=self.conversations.later_ms(view, self._means))
            views.append(view)
        return FleetView(tuple(views))

    def served_alone(self, attempt: Attempt) -> bool:
        """Whether a request that its engine has failed, and that still counts there, had its process to itself.
        Requests that failed with it may have left by now, however long it took to find out whether the engine lives."""
        engine, failed_at = attempt.engine, attempt.failed_at
        together = (self._clock() if failed_at is None else failed_at) - FAILED_TOGETHER_SECONDS
        process = {engine, *(self.engines[name] for name in engine.same_process if name in self.engines)}
        others = sum(each.running_requests + each.foreign.requests for each in process) - 1
        failed = sum(at >= together for each in process for at in each.failed_at) - 1
        return others <= 0 and failed <= 0

    def unavailable_message(self, tried: frozenset[str]) -> str:
        """Text of NoEngineReady: each engine and why it takes no request. tried: engines that failed for it."""
        reasons = "; ".join(
            f"{engine.name}: {'failed for this request' if engine.name in tried and engine.routable else engine.reason}"
            for engine in self.engines.values()
        )
        reasons = reasons or "none is known"
        return f"No engine of model {self.name!r} can take a request now ({reasons}). Try again shortly."
