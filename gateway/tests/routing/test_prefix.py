from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.routing import prefix
from spillway_gateway.routing.prefix import RUN_BLOCKS, KeyChains, chain_blocks, namespace_key, token_block_keys

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=60)
block_sizes = st.integers(1, 9)


@given(tokens, tokens, block_sizes)
def test_equal_starts_have_equal_keys_and_the_first_difference_ends_them(
    left: list[int], right: list[int], block_tokens: int
) -> None:
    namespace = namespace_key("m")
    left_keys = token_block_keys(namespace, left, block_tokens)
    right_keys = token_block_keys(namespace, right, block_tokens)

    shared = 0
    while shared < min(len(left), len(right)) and left[shared] == right[shared]:
        shared += 1
    same = sum(1 for pair in zip(left_keys, right_keys, strict=False) if pair[0] == pair[1])
    assert same == min(shared // block_tokens, len(left_keys), len(right_keys))


@given(tokens, block_sizes)
def test_only_full_blocks_have_keys(ids: list[int], block_tokens: int) -> None:
    assert len(token_block_keys(namespace_key("m"), ids, block_tokens)) == len(ids) // block_tokens


def test_model_adapter_and_salt_separate_namespaces() -> None:
    names = [
        namespace_key("m"),
        namespace_key("n"),
        namespace_key("m", "adapter"),
        namespace_key("m", None, "adapter"),
        namespace_key("m", "a", "b"),
        namespace_key("m", "b", "a"),
    ]

    assert len(set(names)) == len(names)


@given(st.binary(max_size=50), st.binary(max_size=20), block_sizes)
def test_text_keys_of_a_longer_prompt_start_with_those_of_the_shorter(text: bytes, more: bytes, size: int) -> None:
    shorter = chain_blocks(7, text, size)

    assert chain_blocks(7, text + more, size)[: len(shorter)] == shorter


@given(
    st.lists(
        st.tuples(
            st.sampled_from([1, 2]),  # namespaces
            st.sampled_from([4, 8]),
            st.lists(st.sampled_from([b"a", b"b", b"\0"]), max_size=4),  # runs
            st.binary(max_size=40),
        ),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from([1, 3, 100]),
)
def test_remembered_keys_are_those_that_hashing_gives(
    prompts: list[tuple[int, int, list[bytes], bytes]], runs_max: int
) -> None:
    chains = KeyChains(runs_max)
    for namespace, block_bytes, runs, rest in prompts:
        data = b"".join(run * (RUN_BLOCKS * block_bytes) for run in runs) + rest
        assert chains.keys(namespace, data, block_bytes) == chain_blocks(namespace, data, block_bytes)
        assert len(chains) <= runs_max


def test_a_prompt_has_a_bounded_number_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "KEYS_MAX", 3 * RUN_BLOCKS + 5)
    data = bytes(10 * RUN_BLOCKS * 4)
    assert KeyChains().keys(1, data, 4) == chain_blocks(1, data, 4)
    assert len(chain_blocks(1, data, 4)) == 3 * RUN_BLOCKS + 5


def test_a_prompt_that_extends_another_is_hashed_from_where_it_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    chains, hashed = KeyChains(), []
    data = bytes(4 * RUN_BLOCKS * 4)
    monkeypatch.setattr(
        prefix, "_hash", lambda block, key, hash_of=prefix._hash: hashed.append(0) or hash_of(block, key)
    )
    chains.keys(1, data, 4)
    assert len(hashed) == 4 * RUN_BLOCKS
    chains.keys(1, data + b"more", 4)
    assert len(hashed) == 4 * RUN_BLOCKS + 1
