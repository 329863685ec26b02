"""What the models of one gateway share."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from spillway_gateway.config.settings import parse_config
from spillway_gateway.metrics import GatewayMetrics
from spillway_gateway.roster import roster
from spillway_gateway.roster.local_engines import LocalEngines
from spillway_gateway.roster.roster import Roster
from spillway_gateway.testing.running import until
from spillway_gateway.testing.small_tokenizer import write_tokenizer
from spillway_gateway.tokens.fair_threads import FairThreads
from spillway_gateway.tokens.prompt import CompletionPrompt
from spillway_gateway.tokens.word_tables import WordTables


async def test_all_models_count_what_the_event_loop_s_thread_tokenised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[WordTables] = []

    def renewed_soon(threads: FairThreads) -> WordTables:
        made.append(WordTables(threads, renewal_chars=800))
        return made[-1]

    monkeypatch.setattr(roster, "WordTables", renewed_soon)
    write_tokenizer(tmp_path, "the quick brown fox", 300, "{{ messages[0].content }}")
    config = parse_config(
        {
            "models": [
                {
                    "name": name,
                    "tokenizer": str(tmp_path),
                    "engines": [{"name": f"{name}-0", "url": "http://127.0.0.1:9"}],
                }
                for name in "ab"
            ]
        }
    )
    with contextlib.closing(FairThreads(1, "test")) as threads:
        metrics = GatewayMetrics()
        models = Roster(config, metrics, threads, LocalEngines(config, metrics)).models
        (tables,) = made
        await models["a"].reader.read(CompletionPrompt("fox " * 150))
        assert not tables.renewing
        await models["b"].reader.read(CompletionPrompt("fox " * 150))
        await until(lambda: tables.renewals == 1)
