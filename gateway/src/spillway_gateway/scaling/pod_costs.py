"""Writes what removing each pod would cost to the pods of Deployments, so that a scale-down removes the coldest.

Every gateway writes, and all find about the same costs (scaling/deletion_costs.py). A write that fails is tried again
later; no request depends on one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from spillway_gateway.background import on_daemon_thread
from spillway_gateway.config.discovery import KubernetesDiscovery
from spillway_gateway.discovery.found import SourceFailed
from spillway_gateway.fleet.engine import Engine
from spillway_gateway.fleet.model_fleet import ModelFleet
from spillway_gateway.scaling.deletion_costs import PodWarmth, Written, deletion_costs, due_writes

logger = logging.getLogger(__name__)

ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
LOOK_SECONDS = 5.0
WRITES_MAX = 8  # in one look
SESSION_SECONDS = 900.0  # after its last request, for which a session counts as alive

Annotate = Callable[[KubernetesDiscovery, str, Mapping[str, str]], Awaitable[bool]]


async def annotate(config: KubernetesDiscovery, pod: str, annotations: Mapping[str, str]) -> bool:
    """Call annotate_pod(), which blocks, on a thread."""

    def write() -> bool:
        # Imported here: it takes long enough to delay every stream of the gateway.
        from spillway_gateway.discovery.kubernetes_api import annotate_pod  # noqa: PLC0415

        return annotate_pod(config, pod, annotations)

    return await on_daemon_thread(write)


class PodCosts:
    """Writer of the costs, on the event loop. fleets: those in service. costs: of each model's pods, as last found.
    outcomes: of writes, by model: written, gone (there is no such pod) or failed."""

    def __init__(
        self,
        fleets: Sequence[ModelFleet],
        write: Annotate = annotate,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._fleets = fleets
        self._write = write
        self._clock = clock
        self._pause = pause
        self._written: dict[str, dict[str, Written]] = {}
        self._failed: dict[tuple[str, str], float] = {}  # (model, pod) -> when a write failed last
        self._failing: dict[str, str] = {}  # by model: the reason that was logged last
        self.costs: dict[str, dict[str, int]] = {}
        self.outcomes: Counter[tuple[str, str]] = Counter()

    async def run(self) -> None:
        """Write the costs until cancelled."""
        while True:
            await self._pause(LOOK_SECONDS)
            for fleet in list(self._fleets):
                discovery = fleet.config.discovery
                found = discovery.kubernetes if discovery is not None else None
                if found is not None and found.pod_deletion_cost_seconds is not None:
                    await self.look(fleet, found, found.pod_deletion_cost_seconds)
            served = {fleet.name for fleet in self._fleets}
            for name in self.costs.keys() - served:
                del self.costs[name]

    async def look(self, fleet: ModelFleet, config: KubernetesDiscovery, seconds_min: float) -> None:
        """Find the costs of a model's pods, and write those that have changed."""
        engines = [engine for engine in fleet.engines.values() if not engine.terminating]
        costs = self.costs[fleet.name] = deletion_costs(await self._warmth(fleet, engines))
        instances = {engine.process: engine.instance for engine in engines}
        now = self._clock()
        written = self._written.setdefault(fleet.name, {})
        for name in written.keys() - costs.keys():
            del written[name]
        self._failed = {key: at for key, at in self._failed.items() if now - at < seconds_min}
        due = due_writes(costs, written, now=now, seconds_min=seconds_min, instances=instances)
        for name in [each for each in due if (fleet.name, each) not in self._failed][:WRITES_MAX]:
            outcome = await self._write_one(fleet.name, config, name, costs[name])
            self.outcomes[fleet.name, outcome] += 1
            if outcome == "written":
                written[name] = Written(costs[name], self._clock(), instances[name])
            else:
                self._failed[fleet.name, name] = self._clock()

    async def _warmth(self, fleet: ModelFleet, engines: Sequence[Engine]) -> dict[str, PodWarmth]:
        pods = {engine.name: engine.process for engine in engines}
        alone: dict[str, int] = {}
        for counted in fleet.index.held_alone(pods):
            if counted is None:
                await asyncio.sleep(0)
            else:
                alone = counted
        alive = fleet.sessions.alive(self._clock() - SESSION_SECONDS)
        sessions: Counter[str] = Counter()
        requests: Counter[str] = Counter()
        for engine in engines:
            sessions[engine.process] += alive[engine.name]
            requests[engine.process] += engine.running_requests + engine.foreign.requests
        return {pod: PodWarmth(sessions[pod], alone.get(pod, 0), requests[pod]) for pod in pods.values()}

    async def _write_one(self, model: str, config: KubernetesDiscovery, pod: str, cost: int) -> str:
        try:
            found = await self._write(config, pod, {ANNOTATION: str(cost)})
        except SourceFailed as error:
            if self._failing.get(model) != error.reason:
                self._failing[model] = error.reason
                logger.warning("model %s: the deletion cost of pod %s is not written: %s", model, pod, error)
            return "failed"
        self._failing.pop(model, None)
        return "written" if found else "gone"

    def families(self) -> Iterable[GaugeMetricFamily | CounterMetricFamily]:
        """The metric families of what was found and written."""
        cost = GaugeMetricFamily(
            "spillway_gateway_pod_deletion_cost",
            "Cost of removing an engine's pod, as last found: of each model the pod with the least goes first.",
            labels=("model", "engine"),
        )
        writes = CounterMetricFamily(
            "spillway_gateway_pod_deletion_cost_writes",
            "Writes of pods' deletion costs, by outcome.",
            labels=("model", "outcome"),
        )
        for model, costs in self.costs.items():
            for pod, each in costs.items():
                cost.add_metric((model, pod), each)
        for (model, outcome), count in self.outcomes.items():
            writes.add_metric((model, outcome), count)
        return cost, writes
