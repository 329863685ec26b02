"""Follows the EndpointSlices of a Service: list, then watch from there, and list again when the version has expired.

One thread talks to the API server, as the client package blocks; what it finds is applied on the event loop. The known
engines stay through every fault: an API server that is away changes nothing about engines that serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from spillway_gateway.config.discovery import KubernetesDiscovery
from spillway_gateway.discovery.endpoint_slices import SliceTable, engines_of
from spillway_gateway.discovery.found import FoundEngine, Publish, SourceFailed, SourceStatus

if TYPE_CHECKING:
    from spillway_gateway.discovery.kubernetes_api import KubernetesApi

logger = logging.getLogger(__name__)

WATCH_SECONDS_MAX = 240  # one watch; the next continues from its last version
SHORT_WATCH_SECONDS = 1.0  # a watch that ends sooner and without an event is a fault, and is followed by a pause
UPDATES_MAX = 64  # on their way to the event loop; further ones make the thread wait, and so the API server
STOP_SECONDS_MAX = 0.5  # for the thread to end; beyond that it is left behind, until a deadline of its own ends it
FIRST_PAUSE_SECONDS = 0.25


class _Stopped(Exception):
    """The source is being stopped; the thread ends."""


class KubernetesSource:
    """chance: 0 to 1, for jitter. clock: monotonic seconds. pause: waits for that event, at most the given seconds.
    run() is called once."""

    def __init__(
        self,
        config: KubernetesDiscovery,
        status: SourceStatus,
        publish: Publish,
        *,
        chance: Callable[[], float] = random.random,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[threading.Event, float], object] = threading.Event.wait,
    ) -> None:
        self._config = config
        self._status = status
        self._publish = publish
        self._chance = chance
        self._clock = clock
        self._pause = pause
        # Between the thread and the event loop.
        self._updates: queue.Queue[Callable[[], None]] = queue.Queue(UPDATES_MAX)
        self._stopping = threading.Event()
        self._api: KubernetesApi | None = None
        # Only the thread uses these.
        self._table = SliceTable()
        self._version: str | None = None  # where the next watch begins; None: list first
        self._list_at = 0.0
        self._listed = False  # the last watch began from a list
        self._fruitful = False  # the last watch brought something, or lasted
        self._published: tuple[FoundEngine, ...] | None = None
        self._problems: tuple[str, ...] = ()

    # -- on the event loop -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Watch until cancelled. Tries again without end, with growing pauses up to retry_seconds_max."""
        arrived, ended = asyncio.Event(), asyncio.Event()
        call = asyncio.get_running_loop().call_soon_threadsafe

        def notify(event: asyncio.Event) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                call(event.set)

        arguments = (partial(notify, arrived), partial(notify, ended))
        threading.Thread(target=self._thread, args=arguments, name="kubernetes-discovery", daemon=True).start()
        try:
            while True:
                await arrived.wait()
                arrived.clear()
                for update in self._arrived_updates():
                    update()
        finally:
            self._stopping.set()
            if self._api is not None:
                self._api.stop()
            self._arrived_updates()  # a thread that waits for room goes on, and ends
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_SECONDS_MAX):
                    await ended.wait()

    def _arrived_updates(self) -> list[Callable[[], None]]:
        found: list[Callable[[], None]] = []
        with contextlib.suppress(queue.Empty):
            while len(found) < UPDATES_MAX:
                found.append(self._updates.get_nowait())
        return found

    def _failed(self, error: SourceFailed) -> None:
        if self._status.failed(error):
            logger.warning("%s: %s; the engines known before stay", self._status.description, error)

    def _changed(self, engines: tuple[FoundEngine, ...]) -> None:
        self._status.updates_total += 1
        self._publish(engines)

    # -- in the thread -----------------------------------------------------------------------------------------------

    def _thread(self, notify: Callable[[], None], notify_end: Callable[[], None]) -> None:
        self._notify = notify
        try:
            self._follow()
        except _Stopped:
            pass
        except Exception as error:
            with contextlib.suppress(_Stopped):
                self._hand_over(partial(_raise, error))
        finally:
            notify_end()

    def _hand_over(self, update: Callable[[], None]) -> None:
        """Pass it to the event loop, which runs it. Raises _Stopped."""
        if self._stopping.is_set():
            raise _Stopped
        self._updates.put(update)
        self._notify()

    def _follow(self) -> None:
        # Imported here: it takes long enough to delay every stream of the gateway.
        from spillway_gateway.discovery.kubernetes_api import KubernetesApi  # noqa: PLC0415

        self._api = api = KubernetesApi(self._config)
        failures = 0
        while not self._stopping.is_set():
            self._fruitful = False
            try:
                self._list_and_watch(api)
                failures = 0 if self._fruitful else failures + 1
            except SourceFailed as error:
                failures = 1 if self._fruitful else failures + 1
                # An API server that has restarted no longer has the history: a pause here, after the one before it was
                # back, would double the time until changes are seen. A version that was listed just now is a fault.
                if error.reason == "expired" and not self._listed:
                    failures = 0
                if error.reason in ("expired", "invalid"):
                    self._version = None
                self._hand_over(partial(self._failed, error))
            if failures:
                seconds = pause_seconds(failures, self._config.retry_seconds_max, self._chance())
                self._pause(self._stopping, seconds)

    def _list_and_watch(self, api: KubernetesApi) -> None:
        """List if it is due, then one watch."""
        now = self._clock()
        self._listed = False
        if self._version is None or now >= self._list_at:
            self._listed = True
            self._table.slices, self._version = api.list()
            self._list_at = now + self._config.resync_seconds
            self._hand_over(self._status.heard)
            if not self._table.slices:
                logger.warning("%s: no EndpointSlices; check the Service's name", self._status.description)
            self._reduce()
        # Rounded up: a watch of 0 seconds would have no end.
        seconds = 1 + int(min(WATCH_SECONDS_MAX * (1.0 - 0.5 * self._chance()), max(0.0, self._list_at - now)))
        began: float | None = None

        def begun() -> None:
            nonlocal began
            began = self._clock()
            self._hand_over(self._status.heard)

        try:
            for event in api.watch(self._version, seconds, begun):
                self._fruitful = True
                self._version = event.version or self._version
                self._hand_over(self._status.heard)
                if self._table.apply(event):
                    self._reduce()
        finally:
            self._fruitful |= began is not None and self._clock() - began >= SHORT_WATCH_SECONDS
        self._hand_over(self._status.heard)

    def _reduce(self) -> None:
        engines, problems = engines_of(self._table.slices.values(), self._config)
        if problems != self._problems:
            for problem in problems:
                logger.warning("%s: %s", self._status.description, problem)
            self._problems = problems
        if engines != self._published:
            self._published = engines
            self._hand_over(partial(self._changed, engines))


def pause_seconds(failures: int, seconds_max: float, chance: float) -> float:
    """Return the pause before the next try. Pure.

    failures: in a row, from 1. Doubles up to seconds_max, of which chance (0 to 1) takes away up to a half, so that
    many gateways do not come back together.
    """
    whole = min(seconds_max, FIRST_PAUSE_SECONDS * 2.0 ** min(failures - 1, 30))
    return whole * (1.0 - 0.5 * chance)


def _raise(error: Exception) -> None:
    raise error
