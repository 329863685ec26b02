"""Two data parallel ranks of one engine on one directory, each with a CPU tier, events and a queue of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from reference_answers.margins import difference

from engine_matrix.engine_run import PROMPT_BLOCKS, prompts
from engine_matrix.greedy import scored_answers
from engine_matrix.models import BLOCK_TOKENS, model
from engine_matrix.rank_engine import RANKS, RankEngine
from engine_matrix.verdict import run_model

MODEL = model("llama")
READ = "spillway_tier_read_bytes_total"
COMPUTED_BY = {"a": 0, "b": 0, "c": 1}


def stored_tokens(batches: dict[int, Any]) -> set[tuple[int, ...]]:
    """Of every event of stored blocks that names tokens: those of the device."""
    events = [event for _, events, *_ in batches.values() for event in events if event[0] == "BlockStored"]
    return {tuple(event[3]) for event in events if event[3]}


@pytest.mark.timeout(3000)
def test_ranks_answer_as_without_offload_and_load_each_others_blocks(tmp_path: Path) -> None:
    without = run_model(MODEL.name, tmp_path, ["none"])
    assert not without.refusals, without.log
    asked = prompts(BLOCK_TOKENS)
    expected = dict(zip("abc", scored_answers(without.runs["none"])[:3], strict=True))
    assert difference(expected["a"], expected["c"]), "all prompts have one answer, so the comparison proves nothing"

    with RankEngine(tmp_path, tmp_path / MODEL.name, MODEL) as engine:
        for name, rank in COMPUTED_BY.items():
            answer, cached = engine.answer(asked[name], rank)
            assert (difference(expected[name], answer), cached) == (None, 0), engine.log
        row_bytes = 2 * MODEL.settings["num_hidden_layers"] * 2 * 32 * 4 * BLOCK_TOKENS
        for rank, names in ((0, "ab"), (1, "c")):
            engine.wait_stored(rank, len(names) * PROMPT_BLOCKS * row_bytes)
            assert engine.counter(READ, rank) == 0

        assert [engine.promote(asked["a"], rank) for rank in (0, 1, 2, None)] == [202, 202, 400, 400]
        for name, rank in COMPUTED_BY.items():
            # The other rank has computed none of it and has rows of its own: what it does not compute it has read.
            answer, cached = engine.answer(asked[name], 1 - rank)
            assert difference(expected[name], answer) is None, engine.log
            assert cached >= (PROMPT_BLOCKS - 1) * BLOCK_TOKENS
        for rank, names in ((1, "ab"), (0, "c")):
            engine.answer([3, 4, 5], rank)
            assert engine.counter(READ, rank) >= len(names) * (PROMPT_BLOCKS - 1) * row_bytes

        for rank in range(RANKS):
            for process in ("EngineCore", "worker-0"):
                assert engine.counter("spillway_process_setting", rank, process=process, setting="cpu_blocks") == 1
            published, replayed = engine.events(rank), engine.replayed(rank)
            assert {batch[2] for batch in published.values()} == {rank}
            assert published.items() <= replayed.items()
            first_blocks = {name: tuple(asked[name][: PROMPT_BLOCKS * BLOCK_TOKENS]) for name in COMPUTED_BY}
            own = {name for name, tokens in first_blocks.items() if tokens in stored_tokens(published)}
            assert own >= {name for name, computed_by in COMPUTED_BY.items() if computed_by == rank}

        status, shared, processes = engine.kill_rank(1)
        assert status != 0
        assert (shared, processes) == (set(), [])
