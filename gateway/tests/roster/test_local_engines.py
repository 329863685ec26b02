"""Many engines come and go in steps, and there is always one to ask."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator

import pytest

from spillway_gateway.config.settings import GatewayConfig, parse_config
from spillway_gateway.metrics import GatewayMetrics
from spillway_gateway.roster.local_engines import ENGINES_IN_ONE_ITERATION, LocalEngines
from spillway_gateway.roster.roster import Roster
from spillway_gateway.tokens.fair_threads import FairThreads

MANY = 5 * ENGINES_IN_ONE_ITERATION + 3


def config(*engines: str, model: str = "m") -> GatewayConfig:
    listed = [{"name": name, "url": f"http://127.0.0.1:{20_000 + at}"} for at, name in enumerate(engines)]
    return parse_config({"models": [{"name": model, "engines": listed}]})


def names(prefix: str, count: int = MANY) -> list[str]:
    return [f"{prefix}{number}" for number in range(count)]


@pytest.fixture
async def roster() -> AsyncIterator[Roster]:
    metrics = GatewayMetrics()
    with contextlib.closing(FairThreads(1, "test")) as threads:
        first = config(*names("a"))
        yield Roster(first, metrics, threads, LocalEngines(first, metrics))


async def test_engines_are_replaced_in_steps_and_some_are_always_there(roster: Roster) -> None:
    engines = roster.models["m"].fleet.engines
    before = set(engines)
    seen = [set(engines)]
    await roster.apply(config(*names("b")))
    while seen[-1] != set(names("b")):
        seen.append(set(engines))
        await asyncio.sleep(0)

    assert before == set(names("a"))
    for one, next_one in itertools.pairwise(seen):
        assert len(one ^ next_one) <= ENGINES_IN_ONE_ITERATION
        assert len(next_one) >= MANY
    assert list(engines) == names("b")


async def test_few_engines_change_at_once(roster: Roster) -> None:
    engines = roster.models["m"].fleet.engines
    await roster.apply(config(*names("a"), "new"))
    assert "new" in engines
    await roster.apply(config(*names("a")))
    assert list(engines) == names("a")


async def test_a_later_list_takes_the_place_of_one_that_is_being_applied(roster: Roster) -> None:
    engines = roster.models["m"].fleet.engines
    await roster.apply(config(*names("b")))
    assert "b0" in engines and f"b{MANY - 1}" not in engines
    await roster.apply(config("c"))
    for _ in range(2 * MANY):
        await asyncio.sleep(0)
    assert list(engines) == ["c"]


async def test_a_model_that_comes_back_while_its_engines_leave_has_its_own(roster: Roster) -> None:
    gone = roster.models["m"].fleet
    await roster.apply(config("o", model="other"))
    assert gone.engines
    await roster.apply(config(*names("d")))
    for _ in range(2 * MANY):
        await asyncio.sleep(0)
    assert not gone.engines
    assert list(roster.models["m"].fleet.engines) == names("d")


async def test_none_comes_once_they_have_stopped(roster: Roster) -> None:
    """The tasks of an engine that is added later would outlive the process's others."""
    engines = roster.models["m"].fleet.engines
    await roster.apply(config(*names("b")))
    await roster._engines.stop()
    before = set(engines)
    for _ in range(2 * MANY):
        await asyncio.sleep(0)
    assert set(engines) == before and f"b{MANY - 1}" not in engines
