"""`target`: one gateway process for a module's attacks. A module that needs settings of its own overrides
`target_settings`; a test that needs a gateway of its own asks for `start_target`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from attack.target import Target


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--stream-gaps", action="store_true", help="time another client's stream; wants an idle machine")


@pytest.fixture(scope="session")
def gaps(pytestconfig: pytest.Config) -> bool:
    """The option is known only if the command line names this folder."""
    return bool(pytestconfig.getoption("--stream-gaps", default=False))


@pytest.fixture(scope="module")
def target_settings() -> dict[str, Any]:
    """Keyword arguments of Target."""
    return {}


@pytest.fixture(scope="module")
def target(target_settings: dict[str, Any], gaps: bool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    running = Target(tmp_path_factory.mktemp("target"), gaps=gaps, **target_settings)
    yield running
    running.close()


@pytest.fixture
def start_target(gaps: bool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Target]]:
    running: list[Target] = []

    def start(**settings: Any) -> Target:
        running.append(Target(tmp_path_factory.mktemp("target"), gaps=gaps, **settings))
        return running[-1]

    yield start
    for each in running:
        each.close()
