"""The models and engines in service, and the tasks that follow each of them. Changes while requests run.

An engine that leaves takes no new request; the requests it has keep their connection, lease and counters until they
end. A change of the roster happens between two steps of the event loop, so no request sees half of it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import aiohttp
import zmq.asyncio

from spillway_gateway.access.admission import Admission
from spillway_gateway.api.inference import ServedModel
from spillway_gateway.config import EngineConfig, GatewayConfig, ModelConfig
from spillway_gateway.fleet.engines import Engine, EngineState, ModelFleet
from spillway_gateway.fleet.health import HealthPoller
from spillway_gateway.fleet.kv_events import EventFollower
from spillway_gateway.fleet.prefix_index import PrefixIndex
from spillway_gateway.metrics import GatewayMetrics
from spillway_gateway.tokens.prompt import PromptReader, load_tokenizer
from spillway_gateway.tokens.tokenizer import PromptTokenizer
from spillway_gateway.tokens.verification import Disagreement, verify_tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Clients:
    """What the tasks ask engines with; lives as long as the application."""

    session: aiohttp.ClientSession
    zmq: zmq.asyncio.Context


class Roster:
    """models: by name and by alias. fleets, models and admissions are changed in place, so holders see the present."""

    def __init__(self, config: GatewayConfig, metrics: GatewayMetrics, executor: ThreadPoolExecutor) -> None:
        self._config = config
        self._metrics = metrics
        self._executor = executor
        self._clients: Clients | None = None  # None: not started
        self._engine_tasks: dict[Engine, list[asyncio.Task[None]]] = {}
        self._verifications: dict[str, asyncio.Task[None]] = {}
        self.models: dict[str, ServedModel] = {}
        self.fleets: list[ModelFleet] = []
        self.admissions: dict[str, Admission] = {}
        for model in config.models:
            self._add_model(model, load_tokenizer(model.name, model.tokenizer))

    # -- tasks -------------------------------------------------------------------------------------------------------

    def start(self, clients: Clients) -> None:
        self._clients = clients
        for served in self._served():
            for engine in served.fleet.engines.values():
                self._follow(served, engine)
            self._verify_anew(served)

    async def stop(self) -> None:
        tasks = [task for tasks in self._engine_tasks.values() for task in tasks] + list(self._verifications.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _follow(self, served: ServedModel, engine: Engine) -> None:
        if self._clients is None:
            return
        poller = HealthPoller(engine, self._clients.session, self._config.health)
        tasks = [asyncio.create_task(guarded(poller.run(), f"health of {engine.name}"))]
        if engine.config.kv_events is not None:
            follower = EventFollower(engine, served.fleet.index, self._metrics, self._clients.zmq)
            tasks.append(asyncio.create_task(guarded(follower.run(), f"events of {engine.name}")))
        self._engine_tasks[engine] = tasks

    def _verify_anew(self, served: ServedModel) -> None:
        name = served.fleet.name
        task = self._verifications.pop(name, None)
        if task is not None:
            task.cancel()
        if self._clients is not None and served.reader.tokenizer is not None:
            self._verifications[name] = asyncio.create_task(self._verify(served, self._clients.session))

    async def _verify(self, served: ServedModel, session: aiohttp.ClientSession) -> None:
        """Compare tokens with every engine that becomes ready."""
        ready: asyncio.Queue[Engine] = asyncio.Queue()
        engines = list(served.fleet.engines.values())
        for engine in engines:
            engine.on_state.append(ready.put_nowait)
            ready.put_nowait(engine)
        try:
            while True:
                engine = await ready.get()
                tokenizer = served.reader.tokenizer
                if engine.state is EngineState.READY and tokenizer is not None:
                    await self._compare(served, tokenizer, engine, session)
        finally:
            for engine in engines:
                engine.on_state.remove(ready.put_nowait)

    async def _compare(
        self, served: ServedModel, tokenizer: PromptTokenizer, engine: Engine, session: aiohttp.ClientSession
    ) -> None:
        name = served.fleet.name
        try:
            if await verify_tokenizer(tokenizer, engine, session):
                logger.info("model %s: tokenizer agrees with engine %s", name, engine.name)
            else:
                logger.warning("model %s: engine %s has no /tokenize to compare with", name, engine.name)
        except Disagreement as error:
            served.reader.tokenizer = None
            self._metrics.tokenizer_usable.labels(name).set(0)
            logger.error(
                "model %s: the tokenizer disagrees with engine %s (%s); prompts are matched by text blocks. "
                "Point models.tokenizer at the folder that the engines serve.",
                name,
                engine.name,
                error,
            )

    # -- changes -----------------------------------------------------------------------------------------------------

    async def apply(self, config: GatewayConfig) -> None:
        """Put a checked configuration's models, engines and limits into effect."""
        before = {fleet.name: fleet.config for fleet in self.fleets}
        # The slow part first, off the loop: nothing has changed while it runs.
        tokenizers = {
            model.name: await asyncio.to_thread(load_tokenizer, model.name, model.tokenizer)
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
        index = PrefixIndex(
            model.name,
            bytes_max=max(1, config.index.bytes_max // len(config.models)),
            orphans_max=config.index.orphans_max,
            default_block_tokens=config.routing.default_block_tokens,
            clock=time.monotonic,
        )
        fleet = ModelFleet(model, config.routing, index, breaker=config.breaker)
        if model.tokenizer is not None:
            self._metrics.tokenizer_usable.labels(model.name).set(tokenizer is not None)
        served = ServedModel(fleet, PromptReader(model.name, index, tokenizer, self._executor, config.limits))
        self.fleets.append(fleet)
        for name in (model.name, *model.aliases):
            self.models[name] = served
        admission = self.admissions[model.name] = self._admission(fleet)
        for engine in fleet.engines.values():
            engine.on_state.append(lambda _: admission.wake())
            self._follow(served, engine)
        self._verify_anew(served)

    def _admission(self, fleet: ModelFleet) -> Admission:
        """Room in proportion to the ready engines; without any, requests pass and are told so by routing."""
        each = self._config.admission.requests_per_engine_max
        engines = fleet.engines.values()
        return Admission(
            self._config.admission, lambda: each * (sum(engine.routable for engine in engines) or len(engines))
        )

    def _remove_model(self, name: str) -> None:
        (fleet,) = (fleet for fleet in self.fleets if fleet.name == name)
        self.fleets.remove(fleet)
        for engine_name in list(fleet.engines):
            self._remove_engine(fleet, engine_name)
        del self.admissions[name]
        task = self._verifications.pop(name, None)
        if task is not None:
            task.cancel()

    def _change_model(self, model: ModelConfig, tokenizers: dict[str, PromptTokenizer | None]) -> None:
        served = next(served for served in self._served() if served.fleet.name == model.name)
        fleet = served.fleet
        served.reader.limits = self._config.limits
        wanted = {engine.name: engine for engine in model.engines}
        gone = [name for name, engine in fleet.engines.items() if wanted.get(name) != engine.config]
        for name in gone:
            self._remove_engine(fleet, name)
        added = [engine for engine in model.engines if engine.name not in fleet.engines]
        for engine in added:
            self._add_engine(served, engine)
        fleet.config = model
        if model.name in tokenizers:
            served.reader.tokenizer = tokenizers[model.name]
            self._metrics.tokenizer_usable.labels(model.name).set(served.reader.tokenizer is not None)
        if gone or added or model.name in tokenizers:
            self._verify_anew(served)

    def _add_engine(self, served: ServedModel, config: EngineConfig) -> None:
        engine = served.fleet.add_engine(config)
        admission = self.admissions[served.fleet.name]
        engine.on_state.append(lambda _: admission.wake())
        self._follow(served, engine)
        logger.info("model %s: engine %s added (%s)", served.fleet.name, config.name, engine.host_header.decode())

    def _remove_engine(self, fleet: ModelFleet, name: str) -> None:
        engine = fleet.engines[name]
        for task in self._engine_tasks.pop(engine, []):
            task.cancel()  # before the index forgets it: its events end here
        fleet.remove_engine(name)
        logger.info("model %s: engine %s removed, %d requests run on", fleet.name, name, engine.running_requests)

    def _name_models(self, config: GatewayConfig) -> None:
        by_name = {served.fleet.name: served for served in self._served()}
        self.models.clear()
        for model in config.models:
            for name in (model.name, *model.aliases):
                self.models[name] = by_name[model.name]

    def _served(self) -> list[ServedModel]:
        return list({id(served): served for served in self.models.values()}.values())


async def guarded(work: Coroutine[object, object, None], name: str) -> None:
    """A background task that dies of a defect is started over by nobody; at least it says so."""
    try:
        await work
    except Exception:
        logger.exception("background task stopped: %s", name)
        raise
