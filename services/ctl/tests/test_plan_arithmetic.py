"""Break-even and first tokens against figures worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_ctl.plan_arithmetic import Rates, break_even_bytes_per_second, first_token

QWEN3_14B_TOKEN_BYTES = 163_840  # 2 x 40 layers x 8 heads x 128 numbers x 2 bytes


def test_break_even_is_what_computing_makes_per_second():
    assert break_even_bytes_per_second(QWEN3_14B_TOKEN_BYTES, 10_000) == 1_638_400_000


def test_a_prompt_of_whole_chunks_and_one_token_computes_that_token_alone():
    rates = Rates(1_000, 16_384_000, 8_192_000)

    first = first_token(1_025, QWEN3_14B_TOKEN_BYTES, 128, rates)

    assert first.computed_seconds == pytest.approx(1.025)
    assert first.cpu_tier_seconds == pytest.approx(1_024 * 0.01 + 0.001)
    assert first.shared_tier_seconds == pytest.approx(1_024 * 0.03 + 0.001)


def test_a_prompt_of_whole_chunks_computes_its_last_chunk():
    first = first_token(1_024, QWEN3_14B_TOKEN_BYTES, 128, Rates(1_000, 16_384_000))

    assert first.cpu_tier_seconds == pytest.approx(896 * 0.01 + 0.128)


def test_what_needs_a_rate_that_is_not_given_is_not_told():
    assert first_token(1_000, 1, 128, Rates()).computed_seconds is None
    only_prefill = first_token(1_000, 1, 128, Rates(10))
    assert (only_prefill.computed_seconds, only_prefill.cpu_tier_seconds) == (100, None)
    assert first_token(1_000, 1, 128, Rates(10, 10)).shared_tier_seconds is None
    assert first_token(128, 1, 128, Rates(10, 10, 10)).cpu_tier_seconds is None


rate = st.floats(1, 1e12)


@given(st.integers(130, 100_000), st.integers(1, 1 << 20), rate, rate)
def test_a_load_is_shorter_exactly_above_break_even(tokens, bytes_per_token, prefill, copy):
    first = first_token(tokens, bytes_per_token, 128, Rates(prefill, copy))
    break_even = break_even_bytes_per_second(bytes_per_token, prefill)

    if copy > break_even * 1.001:
        assert first.cpu_tier_seconds < first.computed_seconds
    if copy < break_even * 0.999:
        assert first.cpu_tier_seconds > first.computed_seconds
