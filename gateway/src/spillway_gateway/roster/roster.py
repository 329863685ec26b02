"""The models and engines in service, and their tasks. Changes while requests run.

A model's engines are listed in the configuration or found by its source. A removed engine takes no new request;
running requests keep their connection, lease and counters until they end. A change is applied without an await, so no
request sees half of it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from spillway_gateway.access.admission import Admission
from spillway_gateway.background import supervised
from spillway_gateway.config.discovery import DiscoveryConfig
from spillway_gateway.config.ranks import ranks_of
from spillway_gateway.config.settings import GatewayConfig, ModelConfig
from spillway_gateway.discovery.found import FoundEngine, SourceStatus
from spillway_gateway.discovery.sources import describe, follow
from spillway_gateway.fleet.model_fleet import ModelFleet
from spillway_gateway.fleet.prefix_index import PrefixIndex
from spillway_gateway.metrics import GatewayMetrics
from spillway_gateway.roster.engine_tasks import Clients, EngineTasks
from spillway_gateway.roster.served import ServedModel
from spillway_gateway.roster.token_check import TokenCheck
from spillway_gateway.tokens.fair_threads import FairThreads, run_on_new_thread
from spillway_gateway.tokens.prompt import PromptReader, load_tokenizer
from spillway_gateway.tokens.tokenizer import PromptTokenizer
from spillway_gateway.tokens.word_tables import WordTables

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Following:
    """The running source of one model's engines."""

    config: DiscoveryConfig
    status: SourceStatus
    task: asyncio.Task[None]


