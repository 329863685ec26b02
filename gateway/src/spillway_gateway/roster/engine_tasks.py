"""The tasks of each engine: health polls and KV events, from when it is added until its last request has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

import aiohttp
import zmq.asyncio

from spillway_gateway.background import guarded, supervised
from spillway_gateway.config.settings import HealthConfig
from spillway_gateway.fleet.engine import Engine
from spillway_gateway.fleet.health import HealthPoller
from spillway_gateway.fleet.kv_events import EventFollower, in_turns
from spillway_gateway.fleet.prefix_index import PrefixIndex
from spillway_gateway.metrics import GatewayMetrics

_Process = Engine | tuple[str, str, str, str]
METRICS_KEPT_SECONDS = 300.0  # after an engine's last request, so that every scraper reads its last values


@dataclass(frozen=True, slots=True)
class Clients:
    """The clients that the tasks share; the application closes them. engine_key: the engines' own API key."""

    session: aiohttp.ClientSession
    zmq: zmq.asyncio.Context
    engine_key: str | None = None


class EngineTasks:
    """The tasks of all engines, on the event loop. in_service: whether an engine of this name is on the roster."""

    def __init__(self, clients: Clients, metrics: GatewayMetrics, in_service: Callable[[str], bool]) -> None:
        self._clients = clients
        self._metrics = metrics
        self._in_service = in_service
        self._polls: dict[_Process, tuple[HealthPoller, asyncio.Task[None]]] = {}
        self._events: dict[Engine, asyncio.Task[None]] = {}
        self._departures: set[asyncio.Task[None]] = set()

    def follow(self, engine: Engine, index: PrefixIndex, health: HealthConfig) -> None:
        """Start the tasks of an engine."""
        polled = self._polls.get(_process(engine))
        if polled is not None:
            polled[0].join(engine)
        else:
            poller = HealthPoller(engine, self._clients.session, health, self._clients.engine_key)
            task = asyncio.create_task(supervised(poller.run, f"health of {engine.process}"))
            self._polls[_process(engine)] = poller, task
        if engine.config.kv_events is not None:
            follower = EventFollower(engine, index, self._metrics, self._clients.zmq)
            self._events[engine] = asyncio.create_task(supervised(follower.run, f"events of {engine.name}"))

    def depart(self, engine: Engine, index: PrefixIndex) -> None:
        """The engine is off the roster. Its events end at once, and its entries in the index are freed in steps. It is
        polled while it has requests: those on a hung engine are notified by the poll."""
        events = self._events.pop(engine, None)
        if events is not None:
            events.cancel()  # before its name is free for another engine in the index
        steps = index.retire_engine(engine.name)
        departure = self._depart(engine, in_turns(index, steps))
        task = asyncio.create_task(guarded(departure, f"departure of {engine.name}"))
        self._departures.add(task)
        task.add_done_callback(self._departures.discard)

    async def _depart(self, engine: Engine, freed: Coroutine[object, object, None]) -> None:
        await freed
        idle = asyncio.Event()
        engine.on_idle = idle.set
        if engine.running_requests:
            await idle.wait()
        polled = self._polls.get(_process(engine))
        if polled is not None and not polled[0].leave(engine):
            del self._polls[_process(engine)]
            polled[1].cancel()
        await asyncio.sleep(METRICS_KEPT_SECONDS)
        if not self._in_service(engine.name):
            self._metrics.remove_engine(engine.name)

    async def stop(self) -> None:
        """Cancel all tasks and wait for them."""
        tasks = [*self._departures, *self._events.values(), *(task for _, task in self._polls.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _process(engine: Engine) -> _Process:
    """A key that all data parallel ranks of one process share, and no other engine has."""
    return engine if engine.rank is None else (engine.model, engine.process, engine.config.url, engine.instance)
