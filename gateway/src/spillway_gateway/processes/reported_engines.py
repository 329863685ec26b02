"""The engines of each model in a front: as the router process last reported them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from msgspec import structs

from spillway_gateway.config.settings import GatewayConfig, ModelConfig
from spillway_gateway.fleet.engine import Engine, EngineState
from spillway_gateway.fleet.listed_models import read_listed_models
from spillway_gateway.fleet.model_fleet import ModelFleet
from spillway_gateway.fleet.prefix_index import PrefixIndex
from spillway_gateway.processes import messages
from spillway_gateway.processes.messages import EngineSummary, ModelSummary
from spillway_gateway.processes.state_publisher import engine_config
from spillway_gateway.roster.engine_tasks import METRICS_KEPT_SECONDS, Clients
from spillway_gateway.roster.served import ServedModel
from spillway_gateway.tokens.prompt import BlockSizes

INDEX_BYTES = 1  # no block is ever put into a front's index


class ReportedSizes:
    """The block sizes of one model, those of most engines first. default: until they are reported."""

    def __init__(self, default: int) -> None:
        self.block_sizes: tuple[int, ...] = (default,)


class ReportedEngines:
    """ModelEngines of a front. On the event loop. forget_metrics: drops an engine's series."""

    def __init__(self, config: GatewayConfig, forget_metrics: Callable[[str], None]) -> None:
        self._config = config
        self._forget_metrics = forget_metrics
        self._served: dict[str, ServedModel] = {}
        self._sizes: dict[str, ReportedSizes] = {}
        self._state: dict[str, ModelSummary] = {}  # by model
        self._pages: dict[int, messages.Listed] = {}
        self._engines: dict[int, Engine] = {}  # by the router's serial

    # -- roster.model_engines.ModelEngines

    def configure(self, config: GatewayConfig) -> None:
        self._config = config

    def new_fleet(self, model: ModelConfig) -> ModelFleet:
        """Make a fleet without the engines of the configuration: all come from the router."""
        routing = self._config.routing
        self._sizes[model.name] = ReportedSizes(routing.default_block_tokens)
        index = PrefixIndex(
            model.name,
            bytes_max=INDEX_BYTES,
            orphans_max=1,
            default_block_tokens=routing.default_block_tokens,
            clock=time.monotonic,
        )
        fleet = ModelFleet(
            structs.replace(model, engines=()), routing, index, disaggregation=self._config.disaggregation
        )
        fleet.configure(model)
        return fleet

    def block_sizes(self, fleet: ModelFleet) -> BlockSizes:
        return self._sizes[fleet.name]

    def model_added(self, served: ServedModel) -> None:
        self._served[served.fleet.name] = served
        self._update_model(served)

    def model_changed(self, served: ServedModel, *, new_tokenizer: bool) -> None:
        self._update_model(served)

    def model_removed(self, served: ServedModel) -> None:
        for serial, engine in list(self._engines.items()):
            if served.fleet.engines.get(engine.name) is engine:  # which a model of this name may soon have again
                self._forget(serial)
        del self._served[served.fleet.name], self._sizes[served.fleet.name]

    def is_full(self, model: str) -> bool:
        summary = self._state.get(model)
        return summary is not None and summary.full

    def start(self, clients: Clients) -> None:
        """Do nothing: the router follows engines and sources."""

    async def stop(self) -> None:
        """Do nothing: nothing runs."""

    # -- what the router reports

    def update(self, state: messages.State) -> None:
        """All models and engines, as they are now."""
        self._state = {model.name: model for model in state.models}
        known = {engine.serial for model in state.models for engine in model.engines}
        for serial in self._engines.keys() - known:
            self._forget(serial)
        for serial in self._pages.keys() - known:
            del self._pages[serial]
        for served in self._served.values():
            self._update_model(served)

    def _update_model(self, served: ServedModel) -> None:
        fleet = served.fleet
        model = self._state.get(fleet.name)
        if model is None:
            return
        self._sizes[fleet.name].block_sizes = model.block_sizes
        if not model.tokenizer_usable:
            served.reader.use(None)
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
        engine.set_version(sent.vllm)
        engine.withhold(sent.withheld)
        engine.set_state(EngineState(sent.state), sent.answer)
        engine.adapters = frozenset(sent.adapters) if sent.adapters is not None else None

    def _forget(self, serial: int) -> None:
        engine = self._engines.pop(serial)
        for served in self._served.values():
            if served.fleet.engines.get(engine.name) is engine:
                served.fleet.remove_engine(engine.name)
                for _ in served.fleet.index.retire_engine(engine.name):
                    pass
        asyncio.get_running_loop().call_later(METRICS_KEPT_SECONDS, self._forget_series, engine.name)

    def _forget_series(self, engine: str) -> None:
        if not any(engine in served.fleet.engines for served in self._served.values()):
            self._forget_metrics(engine)

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
        """Notify all requests on an engine."""
        engine = self._engines.get(said.serial)
        if engine is None:
            return
        for request in list(engine.requests):
            if said.ends:
                request.engine_ends(engine)
            else:
                request.engine_went_down(engine)
