"""Engines small enough to fill, and a simulator on loopback."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from spillway_simulator.model.engine import EngineShape
from spillway_simulator.model.presets import PRESETS
from spillway_simulator.model.request import EngineRequest
from spillway_simulator.server.simulator import Simulator
from spillway_simulator.settings import parse_settings

BLOCK = 4


@pytest.fixture
def shape() -> EngineShape:
    return EngineShape(
        block_tokens=BLOCK,
        device_blocks=16,
        cpu_blocks=8,
        max_running=4,
        max_batched_tokens=24,
        max_model_tokens=64,
        announce_shared=True,
    )


@pytest.fixture
def rates():
    """Round numbers: a pass takes 1 s or 0.1 s per prompt token, whichever is longer."""
    cpu = PRESETS["instant"]
    return replace(
        cpu,
        step_seconds=1.0,
        prefill_token_seconds=0.1,
        cpu=cpu.cpu._replace(load_tokens_per_second=100.0, store_tokens_per_second=100.0),
        shared=cpu.shared._replace(load_tokens_per_second=40.0, store_tokens_per_second=50.0),
    )


@pytest.fixture
def ask() -> Callable[..., EngineRequest]:
    def make(name: str, prompt: Any, answer: int = 1, salt: str | None = None) -> EngineRequest:
        return EngineRequest(name, array("I", prompt), array("I", range(900, 900 + answer)), salt)

    return make


@pytest.fixture
def simulator() -> Callable[..., AbstractAsyncContextManager[Simulator]]:
    @asynccontextmanager
    async def run(**settings: Any) -> AsyncIterator[Simulator]:
        ports = {"port": 0, "kvEventsPort": 0, "kvReplayPort": 0, "adminPort": 0}
        started = Simulator(parse_settings({**ports, "preset": "instant", "blockTokens": BLOCK, **settings}))
        await started.start()
        try:
            yield started
        finally:
            started.close()

    return run
