"""The router's models and engines as it tells them to the fronts, whenever they changed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from spillway_gateway.config.ranks import RankConfig
from spillway_gateway.config.settings import EngineConfig
from spillway_gateway.fleet.engine import Engine
from spillway_gateway.processes.messages import EngineSummary, Listed, Message, ModelSummary, Progressed, State
from spillway_gateway.roster.model_engines import ModelEngines
from spillway_gateway.roster.roster import Roster

LOOK_SECONDS = 0.05
PROGRESS_SECONDS = 1.0  # between two messages about progress


class StatePublisher:
    """Publisher of the router's state, on the event loop. roster, engines: the router's. tell: sends a message to
    every front."""

    def __init__(self, roster: Roster, engines: ModelEngines, tell: Callable[[Message], None]) -> None:
        self._roster = roster
        self._model_engines = engines
        self._tell = tell
        self._seen: Any = None
        self._listed: dict[int, bytes | None] = {}  # by the engine's serial
        self._serials: frozenset[int] = frozenset()
        self._progress_told = time.monotonic()

    async def follow(self) -> None:
        """Tell every change, until cancelled."""
        while True:
            self.publish_changes()
            self.publish_progress(time.monotonic())
            await asyncio.sleep(LOOK_SECONDS)

    def publish_changes(self) -> None:
        """Publish changes now, if there are any."""
        now = tuple(self._fingerprint())
        if now != self._seen:
            self._seen = now
            state = self.state()
            self._serials = frozenset(engine.serial for model in state.models for engine in model.engines)
            self._tell(state)
        for model, engine in self._engines():
            body = engine.listed.body if engine.listed is not None else None
            if body != self._listed.get(engine.serial):
                self._listed[engine.serial] = body
                self._tell(Listed(model, engine.serial, body))
        for serial in self._listed.keys() - self._serials:
            del self._listed[serial]

    def publish_progress(self, now: float) -> None:
        """Publish which engines have computed since the last time, PROGRESS_SECONDS ago or more. now: monotonic."""
        before = self._progress_told
        if now - before < PROGRESS_SECONDS:
            return
        self._progress_told = now
        serials = tuple(engine.serial for _, engine in self._engines() if engine.progressed_at >= before)
        if serials:
            self._tell(Progressed(serials))

    def publish_engine(self, engine: Engine) -> None:
        """Publish an engine before a message that names it, if the fronts do not know it yet."""
        if engine.serial not in self._serials:
            self.publish_changes()

    def everything(self) -> Iterator[Message]:
        """The messages for a front that has just been started."""
        yield self.state()
        for model, engine in self._engines():
            body = self._listed.get(engine.serial)
            if body is not None:
                yield Listed(model, engine.serial, body)

    def state(self) -> State:
        models = []
        for fleet in self._roster.fleets:
            engines = tuple(_engine(engine) for engine in fleet.engines.values())
            usable = self._usable(fleet.name)
            full = self._model_engines.is_full(fleet.name)
            models.append(ModelSummary(fleet.name, fleet.index.block_sizes, usable, full, engines))
        return State(tuple(models))

    def _usable(self, model: str) -> bool:
        return self._roster.models[model].reader.tokenizer is not None

    def _engines(self) -> Iterator[tuple[str, Engine]]:
        for fleet in self._roster.fleets:
            for engine in fleet.engines.values():
                yield fleet.name, engine

    def _fingerprint(self) -> Iterator[Any]:
        """Yield the parts of State, without copies."""
        for fleet in self._roster.fleets:
            yield fleet.name, fleet.index.block_sizes, self._usable(fleet.name)
            yield self._model_engines.is_full(fleet.name)
            for engine in fleet.engines.values():
                yield engine.serial, engine.state, engine.answer, engine.withheld, engine.adapters


def _engine(engine: Engine) -> EngineSummary:
    return EngineSummary(
        engine.serial,
        msgspec.json.encode(engine.config),
        isinstance(engine.config, RankConfig),
        engine.instance,
        engine.state.value,
        engine.answer,
        engine.withheld,
        tuple(engine.adapters) if engine.adapters is not None else None,
        engine.vllm,
    )


def engine_config(summary: EngineSummary) -> EngineConfig:
    """The configuration of an engine in State."""
    return msgspec.json.decode(summary.config, type=RankConfig if summary.is_rank else EngineConfig)
