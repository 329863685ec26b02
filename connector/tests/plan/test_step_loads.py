from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_connector.plan.step_loads import load_within_step, whole_blocks_before_last_token


@pytest.mark.parametrize(
    ("blocks", "before", "others", "rate", "within"),
    [
        (10_000, 0, False, None, True),  # no request waits
        (1, 0, True, None, False),  # what others would wait is unknown
        (20, 0, True, 1000.0, True),
        (21, 0, True, 1000.0, False),
        (10, 10, True, 1000.0, True),
        (10, 11, True, 1000.0, False),  # the loads of a step add up
    ],
)
def test_others_wait_no_longer_than_the_bound(blocks, before, others, rate, within):
    found = load_within_step(blocks, before, others=others, blocks_per_second=rate, others_wait_ms_max=20.0)
    assert found is within


@given(st.integers(0, 20), st.integers(0, 400), st.integers(1, 400), st.integers(1, 32))
def test_a_step_computes_a_token_and_writes_to_no_block_that_it_loads(computed_blocks, loadable, rest, block_tokens):
    computed = computed_blocks * block_tokens
    total = computed + rest
    tokens = whole_blocks_before_last_token(computed, min(loadable, rest), total, block_tokens)
    assert tokens % block_tokens == 0
    assert 0 <= tokens <= loadable
    assert computed + tokens < total
    assert tokens + block_tokens > min(loadable, rest - 1), "no whole block more"
