"""Settings of every test in the repository."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["lanes.plugin"]

# The duration of an example, and of its generation, depends on the machine more than on the code; speed is measured in
# bench/. A test with health checks of its own to suppress repeats this one.
UNTIMED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("full", **UNTIMED)
# A quarter of the examples and no shrinking phase: quick feedback during development.
settings.register_profile("quick", max_examples=25, **UNTIMED)
settings.load_profile("full")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Keep what collection has made, half a million objects in a large lane, out of later garbage collections.

    They live until the end of the run. A full collection that visits them takes up to half a second: pytest itself
    makes five at its end, and so do tests that look for what is left behind.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Start every test at Python's default log level.

    Libraries set the root logger's level when they are imported (`model_hosting_container_standards`, which vLLM's API
    server imports, sets ERROR), and `caplog` would then hear nothing in every later test of the same process.
    """
    logging.root.setLevel(logging.WARNING)


@pytest.fixture(scope="session", autouse=True)
def servers_end_soon() -> Iterator[None]:
    """Let uvicorn look a hundred times a second, instead of ten, whether it has to end and its connections have closed.

    Otherwise each test with a server in its own process waits 0.2 s for the end of the server.
    """
    with pytest.MonkeyPatch.context() as patch:
        if server := sys.modules.get("uvicorn.server"):
            seen = SimpleNamespace(**vars(asyncio))
            seen.sleep = lambda seconds: asyncio.sleep(seconds / 10)
            patch.setattr(server, "asyncio", seen)
        yield


@pytest.fixture
def decisions() -> Iterator[list[str]]:
    """Collect what the connector logs at debug, whatever another test of this process has done to its logger."""
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = logging.getLogger("spillway_connector"), Lines()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)
