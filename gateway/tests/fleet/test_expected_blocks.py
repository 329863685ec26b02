from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.fleet.expected_blocks import EXPECTED_BYTES, Expected, ExpectedBlocks

A, B = 1, 16  # device bits


def devices(blocks: ExpectedBlocks, key: int, now: float = 0.0) -> int:
    expected = blocks.by_key.get(key)
    return expected.mask if expected is not None and expected.until > now else 0


def expect(
    blocks: ExpectedBlocks, device: int, keys: list[int], until: float = 10.0, room: int = 1000
) -> tuple[Expected, ...]:
    return blocks.expect(device, keys, until, now=0.0, bytes_max=room * EXPECTED_BYTES)


def test_a_prompt_that_was_not_accepted_leaves_nothing() -> None:
    blocks = ExpectedBlocks()
    expected = expect(blocks, A, [1, 2, 3])
    assert [devices(blocks, key) for key in (1, 2, 3, 4)] == [A, A, A, 0]

    blocks.withdraw(expected)

    assert not blocks.by_key


def test_blocks_that_two_prompts_share_are_kept_for_the_one_that_was_accepted() -> None:
    blocks = ExpectedBlocks()
    refused = expect(blocks, A, [1, 2])
    expect(blocks, A, [1, 2, 3])

    blocks.withdraw(refused)

    assert [devices(blocks, key) for key in (1, 2, 3)] == [A, A, A]


def test_a_shared_start_is_expected_of_both_engines_and_the_rest_of_one() -> None:
    blocks = ExpectedBlocks()
    expect(blocks, A, [1, 2])
    expect(blocks, B, [1, 3])

    assert [devices(blocks, key) for key in (1, 2, 3)] == [A | B, A, B]


def test_an_announced_block_is_expected_of_the_other_engines_alone() -> None:
    blocks = ExpectedBlocks()
    expect(blocks, A, [1, 2])
    expect(blocks, B, [2])

    blocks.announced(1, A)
    blocks.announced(2, A)

    assert [devices(blocks, key) & ~A for key in (1, 2)] == [0, B]
    assert 1 not in blocks.by_key


def test_a_removed_block_and_a_cleared_device_are_forgotten() -> None:
    blocks = ExpectedBlocks()
    expect(blocks, A, [1, 2])
    expect(blocks, B, [2, 3])

    blocks.forget(1)
    assert [devices(blocks, key) for key in (1, 2, 3)] == [0, A | B, B]
    blocks.forget_devices(A)

    assert [devices(blocks, key) for key in (1, 2, 3)] == [0, B, B]


prompts = st.tuples(
    st.sampled_from([A, B]), st.lists(st.integers(0, 12), unique=True, max_size=8), st.integers(1, 9), st.booleans()
)


@given(st.lists(prompts, max_size=40))
def test_room_is_bounded_and_given_back(routed: list[tuple[int, list[int], int, bool]]) -> None:
    blocks = ExpectedBlocks()
    for now, (device, keys, seconds, refused) in enumerate(routed):
        expected = blocks.expect(device, keys, now + seconds, now=now, bytes_max=10 * EXPECTED_BYTES)
        assert blocks.bytes <= 10 * EXPECTED_BYTES
        if refused:
            blocks.withdraw(expected)
    blocks.expect(A, [], 1e9, now=1e6, bytes_max=0)
    assert not blocks.by_key
