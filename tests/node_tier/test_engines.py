"""Two real engines of one machine, and one that starts after both were killed: a prefix is computed once."""

from __future__ import annotations

import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from engine_matrix.asked_engine import asked_engine
from engine_matrix.models import VOCABULARY


def _config(region: Path) -> dict[str, Any]:
    return {"num_cpu_blocks": 8, "node_tier": {"bytes": "8MiB", "path": str(region), "fallback": "refuse"}}


def _prompt(name: str, block_tokens: int) -> list[int]:
    chosen = random.Random(name)
    return [chosen.randrange(3, VOCABULARY) for _ in range(6 * block_tokens + 3)]


@pytest.mark.timeout(900)
def test_a_prefix_is_computed_once_for_all_engines_of_a_node_and_survives_them(tmp_path: Path):
    config = _config(tmp_path / "region")
    with ExitStack() as first_two:
        first = first_two.enter_context(asked_engine(tmp_path, config, "uni"))
        tokens = first.block_tokens
        common = _prompt("common", tokens)
        computed = first.ask(common)
        assert computed.cached == 0
        first.ask(_prompt("other", tokens))  # stores are submitted with the step after their own
        second = first_two.enter_context(asked_engine(tmp_path, config, "mp"))
        loaded = second.ask(common)
        assert (loaded.tokens, loaded.cached) == (computed.tokens, 6 * tokens)
        second.ask(_prompt("third", tokens))
        assert first.ask(_prompt("third", tokens)).cached == 6 * tokens
        first.kill()
        second.kill()
    with asked_engine(tmp_path, config, "uni") as third:
        again = third.ask(common)
        assert (again.tokens, again.cached) == (computed.tokens, 6 * tokens)
