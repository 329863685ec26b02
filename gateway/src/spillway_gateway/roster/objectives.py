"""Follows the InferenceObjectives of the engines' namespaces: named priorities that requests ask for.

They are listed again and again, as they change with deployments, and a change that is seen a few seconds later costs
nothing. Those known stay while the API server is away. A cluster without the Inference Extension has none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

from spillway_gateway.background import on_daemon_thread
from spillway_gateway.config.discovery import KubernetesDiscovery
from spillway_gateway.discovery.found import SourceFailed
from spillway_gateway.fleet.model_fleet import ModelFleet

logger = logging.getLogger(__name__)

LOOK_SECONDS = 10.0

ListObjectives = Callable[[KubernetesDiscovery], Awaitable[Mapping[str, int]]]


async def listed(config: KubernetesDiscovery) -> Mapping[str, int]:
    """Call list_objectives(), which blocks, on a thread."""

    def list_now() -> Mapping[str, int]:
        # Imported here: it takes long enough to delay every stream of the gateway.
        from spillway_gateway.discovery.kubernetes_api import list_objectives  # noqa: PLC0415

        return list_objectives(config)

    return await on_daemon_thread(list_now)


class Objectives:
    """Follower of InferenceObjectives, on the event loop.

    Args:
        fleets: those in service.
        list_once: the priorities of a namespace's objectives, by their name. Raises SourceFailed.
        pause: waits for the given seconds.
    """

    def __init__(
        self,
        fleets: Sequence[ModelFleet],
        list_once: ListObjectives = listed,
        pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._fleets = fleets
        self._list_once = list_once
        self._pause = pause
        self._known: dict[str | None, Mapping[str, int]] = {}
        self._failing: dict[str | None, str] = {}  # by namespace: the reason that was logged last

    def priority(self, fleet: ModelFleet, name: str) -> int | None:
        """The priority of an objective beside these engines; None if there is none of that name."""
        config = _kubernetes(fleet)
        return None if config is None else self._known.get(config.namespace, {}).get(name)

    async def run(self) -> None:
        """Follow the objectives until cancelled."""
        while True:
            namespaces: dict[str | None, KubernetesDiscovery] = {}
            for fleet in self._fleets:
                config = _kubernetes(fleet)
                if config is not None:
                    namespaces.setdefault(config.namespace, config)
            for namespace in self._known.keys() - namespaces.keys():
                del self._known[namespace]
            for namespace, found in namespaces.items():
                await self._look(namespace, found)
            await self._pause(LOOK_SECONDS)

    async def _look(self, namespace: str | None, config: KubernetesDiscovery) -> None:
        where = "the gateway's namespace" if namespace is None else f"namespace {namespace}"
        try:
            found = await self._list_once(config)
        except SourceFailed as error:
            if self._failing.get(namespace) != error.reason:
                self._failing[namespace] = error.reason
                logger.warning("InferenceObjectives of %s: %s; those known before stay", where, error)
            return
        self._failing.pop(namespace, None)
        if found != self._known.get(namespace, {}):
            shown = ", ".join(f"{name} {priority}" for name, priority in sorted(found.items()))
            logger.info("InferenceObjectives of %s: %s", where, shown or "none any more")
        self._known[namespace] = found


def _kubernetes(fleet: ModelFleet) -> KubernetesDiscovery | None:
    discovery = fleet.config.discovery
    return None if discovery is None else discovery.kubernetes
