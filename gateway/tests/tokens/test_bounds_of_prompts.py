"""The part of a prompt that is hashed, whatever its form."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from spillway_gateway.config.settings import LimitsConfig
from spillway_gateway.routing.prefix import KEYS_MAX, chain_blocks
from spillway_gateway.tokens.fair_threads import FairThreads
from spillway_gateway.tokens.prompt import CompletionPrompt, PromptReader


def reader(sizes: tuple[int, ...], tokens_max: int | None) -> PromptReader:
    engines: Any = SimpleNamespace(block_sizes=sizes)
    return PromptReader("m", engines, None, FairThreads(1, "t"), LimitsConfig, tokens_max=lambda: tokens_max)


@pytest.mark.parametrize("sizes", [(16,), (16, 128)])
async def test_ids_beyond_what_any_engine_takes_are_not_hashed(sizes: tuple[int, ...]) -> None:
    given = CompletionPrompt(array("I", [1]) * 100_000)

    blocks = await reader(sizes, 4096).read(given)

    assert len(blocks.keys) == 4096 // 16
    assert {size: len(keys) for size, keys in blocks.other_keys.items()} == {size: 4096 // size for size in sizes[1:]}
    assert blocks.prompt_tokens == 100_000, "all of it is charged"
    whole = await reader(sizes, None).read(given)
    assert list(whole.keys[: len(blocks.keys)]) == list(blocks.keys)


async def test_blocks_of_one_prompt_are_bounded_where_no_length_is_known() -> None:
    blocks = await reader((1,), None).read(CompletionPrompt(array("I", [1]) * (KEYS_MAX + 5)))

    assert len(blocks.keys) == KEYS_MAX
    assert len(chain_blocks(0, bytes(4 * KEYS_MAX + 8), 4)) == KEYS_MAX
