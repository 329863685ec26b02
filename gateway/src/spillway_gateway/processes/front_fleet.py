"""Models and engines in a front: as the router last sent them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from msgspec import structs

from spillway_gateway.access.admission import Admission
from spillway_gateway.config.settings import GatewayConfig, ModelConfig
from spillway_gateway.discovery.found import FoundEngine
from spillway_gateway.fleet.engine import Engine, EngineState
from spillway_gateway.fleet.listed_models import read_listed_models
from spillway_gateway.fleet.model_fleet import ModelFleet
from spillway_gateway.fleet.prefix_index import PrefixIndex
from spillway_gateway.metrics import GatewayMetrics
from spillway_gateway.processes import messages
from spillway_gateway.processes.messages import EngineSummary, ModelSummary
from spillway_gateway.processes.state_publisher import engine_config
from spillway_gateway.roster.engine_tasks import METRICS_KEPT_SECONDS, Clients
from spillway_gateway.roster.roster import Roster
from spillway_gateway.roster.served import ServedModel
from spillway_gateway.tokens.fair_threads import FairThreads

INDEX_BYTES = 1  # no block is ever put into a front's index


class FrontIndex(PrefixIndex):
    """Without blocks; it has the block sizes that prompts are hashed for."""

    known_sizes: tuple[int, ...] = ()

    def add_engine(self, name: str) -> None:
        """Nothing: the router's index has it."""

    @property
    def block_sizes(self) -> tuple[int, ...]:
        return self.known_sizes or super().block_sizes


class FrontAdmission(Admission):
    """The queue is the router's. is_full: as last reported."""

    reported_full = False

    @property
    def is_full(self) -> bool:
        return self.reported_full


class FrontRoster(Roster):
    """Follows the router instead of engines and sources."""

    def __init__(self, config: GatewayConfig, metrics: GatewayMetrics, threads: FairThreads) -> None:
        self._state = messages.State(())
        self._pages: dict[int, messages.Listed] = {}
        self._engines: dict[int, Engine] = {}  # by the router's serial
        super().__init__(config, metrics, threads)

    def start(self, clients: Clients) -> None:
        """Nothing: the router follows engines and sources."""

    def _index(self, model: ModelConfig) -> PrefixIndex:
        config = self._config
        return FrontIndex(
            model.name,
            bytes_max=INDEX_BYTES,
            orphans_max=1,
            default_block_tokens=config.routing.default_block_tokens,
            clock=time.monotonic,
        )

    def _fleet(self, model: ModelConfig, index: PrefixIndex) -> ModelFleet:
        """Its engines are the router's; those of the configuration come with its first message."""
        fleet = ModelFleet(structs.replace(model, engines=()), self._config.routing, index)
        fleet.config = model
        return fleet

    def _admission(self, fleet: ModelFleet) -> Admission:
        return FrontAdmission(self._config.admission, lambda: 1)

    def _set_engines(self, served: ServedModel, wanted: Sequence[FoundEngine], *, newcomers: bool = False) -> None:
        """Nothing: only the router adds and removes engines."""

    async def apply(self, config: GatewayConfig) -> None:
        await super().apply(config)
        for fleet in self.fleets:
            fleet.index.bytes_max = INDEX_BYTES
        self.update(self._state)  # of models that are new here

    def update(self, state: messages.State) -> None:
        """All models and engines, as they are now."""
        self._state = state
        known = {engine.serial for model in state.models for engine in model.engines}
        for serial in self._engines.keys() - known:
            self._forget(serial)
        by_name = {served.fleet.name: served for served in self._served()}
        for model in state.models:
            if model.name in by_name:
                self._update_model(by_name[model.name], model)

    def _update_model(self, served: ServedModel, model: ModelSummary) -> None:
        fleet = served.fleet
        index, admission = fleet.index, self.admissions[fleet.name]
        assert isinstance(index, FrontIndex)
        assert isinstance(admission, FrontAdmission)
        index.known_sizes = model.block_sizes
        admission.reported_full = model.full
        if not model.tokenizer_usable:
            served.reader.tokenizer = None
        for sent in model.engines:
            self._update_engine(fleet, sent)

    def _update_engine(self, fleet: ModelFleet, sent: EngineSummary) -> None:
        engine = self._engines.get(sent.serial)
        if engine is None:
            engine = fleet.add_engine(engine_config(sent), instance=sent.instance)
            self._engines[sent.serial] = engine
            page = self._pages.get(sent.serial)
            if page is not None:
                self.listed(page)
        engine.vllm = sent.vllm
        engine.withhold(sent.withheld)
        engine.set_state(EngineState(sent.state), sent.answer)
        engine.adapters = frozenset(sent.adapters) if sent.adapters is not None else None

    def _forget(self, serial: int) -> None:
        engine = self._engines.pop(serial)
        self._pages.pop(serial, None)
        fleet = next((fleet for fleet in self.fleets if fleet.engines.get(engine.name) is engine), None)
        if fleet is not None:
            fleet.remove_engine(engine.name)

        def forget_metrics() -> None:
            if not self._in_service(engine.name):
                self._metrics.remove_engine(engine.name)

        asyncio.get_running_loop().call_later(METRICS_KEPT_SECONDS, forget_metrics)

    def listed(self, page: messages.Listed) -> None:
        """An engine's page of models."""
        self._pages[page.serial] = page
        engine = self._engines.get(page.serial)
        if engine is not None:
            adapters = engine.adapters
            engine.models_listed(read_listed_models(page.body) if page.body is not None else None)
            engine.adapters = adapters

    def progressed(self, said: messages.Progressed) -> None:
        """Engines' metrics show that they work."""
        now = time.monotonic()
        for serial in said.serials:
            engine = self._engines.get(serial)
            if engine is not None:
                engine.progressed(now)

    def notice(self, said: messages.Notice) -> None:
        """For all requests on an engine."""
        engine = self._engines.get(said.serial)
        if engine is None:
            return
        for request in list(engine.requests):
            if said.ends:
                request.engine_ends(engine)
            else:
                request.engine_went_down(engine)
