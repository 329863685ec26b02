"""The engines of each model, as this process follows them: listed in the configuration, or found by a source; with
their tasks, and the queue in front of them.

A removed engine takes no new request; running requests keep their connection, attempt and counters until they end. Of
many engines some change in each iteration of the event loop, new ones first, so that there is always one to ask.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from spillway_gateway.access.admission import Admission
from spillway_gateway.background import supervised
from spillway_gateway.config.discovery import DiscoveryConfig
from spillway_gateway.config.ranks import ranks_of
from spillway_gateway.config.settings import GatewayConfig, ModelConfig
from spillway_gateway.discovery.found import FoundEngine, SourceStatus
from spillway_gateway.discovery.sources import describe, follow
from spillway_gateway.fleet.engine import Engine, may_return_for
from spillway_gateway.fleet.model_fleet import ModelFleet
from spillway_gateway.fleet.prefix_index import PrefixIndex
from spillway_gateway.metrics import GatewayMetrics
from spillway_gateway.roster.engine_tasks import Clients, EngineTasks
from spillway_gateway.roster.served import ServedModel
from spillway_gateway.roster.token_check import TokenCheck
from spillway_gateway.tokens.prompt import BlockSizes

logger = logging.getLogger(__name__)

ENGINES_IN_ONE_ITERATION = 8  # each takes 0.2 to 0.5 ms, with the start or end of its tasks


@dataclass(frozen=True, slots=True)
class _Following:
    """The running source of one model's engines."""

    config: DiscoveryConfig
    status: SourceStatus
    task: asyncio.Task[None]


