"""Spillway's own routing: the gateway's ModelFleet, PrefixIndex and plan_route, fed as the gateway feeds them."""

from __future__ import annotations

from collections.abc import Callable

from routing_policies.policy import Fleet, Policy, RoutedRequest
from spillway_gateway.config.settings import EngineConfig, HealthConfig, IndexConfig, ModelConfig, RoutingConfig
from spillway_gateway.fleet import event_decoder
from spillway_gateway.fleet.attempt import Attempt
from spillway_gateway.fleet.cold_prompts import ColdTurn
from spillway_gateway.fleet.engine import EngineState
from spillway_gateway.fleet.engine_metrics import EngineReading
from spillway_gateway.fleet.model_fleet import ModelFleet
from spillway_gateway.fleet.prefix_index import PrefixIndex
from spillway_gateway.fleet.sessions import SessionKey
from spillway_gateway.routing import load
from spillway_gateway.routing.load import REPEATED_SHARE
from spillway_gateway.routing.prefix import PromptBlocks, short_prompt_key, token_block_keys, token_bytes
from spillway_simulator.model.events import BlocksRemoved, BlocksStored, KvEvent, Medium

MODEL = "simulated"
SCRAPE_SECONDS = HealthConfig().metrics_period_seconds
_TIERS = {
    Medium.DEVICE: event_decoder.Tier.DEVICE,
    Medium.CPU: event_decoder.Tier.CPU,
    Medium.NODE: event_decoder.Tier.CPU,
    Medium.SHARED: event_decoder.Tier.SHARED,
    Medium.BELOW: event_decoder.Tier.SHARED,
}