class Roster:
    """On the event loop. models: by name and by alias. sources: by model, if engines are discovered. fleets, models,
    admissions and sources are changed in place, so their holders see the current state."""

    def __init__(self, config: GatewayConfig, metrics: GatewayMetrics, threads: FairThreads) -> None:
        self._config = config
        self._metrics = metrics
        self._threads = threads
        self._tables = WordTables(threads)
        self._clients: Clients | None = None  # None: not started
        self._engine_tasks: EngineTasks | None = None
        self._following: dict[str, _Following] = {}
        self._checks: dict[str, tuple[TokenCheck, asyncio.Task[None]]] = {}
        self.models: dict[str, ServedModel] = {}
        self.fleets: list[ModelFleet] = []
        self.admissions: dict[str, Admission] = {}
        self.sources: dict[str, SourceStatus] = {}
        for model in config.models:
            self._add_model(model, load_tokenizer(model.name, model.tokenizer))

    def start(self, clients: Clients) -> None:
        """Start the tasks of all models and engines."""
        self._clients = clients
        self._engine_tasks = EngineTasks(clients, self._metrics, self._in_service)
        for served in self._served():
            for engine in served.fleet.engines.values():
                self._engine_tasks.follow(engine, served.fleet.index, self._config.health)
            self._restart_token_check(served)
            self._follow_source(served)

    async def stop(self) -> None:
        """Cancel all tasks and wait for them."""
        tasks = [following.task for following in self._following.values()] + [task for _, task in self._checks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._engine_tasks is not None:
            await self._engine_tasks.stop()

    def _in_service(self, engine: str) -> bool:
        return any(engine in fleet.engines for fleet in self.fleets)

    # -- sources and checks ------------------------------------------------------------------------------------------

    def _follow_source(self, served: ServedModel) -> None:
        """Start the source in the model's settings, unless it is running."""
        name, config = served.fleet.name, served.fleet.config.discovery
        following = self._following.get(name)
        if following is not None and following.config != config:
            following.task.cancel()
            del self._following[name], self.sources[name]
            following = None
        if config is None or following is not None or self._clients is None:
            return
        status = self.sources[name] = SourceStatus(describe(config))

        def publish(engines: tuple[FoundEngine, ...]) -> None:
            # Engines of the first update may be of any age; those of later ones have just been started.
            wanted = [replace(found, config=each) for found in engines for each in ranks_of(found.config)]
            self._set_engines(served, wanted, newcomers=status.updates_total > 1)

        task = asyncio.create_task(supervised(lambda: follow(config, status, publish), f"engines of {name}"))
        self._following[name] = _Following(config, status, task)

    def _restart_token_check(self, served: ServedModel) -> None:
        name = served.fleet.name
        self._stop_check(name)
        if self._clients is None or served.reader.tokenizer is None:
            return
        check = TokenCheck(name, served.reader, self._clients.session, self._metrics)
        for engine in served.fleet.engines.values():
            check.add(engine)
        self._checks[name] = check, asyncio.create_task(supervised(check.run, f"tokenizer check of {name}"))

    def _stop_check(self, name: str) -> None:
        if name in self._checks:
            _, task = self._checks.pop(name)
            task.cancel()

    # -- reload ------------------------------------------------------------------------------------------------------

    async def apply(self, config: GatewayConfig) -> None:
        """Apply the models, engines and limits of a validated configuration."""
        before = {fleet.name: fleet.config for fleet in self.fleets}
        # The slow part first, on a thread: nothing has changed while it runs.
        tokenizers = {
            model.name: await run_on_new_thread(load_tokenizer, model.name, model.tokenizer)
            for model in config.models
            if model.name not in before or before[model.name].tokenizer != model.tokenizer
        }
        self._config = config
        for name in before.keys() - {model.name for model in config.models}:
            self._remove_model(name)
        for model in config.models:
            if model.name in before:
                self._change_model(model, tokenizers)
            else:
                self._add_model(model, tokenizers[model.name])
        self._name_models(config)
        for fleet in self.fleets:
            fleet.index.bytes_max = max(1, config.index.bytes_max // len(config.models))

    def _add_model(self, model: ModelConfig, tokenizer: PromptTokenizer | None) -> None:
        config = self._config
        index = self._index(model)
        fleet = self._fleet(model, index)
        if model.tokenizer is not None:
            self._metrics.tokenizer_usable.labels(model.name).set(tokenizer is not None)
        reader = PromptReader(
            model.name,
            index,
            tokenizer,
            self._threads,
            config.limits,
            tokens_max=lambda: fleet.prompt_tokens_max,
            keeps_tokens=lambda: self._config.admission.promotion_hints and admission.is_full,
            tables=self._tables,
        )
        served = ServedModel(fleet, reader)
        self.fleets.append(fleet)
        for name in model.names:
            self.models[name] = served
        admission = self.admissions[model.name] = self._admission(fleet)
        for engine in fleet.engines.values():
            engine.on_state.append(lambda _: admission.wake())
            if self._engine_tasks is not None:
                self._engine_tasks.follow(engine, index, config.health)
        self._restart_token_check(served)
        self._follow_source(served)

    def _index(self, model: ModelConfig) -> PrefixIndex:
        config = self._config
        return PrefixIndex(
            model.name,
            bytes_max=max(1, config.index.bytes_max // len(config.models)),
            orphans_max=config.index.orphans_max,
            default_block_tokens=config.routing.default_block_tokens,
            clock=time.monotonic,
        )

    def _fleet(self, model: ModelConfig, index: PrefixIndex) -> ModelFleet:
        return ModelFleet(model, self._config.routing, index, breaker=self._config.breaker)

    def _admission(self, fleet: ModelFleet) -> Admission:
        """Capacity in proportion to the ready engines; without any, requests wait for one where the model is scaled to
        zero, and else pass, so that routing refuses them."""
        each = self._config.admission.requests_per_engine_max
        engines = fleet.engines.values()

        def capacity() -> int:
            ready = sum(engine.routable for engine in engines)
            return each * (ready if ready or fleet.config.wake_seconds is not None else len(engines) or 1)

        return Admission(self._config.admission, capacity, lambda: fleet.config.wake_seconds)

    def _remove_model(self, name: str) -> None:
        (served,) = (served for served in self._served() if served.fleet.name == name)
        fleet = served.fleet
        following = self._following.pop(name, None)
        if following is not None:
            following.task.cancel()
            del self.sources[name]
        self._stop_check(name)
        self._set_engines(served, ())
        self.fleets.remove(fleet)
        del self.admissions[name]

    def _change_model(self, model: ModelConfig, tokenizers: dict[str, PromptTokenizer | None]) -> None:
        served = next(served for served in self._served() if served.fleet.name == model.name)
        served.reader.limits = self._config.limits
        served.fleet.config = model
        if model.name in tokenizers:
            served.reader.tokenizer = tokenizers[model.name]
            self._metrics.tokenizer_usable.labels(model.name).set(served.reader.tokenizer is not None)
            self._restart_token_check(served)
        self._follow_source(served)
        if model.discovery is None:  # otherwise the current engines stay until the source's first update
            self._set_engines(served, [FoundEngine(each) for engine in model.engines for each in ranks_of(engine)])

    def _set_engines(self, served: ServedModel, wanted: Sequence[FoundEngine], *, newcomers: bool = False) -> None:
        """Add and remove engines to match those wanted. newcomers: engines that are added have just been started."""
        fleet = served.fleet
        by_name = {found.config.name: found for found in wanted}
        for name, engine in list(fleet.engines.items()):
            found = by_name.get(name)
            if found is None or (found.config, found.instance) != (engine.config, engine.instance):
                self._remove_engine(fleet, name)
        for found in wanted:
            known = fleet.engines.get(found.config.name)
            if known is None:
                self._add_engine(served, found, newcomer=newcomers)
            elif known.withheld != found.withheld:
                logger.info("model %s: engine %s: %s", fleet.name, known.name, found.withheld or "may take requests")
                known.withhold(found.withheld, terminating=found.terminating)

    def _add_engine(self, served: ServedModel, found: FoundEngine, *, newcomer: bool) -> None:
        fleet = served.fleet
        engine = fleet.add_engine(found.config, instance=found.instance, newcomer=newcomer)
        engine.withhold(found.withheld, terminating=found.terminating)
        admission = self.admissions[fleet.name]
        engine.on_state.append(lambda _: admission.wake())
        if fleet.name in self._checks:
            self._checks[fleet.name][0].add(engine)
        if self._engine_tasks is not None:
            self._engine_tasks.follow(engine, fleet.index, self._config.health)
        logger.info("model %s: engine %s added (%s)", fleet.name, engine.name, engine.host_header.decode())

    def _remove_engine(self, fleet: ModelFleet, name: str) -> None:
        engine = fleet.remove_engine(name)
        discovery = fleet.config.discovery
        if discovery is not None and discovery.kubernetes is not None:
            engine.terminating = True  # EndpointSlices list a pod until it is deleted; DNS drops one that is not ready
        if fleet.name in self._checks:
            self._checks[fleet.name][0].remove(engine)
        if self._engine_tasks is not None:
            self._engine_tasks.depart(engine, fleet.index)
        else:
            for _ in fleet.index.retire_engine(name):
                pass
        logger.info("model %s: engine %s removed with %d running requests", fleet.name, name, engine.running_requests)

    def _name_models(self, config: GatewayConfig) -> None:
        by_name = {served.fleet.name: served for served in self._served()}
        self.models.clear()
        for model in config.models:
            for name in model.names:
                self.models[name] = by_name[model.name]

    def _served(self) -> list[ServedModel]:
        return list({id(served): served for served in self.models.values()}.values())
