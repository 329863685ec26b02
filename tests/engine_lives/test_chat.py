"""The next turn of a chat loads all of it that has been computed, the answers too unless they are not kept."""

from __future__ import annotations

from typing import Any

import pytest
from module_runs import module_runs

KEPT = {"full": 1, "chunks": 2, "drafts": 1, "async": 2}  # shape -> blocks of a chunk


@pytest.fixture(scope="module")
def chats() -> dict[str, Any]:
    (run,) = module_runs("engine_lives.chat", *KEPT, "prompts", timeout_seconds=300)
    return run


@pytest.mark.parametrize("shape", KEPT)
def test_all_whole_chunks_but_that_of_the_last_token_are_loaded(chats: dict[str, Any], shape: str) -> None:
    chunk = KEPT[shape] * chats["block_tokens"]
    turns = chats["turns"][shape]
    most = [0, *((length - 1) // chunk * chunk for _, _, length in turns[:-1])]
    assert [cached for _, cached, _ in turns] == most


def test_without_answers_the_prompt_of_the_turn_before_is_loaded(chats: dict[str, Any]) -> None:
    block, turns = chats["block_tokens"], chats["turns"]["prompts"]
    assert [cached for _, cached, _ in turns] == [0, *(prompt // block * block for prompt, _, _ in turns[:-1])]
    assert turns[-1][1] < chats["turns"]["full"][-1][1]