class LocalEngines:
    """ModelEngines of a process that follows them. On the event loop. admissions: the queues by model. sources: by
    model, if engines are discovered. Both are changed in place, so their holders see the current state."""

    def __init__(self, config: GatewayConfig, metrics: GatewayMetrics) -> None:
        self._config = config
        self._metrics = metrics
        self._clients: Clients | None = None  # None: not started
        self._tasks: EngineTasks | None = None
        self._served: dict[str, ServedModel] = {}
        self._following: dict[str, _Following] = {}
        self._checks: dict[str, tuple[TokenCheck, asyncio.Task[None]]] = {}
        self._coming: dict[ModelFleet, Iterator[None]] = {}  # that have begun
        self.admissions: dict[str, Admission] = {}
        self.sources: dict[str, SourceStatus] = {}

    # -- roster.model_engines.ModelEngines

    def configure(self, config: GatewayConfig) -> None:
        self._config = config
        for served in self._served.values():
            served.fleet.index.bound(self._index_bytes)

    @property
    def _index_bytes(self) -> int:
        """The bound of each model's index."""
        return max(1, self._config.index.bytes_max // len(self._config.models))

    def new_fleet(self, model: ModelConfig) -> ModelFleet:
        config = self._config
        index = PrefixIndex(
            model.name,
            bytes_max=self._index_bytes,
            orphans_max=config.index.orphans_max,
            default_block_tokens=config.routing.default_block_tokens,
            clock=time.monotonic,
        )
        return ModelFleet(model, config.routing, index, breaker=config.breaker, disaggregation=config.disaggregation)

    def block_sizes(self, fleet: ModelFleet) -> BlockSizes:
        return fleet.index

    def model_added(self, served: ServedModel) -> None:
        fleet = served.fleet
        self._served[fleet.name] = served
        self.admissions[fleet.name] = self._admission(fleet)
        for engine in fleet.engines.values():
            self._serve(fleet, engine)
        self._restart_token_check(served)
        self._follow_source(served)

    def model_changed(self, served: ServedModel, *, new_tokenizer: bool) -> None:
        if new_tokenizer:
            self._restart_token_check(served)
        self._follow_source(served)
        model = served.fleet.config
        if model.discovery is None:  # otherwise the current engines stay until the source's first update
            self._set_engines(served, [FoundEngine(each) for engine in model.engines for each in ranks_of(engine)])

    def model_removed(self, served: ServedModel) -> None:
        name = served.fleet.name
        following = self._following.pop(name, None)
        if following is not None:
            following.task.cancel()
            del self.sources[name]
        self._stop_check(name)
        self._set_engines(served, ())
        del self._served[name]
        del self.admissions[name]

    def is_full(self, model: str) -> bool:
        admission = self.admissions.get(model)
        return admission is not None and admission.is_full

    def start(self, clients: Clients) -> None:
        self._clients = clients
        self._tasks = EngineTasks(clients, self._metrics, self._in_service)
        for served in self._served.values():
            for engine in served.fleet.engines.values():
                self._tasks.follow(engine, served.fleet.index, self._config.health)
            self._restart_token_check(served)
            self._follow_source(served)

    async def stop(self) -> None:
        self._coming.clear()  # an engine that came now would start tasks that nothing ends
        tasks = [following.task for following in self._following.values()] + [task for _, task in self._checks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._tasks is not None:
            await self._tasks.stop()

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

    # -- engines -----------------------------------------------------------------------------------------------------

    def _in_service(self, engine: str) -> bool:
        return any(engine in served.fleet.engines for served in self._served.values())

    def _admission(self, fleet: ModelFleet) -> Admission:
        """Capacity in proportion to the ready engines. Without any, requests wait for one if the model is scaled to
        zero, or has lost its engines a moment ago; else they pass, so that routing refuses them."""
        each, return_seconds_max = self._config.admission.requests_per_engine_max, self._config.health.return_seconds

        def return_seconds() -> float:
            return may_return_for(fleet.engines.values(), return_seconds_max)

        def capacity() -> int:
            ready = fleet.ready_engines
            if ready or fleet.config.wake_seconds is not None or return_seconds():
                return each * ready
            return each * (len(fleet.engines) or 1)

        return Admission(self._config.admission, capacity, lambda: fleet.config.wake_seconds, return_seconds)

    def _set_engines(self, served: ServedModel, wanted: Sequence[FoundEngine], *, newcomers: bool = False) -> None:
        """Add and remove engines to match those wanted. newcomers: engines that are added have just been started."""
        self._coming[served.fleet] = steps = self._change_engines(served, wanted, newcomers=newcomers)
        self._go_on(served.fleet, steps)

    def _go_on(self, fleet: ModelFleet, steps: Iterator[None]) -> None:
        """Take ENGINES_IN_ONE_ITERATION steps now, and the rest later unless other engines are wanted by then."""
        if self._coming.get(fleet) is not steps:
            return
        if sum(1 for _ in itertools.islice(steps, ENGINES_IN_ONE_ITERATION)) < ENGINES_IN_ONE_ITERATION:
            del self._coming[fleet]
        else:
            asyncio.get_running_loop().call_soon(self._go_on, fleet, steps)

    def _change_engines(self, served: ServedModel, wanted: Sequence[FoundEngine], *, newcomers: bool) -> Iterator[None]:
        """Yields after each change."""
        fleet = served.fleet
        by_name = {found.config.name: found for found in wanted}
        for found in by_name.values():
            known = fleet.engines.get(found.config.name)
            if known is not None and (found.config, found.instance) != (known.config, known.instance):
                self._remove_engine(fleet, known.name)
                known = None
            if known is None:
                self._add_engine(served, found, newcomer=newcomers)
                yield
            elif known.withheld != found.withheld:
                logger.info("model %s: engine %s: %s", fleet.name, known.name, found.withheld or "may take requests")
                known.withhold(found.withheld, terminating=found.terminating)
                yield
        for name in fleet.engines.keys() - by_name.keys():
            self._remove_engine(fleet, name)
            yield

    def _add_engine(self, served: ServedModel, found: FoundEngine, *, newcomer: bool) -> None:
        fleet = served.fleet
        engine = fleet.add_engine(found.config, instance=found.instance, newcomer=newcomer)
        engine.withhold(found.withheld, terminating=found.terminating)
        self._serve(fleet, engine)
        if fleet.name in self._checks:
            self._checks[fleet.name][0].add(engine)
        logger.info("model %s: engine %s added (%s)", fleet.name, engine.name, engine.host_header.decode())

    def _serve(self, fleet: ModelFleet, engine: Engine) -> None:
        admission = self.admissions[fleet.name]
        engine.on_state.append(lambda _: admission.wake())
        if self._tasks is not None:
            self._tasks.follow(engine, fleet.index, self._config.health)

    def _remove_engine(self, fleet: ModelFleet, name: str) -> None:
        engine = fleet.remove_engine(name)
        discovery = fleet.config.discovery
        if discovery is not None and discovery.kubernetes is not None:
            engine.terminating = True  # EndpointSlices list a pod until it is deleted; DNS drops one that is not ready
        if fleet.name in self._checks:
            self._checks[fleet.name][0].remove(engine)
        if self._tasks is not None:
            self._tasks.depart(engine, fleet.index)
        else:
            for _ in fleet.index.retire_engine(name):
                pass
        logger.info("model %s: engine %s removed with %d running requests", fleet.name, name, engine.running_requests)
