"""Two data parallel ranks of one engine on one directory, each with a CPU tier, events and a queue of its own."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from reference_answers.margins import Scored, difference

from engine_matrix.cpu_experts import dummy_batches, plug_in
from engine_matrix.engine_run import ANSWER_TOKENS, PROMPT_BLOCKS, prompts
from engine_matrix.greedy import scored_answers
from engine_matrix.models import BLOCK_TOKENS, Model, model
from engine_matrix.rank_engine import RANKS, RankEngine
from engine_matrix.verdict import run_model

MODEL = model("llama")
EXPERTS = model("qwen3-moe")
READ = "spillway_tier_read_bytes_total"
COMPUTED_BY = {"a": 0, "b": 0, "c": 1}


def stored_tokens(batches: dict[int, Any]) -> set[tuple[int, ...]]:
    """The tokens of every event of stored blocks that names them, which are those of the device."""
    events = [_kind_and_tokens(event) for _, events, *_ in batches.values() for event in events]
    return {tuple(tokens) for kind, tokens in events if kind == "BlockStored" and tokens}


def _kind_and_tokens(event: Any) -> tuple[str, Any]:
    """vLLM 0.23 sends arrays, 0.30 and newer maps."""
    if isinstance(event, dict):
        return event["type"], event.get("token_ids")
    return event[0], event[3] if len(event) > 3 else None


def answers_without_offload(wanted: Model, folder: Path) -> dict[str, Scored]:
    without = run_model(wanted.name, folder, ["none"])
    assert not without.refusals, without.log
    expected = dict(zip("abc", scored_answers(without.runs["none"])[:3], strict=True))
    assert difference(expected["a"], expected["c"]), "all prompts have one answer, so the comparison proves nothing"
    return expected


@pytest.mark.timeout(3000)
def test_ranks_answer_as_without_offload_and_load_each_others_blocks(tmp_path: Path) -> None:
    expected = answers_without_offload(MODEL, tmp_path)
    asked = prompts(BLOCK_TOKENS)

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


@pytest.mark.skipif("TEST_EXPERTS" not in os.environ, reason="by hand: make test-experts")
@pytest.mark.timeout(3000)
def test_ranks_of_a_mixture_of_experts_step_together_and_answer_as_without_offload(tmp_path: Path) -> None:
    """A rank that has nothing to compute, or waits for a load, runs dummy batches for as long as the other one has."""
    expected = answers_without_offload(EXPERTS, tmp_path)
    asked = prompts(BLOCK_TOKENS)
    (plugged := tmp_path / "plugged").mkdir()

    started = RankEngine(tmp_path, tmp_path / EXPERTS.name, EXPERTS, "engine_matrix.expert_service", plug_in(plugged))
    with started as engine, ThreadPoolExecutor(RANKS) as both:

        def ask(ranks: dict[str, int]) -> dict[str, int]:
            """Name -> cached tokens, of prompts that are computed at the same time."""
            waiting = {name: both.submit(engine.answer, asked[name], rank) for name, rank in ranks.items()}
            answers = {name: future.result() for name, future in waiting.items()}
            for name, (answer, _) in answers.items():
                assert difference(expected[name], answer) is None, engine.log
            return {name: cached for name, (_, cached) in answers.items()}

        def idles() -> list[int]:
            return [dummy_batches(plugged, rank) for rank in range(RANKS)]

        before = idles()
        assert ask({"a": 0}) == {"a": 0}
        after = idles()
        # A step of rank 0 for each token; that of the last one may not be counted yet.
        assert after[1] - before[1] >= ANSWER_TOKENS - 1, "rank 1 ran no dummy batches while rank 0 computed"
        assert ask({"b": 0, "c": 1}) == {"b": 0, "c": 0}
        row_bytes = 2 * EXPERTS.settings["num_hidden_layers"] * 2 * 32 * 4 * BLOCK_TOKENS
        for rank, names in ((0, "ab"), (1, "c")):
            engine.wait_stored(rank, len(names) * PROMPT_BLOCKS * row_bytes)
            assert engine.counter(READ, rank) == 0

        # Each rank reads what the other one has stored, alone and while the other one reads too.
        for ranks in ({"a": 1}, {"b": 1, "c": 0}):
            assert min(ask(ranks).values()) >= (PROMPT_BLOCKS - 1) * BLOCK_TOKENS
        for rank, names in ((1, "ab"), (0, "c")):
            engine.answer([3, 4, 5], rank)
            assert engine.counter(READ, rank) >= len(names) * (PROMPT_BLOCKS - 1) * row_bytes
        # What came from the device or the CPU tier of the same rank stands as it was, whatever dummy batches ran since.
        assert min(ask({"a": 0}).values()) >= (PROMPT_BLOCKS - 1) * BLOCK_TOKENS

        status, shared, processes = engine.kill_rank(1)
        assert status != 0
        assert (shared, processes) == (set(), [])