class Spillway(Policy):
    """events: follow KV events; without them prompts count as held where they were sent, as for engines without.
    engine_rates: engines report their measured rates, as those with Spillway's connector do; without, rates are
    measured from replies. sessions: requests name theirs, as with x-session-id. bursts_together: that another engine
    computes a prefix counts."""

    name = "spillway"

    def __init__(
        self,
        block_tokens: int,
        *,
        events: bool = True,
        engine_rates: bool = True,
        sessions: bool = False,
        bursts_together: bool = True,
        routing: RoutingConfig | None = None,
    ) -> None:
        self._engine_rates = engine_rates
        self._sessions = sessions
        self._repeated_share = REPEATED_SHARE if bursts_together else 0.0
        self._block_tokens = block_tokens
        self._events = events
        self._routing = routing or RoutingConfig()
        self.note = (
            "gateway code" + (", KV events" if events else "") + (", engines' own rates" if engine_rates else "")
        )
        if not events:
            self.name = "spillway_without_events"
        elif not engine_rates:
            self.name = "spillway_without_rates"
        elif not bursts_together:
            self.name = "spillway_bursts_apart"

    def start(self, fleet: Fleet, engines: int, seed: int) -> None:
        self._fleet = fleet
        load.REPEATED_SHARE = self._repeated_share  # policies run one after the other
        bounds = IndexConfig()
        self.index = PrefixIndex(
            MODEL,
            bytes_max=bounds.bytes_max,
            orphans_max=bounds.orphans_max,
            default_block_tokens=self._block_tokens,
            clock=lambda: fleet.now,
        )
        configs = tuple(EngineConfig(f"engine-{at}", f"http://127.0.0.1:{8100 + at}") for at in range(engines))
        self._names = {config.name: at for at, config in enumerate(configs)}
        self.model = ModelFleet(ModelConfig(MODEL, configs), self._routing, self.index, clock=lambda: fleet.now)
        for engine in self.model.engines.values():
            engine.set_state(EngineState.READY, "ready")
            engine.events_live = self._events
        self._attempts: dict[str, Attempt] = {}
        self._turns: dict[str, ColdTurn] = {}  # of requests that wait
        self._observed_at = float("-inf")
        self.reasons: dict[str, int] = {}

    def held_back(self, request: RoutedRequest, again: Callable[[], None]) -> float | None:
        turn = self._turns.setdefault(request.id, ColdTurn())
        if self._route(request, turn):
            del self._turns[request.id]
            return None
        turn.wake = again
        return turn.until

    def choose(self, request: RoutedRequest) -> int:
        if request.id not in self._attempts:
            self._route(request, ColdTurn(urgent=True))
        attempt = self._attempts[request.id]
        reason = attempt.decision.reason.value
        self.reasons[reason] = self.reasons.get(reason, 0) + 1
        return self._names[attempt.engine.name]

    def _route(self, request: RoutedRequest, turn: ColdTurn) -> bool:
        self._observe()
        namespace = self.index.namespace()
        keys = token_block_keys(namespace, request.tokens, self.index.block_tokens)
        spread = keys[0] if keys else short_prompt_key(namespace, token_bytes(request.tokens))
        blocks = PromptBlocks(keys, self.index.block_tokens, len(request.tokens), spread)
        session = SessionKey.of("", request.session.encode()) if self._sessions else None
        attempt = self.model.choose_unless_held(blocks, frozenset(), session=session, turn=turn)
        if attempt is not None:
            self._attempts[request.id] = attempt
        return attempt is not None

    def promised_tokens(self, request_id: str) -> int:
        """Return the tokens that the gateway expected an open request to find on its engine."""
        return int(self._attempts[request_id].decision.held.total_tokens)

    def _observe(self) -> None:
        """Read the engines' state once a second, as the gateway does, but between two requests."""
        if self._fleet.now - self._observed_at < SCRAPE_SECONDS:
            return
        self._observed_at = self._fleet.now
        for at, engine in enumerate(self.model.engines.values()):
            scrape = self._fleet.scrape_now(at)
            reading = EngineReading(
                scrape.waiting,
                scrape.running,
                scrape.kv_usage,
                scrape.kv_capacity_tokens,
                scrape.prefill_tokens_per_second if self._engine_rates else None,
                None,
                scrape.shared_load_tokens_per_second if self._engine_rates else None,
                scrape.below_load_tokens_per_second if self._engine_rates else None,
                declined_tiers=scrape.declined_tiers if self._engine_rates else frozenset(),
            )
            engine.observed(reading, engine.running_requests)

    def first_token(self, request_id: str) -> None:
        self._attempts[request_id].first_byte(self._fleet.now, measures_prefill=True)

    def finished(self, request_id: str) -> None:
        self._attempts.pop(request_id).close(self._fleet.now)

    def events(self, engine: int, events: list[KvEvent]) -> None:
        if self._events:
            for event in events:
                self.index.apply(f"engine-{engine}", gateway_event(event, self._block_tokens))

    def engine_down(self, engine: int) -> None:
        name = f"engine-{engine}"
        self.model.engines[name].refused("it died")
        for _ in self.index.clear_engine(name):
            pass

    def engine_up(self, engine: int) -> None:
        self.model.engines[f"engine-{engine}"].set_state(EngineState.READY, "ready")


def gateway_event(event: KvEvent, block_tokens: int) -> event_decoder.KvEvent:
    """The value that the gateway's decoder makes of this event's bytes."""
    if isinstance(event, BlocksStored):
        device = event.tokens is not None
        return event_decoder.BlockStored(
            block_hashes=list(event.keys),
            parent_hash=event.parent,
            token_ids=event.tokens.tolist() if event.tokens is not None else [],
            block_tokens=block_tokens if device else 0,
            tier=_TIERS[event.medium],
            lora_name=None,
            extra_keys=[[event.salt]] if event.salt is not None else [],
            group=0,
            spec_kind=None,
            store=event_decoder.store_of(event.medium.value),
        )
    if isinstance(event, BlocksRemoved):
        store = event_decoder.store_of(event.medium.value)
        return event_decoder.BlockRemoved(list(event.keys), _TIERS[event.medium], 0, store)
    return event_decoder.AllBlocksCleared()
