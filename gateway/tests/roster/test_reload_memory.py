"""Objects that a reload adds are no work for later garbage collections, and those it removes are freed without one."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spillway_gateway.config.settings import GatewayConfig, parse_config
from spillway_gateway.metrics import GatewayMetrics
from spillway_gateway.roster.local_engines import LocalEngines
from spillway_gateway.roster.roster import Roster
from spillway_gateway.testing.running import until
from spillway_gateway.testing.small_tokenizer import write_tokenizer
from spillway_gateway.tokens.fair_threads import FairThreads
from spillway_gateway.tokens.prompt import CompletionPrompt


@pytest.fixture
def uncollected() -> Iterator[None]:
    """No garbage collection but those that are asked for."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def config_of(folder: Path, *names: str) -> GatewayConfig:
    models: list[dict[str, Any]] = [
        {"name": name, "tokenizer": str(folder), "engines": [{"name": f"{name}-0", "url": "http://127.0.0.1:9"}]}
        for name in names
    ]
    return parse_config({"models": models})


@pytest.mark.usefixtures("uncollected")
async def test_a_removed_model_is_freed_without_a_collection_and_an_added_one_is_not_visited(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "the quick brown fox", 300, "{{ messages[0].content }}")
    metrics = GatewayMetrics()
    with contextlib.closing(FairThreads(1, "test")) as threads:
        config = config_of(tmp_path, "a", "b")
        roster = Roster(config, metrics, threads, LocalEngines(config, metrics))
        for added in ("c", "d", "e"):
            await roster.apply(config_of(tmp_path, "a", added))
            served = roster.models[added]
            await served.reader.read(CompletionPrompt("fox " * 150))
            table = served.fleet.index._held.table
            assert not {id(each) for each in gc.get_objects()} & {id(shard) for shard in table.shards}
            # The thread that loaded the tokenizer may hold it a moment longer.
            parts = [served.fleet, served.fleet.index, served.reader, served.reader.tokenizer]
            gone = [weakref.ref(part) for part in parts]
            del served, table, parts
            await roster.apply(config_of(tmp_path, "a"))
            await until(lambda gone=gone: [part() for part in gone] == [None] * len(gone))  # type: ignore[misc]
