"""Chunks of a prompt by KV group, against an enumeration of the chunks, and rows against tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_connector.plan.kv_groups import (
    KvGroup,
    chunks_before_end,
    held_tokens,
    last_end_tokens,
    read_chunks,
    stored_chunks,
)

sizes = st.sampled_from([4, 8, 16, 32, 64])


def enumerated(tokens: int, whole: int, group: KvGroup, *, every: bool) -> int:
    """Chunks of a window that vLLM offers, from the first that a prefix of the prompt is read by."""
    size, window = group.chunk_tokens, -(-group.window_tokens // group.chunk_tokens)
    end = last_end_tokens(tokens, whole, rewinds=True)
    begin = 0 if every else max(0, end // size - chunks_before_end(group.window_tokens, size))
    in_whole = whole // size
    return sum(chunk % in_whole >= in_whole - window for chunk in range(begin, tokens // whole * in_whole))


@given(st.integers(0, 40), sizes, st.sampled_from([64, 128, 256]), st.integers(1, 700), st.booleans(), st.data())
def test_windows_are_counted_as_they_are_stored(wholes, size, whole, window, every, data):
    group, tokens = KvGroup(size, window), wholes * whole + data.draw(st.integers(0, whole - 1))
    expected = enumerated(tokens, whole, group, every=every) if tokens else 0

    assert stored_chunks([KvGroup(whole), group], tokens, every_window=every) == [wholes, expected]
    in_wholes = wholes * whole // size
    assert read_chunks([KvGroup(whole), group], tokens) == [wholes, min(in_wholes, -(-window // size))]


def test_a_state_is_stored_for_each_end_of_a_prompt_or_each_step_and_read_once():
    groups = [KvGroup(1024), KvGroup(1024, has_states=True)]

    assert stored_chunks(groups, 32_800, every_window=True) == [32, 4]
    assert stored_chunks(groups, 32_800, every_window=False) == [32, 1]
    assert stored_chunks(groups, 32_768, every_window=False) == [32, 2]  # it ends with a chunk
    assert stored_chunks(groups, 1000, every_window=False) == [0, 0]
    assert read_chunks(groups, 32_768) == [32, 1]


def test_without_full_attention_every_window_is_stored():
    assert stored_chunks([KvGroup(16, 32)], 1600, every_window=False) == [100]
    assert stored_chunks([KvGroup(16, has_states=True)], 16_384, every_window=False) == [2]


@pytest.mark.parametrize("every", [True, False])
@given(rows=st.integers(0, 10_000), prompt=st.integers(1, 5_000), window=st.integers(0, 600))
def test_rows_hold_a_prompt_if_they_are_as_many_as_it_stores(every, rows, prompt, window):
    groups = [KvGroup(128), KvGroup(128, window), KvGroup(128, window)]
    whole_prompt = -(-prompt // 128) * 128
    needed = sum(stored_chunks(groups, whole_prompt, every_window=every))

    held = held_tokens(groups, rows, prompt, every_window=every)

    assert (held >= prompt) == (rows >= needed)
    assert held % 128 == 0
