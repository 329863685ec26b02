from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.routing.prefix import namespace_key, text_block_keys, token_block_keys

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
    shorter = text_block_keys(7, text, size)

    assert text_block_keys(7, text + more, size)[: len(shorter)] == shorter
