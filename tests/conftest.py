"""One stack at a time, one start per configuration: tests use the fixture `stack` and run once per tier they name.

- `pytest.mark.tiers("nvme")`: which of STACKS; TIERS without it. The engines of "bundled" serve the bundled model
- `pytest.mark.ends_stack`: takes the stack down itself, so it runs after every other test of that tier
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from stack_driver.deadlines import eventually
from stack_driver.kept_references import kept_file, read, write
from stack_driver.known_answers import KnownAnswers
from stack_driver.prompts import make_prompts
from stack_driver.reference_pass import PROMPTS_ENV, identity_prompts, reference_answers
from stack_driver.running_stack import RunningStack, stack_settings, upgrade
from stack_driver.small_model import SMALL_MODEL_OVERRIDES, small_model

TIERS = ("nvme", "redis")
# upgrade: a fleet in the middle of an upgrade, one engine of each vLLM on one Redis. bundled: one engine with the model
# and the start-up check of `make up`, on NVMe. What rests on no text runs on nvme and redis, with a small model.
STACKS = ("bundled", "nvme", "redis", "upgrade")
# The first test includes the start: minutes on two slow cores. The full identity proof takes longer still.
TIMEOUT_SECONDS = 3600 if os.environ.get(PROMPTS_ENV) else 900


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "tiers(*names): stacks that a test runs on, by their shared tier")
    config.addinivalue_line("markers", "ends_stack: takes the stack down, so it runs last on it")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "stack" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("tiers")
        metafunc.parametrize("stack", marker.args if marker else TIERS, indirect=True, scope="session")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests without a stack first, then tier by tier: one stack ends where the next one starts."""
    items.sort(key=_turn)
    for item in items:
        if _turn(item) > (0, False):
            item.add_marker(pytest.mark.timeout(TIMEOUT_SECONDS))


def _turn(item: pytest.Item) -> tuple[int, bool]:
    callspec = getattr(item, "callspec", None)
    tier = callspec.params.get("stack") if callspec is not None else None
    turn = STACKS.index(tier) + 1 if tier in STACKS else 0
    return turn, item.get_closest_marker("ends_stack") is not None


@pytest.fixture(scope="session")
def engine_settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Engines with the small model, or with that of MODEL."""
    if os.environ.get("MODEL"):
        return {}
    return {"model": str(small_model(tmp_path_factory.mktemp("model"))), "overrides": SMALL_MODEL_OVERRIDES}


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, KnownAnswers]:
    """Prompt name -> its answers on an engine without any offload, started here unless kept answers exist."""
    kept = kept_file(stack_settings("off", engines=1, gateway=False))
    asked = int(os.environ[PROMPTS_ENV]) if os.environ.get(PROMPTS_ENV) else None
    if kept is not None and (found := read(kept, asked)) is not None:
        return found
    running = RunningStack.start("off", tmp_path_factory.mktemp("off"), engines=1, gateway=False)
    try:
        answers = reference_answers(running.a, make_prompts(identity_prompts(running.blocks)))
    finally:
        running.close()
    if kept is not None:
        write(kept, answers)
    return answers


@pytest.fixture(scope="session")
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    if any("references" in getattr(item, "fixturenames", ()) for item in request.session.items):
        # The engine without offload runs before this stack, never beside it: two cores, 12 GB.
        request.getfixturevalue("references")
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "bundled":
        # The full proof of identity asks another engine; a start with this model takes a slow machine a minute.
        running = RunningStack.start("nvme", folder, engines=2 if os.environ.get(PROMPTS_ENV) else 1)
    elif request.param == "upgrade":
        running = RunningStack.start("redis", folder, vllm=upgrade())
    else:
        running = RunningStack.start(request.param, folder, **request.getfixturevalue("engine_settings"))
    try:
        yield running
    finally:
        running.close()
        # Gigabytes that are not read again; the logs stay.
        shutil.rmtree(running.local.folder.nvme, ignore_errors=True)


@pytest.fixture(autouse=True)
def everything_is_up(request: pytest.FixtureRequest) -> None:
    """A test that failed with an engine down, or a store filled by others, must not fail the next ones."""
    if "stack" in request.fixturenames:
        running: RunningStack = request.getfixturevalue("stack")
        eventually("every component is ready", lambda: all(status.ready for status in running.local.status()), 300.0)
        running.store.make_room()
