"""The questions of a draining engine to its EngineCore, through a double of vLLM's client."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from spillway_engine import settling
from spillway_engine.settling import Settled, settle


class Core:
    """Stores `rate` chunks of 100 bytes between two questions."""

    core_engines = (b"\0\0", b"\1\0")

    def __init__(self, left: int, rate: int = 4) -> None:
        self.left, self.rate, self.stored = left, rate, 7  # some were stored earlier
        self.seconds: list[float] = []

    async def call_utility_async(self, method: str, seconds: float) -> list[int]:
        assert method == "spillway_settle"
        self.seconds.append(seconds)
        now = [self.left, self.stored, 100]
        moved = min(self.left, self.rate) if seconds else 0
        self.left, self.stored = self.left - moved, self.stored + moved
        return now

    async def _call_utility_async(self, method: str, seconds: float, engine: bytes) -> list[int]:
        return await self.call_utility_async(method, seconds)


def app_of(core: object) -> object:
    return SimpleNamespace(state=SimpleNamespace(engine_client=SimpleNamespace(engine_core=core)))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "_ASK_SECONDS", 0.001)


async def test_it_goes_on_until_nothing_is_left() -> None:
    settled = await settle(app_of(Core(left=10)), 1, 60.0, lambda: False)

    assert (settled.chunks, settled.size_bytes, settled.left) == (10, 1000, 0)


async def test_its_time_is_bounded_and_what_is_left_is_told() -> None:
    core = Core(left=10, rate=0)
    async with asyncio.timeout(10):
        settled = await settle(app_of(core), 1, 0.05, lambda: False)

    assert (settled.chunks, settled.left) == (0, 10)
    assert max(core.seconds) <= 0.05, "the engine core steps on beyond the drain"
    assert core.seconds[-1] == 0.0


async def test_a_second_signal_ends_it() -> None:
    core = Core(left=10)
    settled = await settle(app_of(core), 1, 60.0, lambda: len(core.seconds) == 2)

    assert (settled.chunks, settled.left) == (8, 2)
    assert core.seconds[-1] == 0.0


async def test_every_data_parallel_rank_is_asked() -> None:
    core = Core(left=3)
    settled = await settle(app_of(core), 2, 60.0, lambda: False)

    assert settled.left == 0 and len(core.seconds) % 2 == 0


async def test_an_engine_that_cannot_ends_without() -> None:
    assert await settle(app_of(None), 1, 60.0, lambda: False) == Settled()
