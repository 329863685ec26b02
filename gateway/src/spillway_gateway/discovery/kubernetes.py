"""Follows the EndpointSlices of a Service: list, then watch from there, and list again when the thread is lost.

The known engines stay through every fault: an API server that is away changes nothing about engines that serve.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable

import aiohttp

from spillway_gateway.config.discovery import KubernetesDiscovery
from spillway_gateway.discovery.backoff import pause_seconds
from spillway_gateway.discovery.endpoint_slices import EndpointSlice, engines_of
from spillway_gateway.discovery.found import FoundEngine, Publish, SourceFailed, SourceStatus
from spillway_gateway.discovery.kubernetes_api import KubernetesApi, WatchEvent

logger = logging.getLogger(__name__)

WATCH_SECONDS_MAX = 240  # one watch; the next goes on where it ended
SHORT_WATCH_SECONDS = 1.0  # one that ends sooner and without an event is a fault, or it would be asked for in a spin


class SliceTable:
    """The slices of a Service by name, as of the last event."""

    def __init__(self) -> None:
        self.slices: dict[str, EndpointSlice] = {}

    def apply(self, event: WatchEvent) -> bool:
        """True when something may have changed. Repeats are harmless."""
        if event.piece is None:
            return False
        name = event.piece.metadata.name
        if event.type == "DELETED":
            return self.slices.pop(name, None) is not None
        self.slices[name] = event.piece
        return True


class KubernetesSource:
    """chance: 0 to 1, for jitter. clock: monotonic seconds."""

    def __init__(
        self,
        config: KubernetesDiscovery,
        status: SourceStatus,
        publish: Publish,
        *,
        chance: Callable[[], float] = random.random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._status = status
        self._publish = publish
        self._chance = chance
        self._clock = clock
        self._table = SliceTable()
        self._version: str | None = None  # where the next watch begins; None: list first
        self._list_at = 0.0
        self._fruitful = False  # the last watch brought something, or lasted
        self._published: tuple[FoundEngine, ...] | None = None
        self._problems: tuple[str, ...] = ()

    async def run(self) -> None:
        """Until cancelled. Tries again for ever, ever more slowly up to retry_seconds_max."""
        failures = 0
        # A session of its own: a watch holds its connection for minutes, and must not take it from anybody else.
        async with aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar(), trust_env=False) as session:
            api = KubernetesApi(self._config, session)
            while True:
                self._fruitful = False
                try:
                    await self._follow(api)
                    failures = 0 if self._fruitful else failures + 1
                except SourceFailed as error:
                    failures = 1 if self._fruitful else failures + 1
                    if error.reason in ("expired", "invalid"):
                        self._version = None
                    if self._status.failed(error):
                        logger.warning("%s: %s; the engines known before stay", self._status.description, error)
                if failures:
                    await asyncio.sleep(pause_seconds(failures, self._config.retry_seconds_max, self._chance()))

    async def _follow(self, api: KubernetesApi) -> None:
        """List if it is due, then one watch."""
        now = self._clock()
        if self._version is None or now >= self._list_at:
            self._table.slices, self._version = await api.list()
            self._list_at = now + self._config.resync_seconds
            self._status.heard()
            if not self._table.slices:
                logger.warning("%s: no EndpointSlices; check the Service's name", self._status.description)
            self._reduce()
        # Rounded up: a watch of 0 seconds would have no end.
        seconds = 1 + int(min(WATCH_SECONDS_MAX * (1.0 - 0.5 * self._chance()), max(0.0, self._list_at - now)))
        async with api.watch(self._version, seconds) as events:
            began = self._clock()
            self._status.heard()
            try:
                async for event in events:
                    self._fruitful = True
                    self._version = event.version or self._version
                    self._status.heard()
                    if self._table.apply(event):
                        self._reduce()
            finally:
                self._fruitful |= self._clock() - began >= SHORT_WATCH_SECONDS
        self._status.heard()

    def _reduce(self) -> None:
        engines, problems = engines_of(self._table.slices.values(), self._config)
        if problems != self._problems:
            for problem in problems:
                logger.warning("%s: %s", self._status.description, problem)
            self._problems = problems
        if engines != self._published:
            self._published = engines
            self._status.updates_total += 1
            self._publish(engines)
