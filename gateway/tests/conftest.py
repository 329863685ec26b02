"""Fake engines that are always stopped."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from spillway_gateway.testing.fake_engine import FakeEngine

StartEngine = Callable[..., Awaitable[FakeEngine]]


@pytest.fixture
async def start_engine() -> AsyncIterator[StartEngine]:
    started: list[FakeEngine] = []

    async def start(name: str = "fake-0", port: int = 0, **settings: Any) -> FakeEngine:
        engine = FakeEngine(name=name, **settings)
        await engine.start(port)
        started.append(engine)
        return engine

    yield start
    for engine in started:
        await engine.stop()
        if engine.publisher is not None:
            engine.publisher.close()
