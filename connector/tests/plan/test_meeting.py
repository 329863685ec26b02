from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_connector.plan.meeting import (
    JUMP_SECONDS,
    MARGIN,
    STEP_SECONDS,
    Rates,
    job_chunks_max,
    meeting_pays,
    meeting_point,
    step_tokens_max,
)

rates = st.builds(Rates, st.floats(0.01, 10_000), st.floats(0.01, 10_000))


@pytest.mark.parametrize(
    ("position", "loaded_from", "rates", "busy", "meet"),
    [
        (0, 100, Rates(1.0, 1.0), 0.0, 50),
        (0, 100, Rates(3.0, 1.0), 0.0, 75),
        (20.5, 100, Rates(3.0, 1.0), 0.0, 81),  # 80.125: a chunk is computed or loaded as a whole
        (0, 100, Rates(1.0, 1.0), 20.0, 40),  # 20 are loaded before computing goes on
        (50, 60, Rates(1.0, 1.0), 10.0, 50),  # all of it is loaded by then
        (60, 60, Rates(1.0, 1.0), 0.0, 60),
    ],
)
def test_the_meeting_point_of_known_rates(position, loaded_from, rates, busy, meet):
    assert meeting_point(position, loaded_from, rates, busy) == meet


@given(st.floats(0, 2000), st.integers(1, 2000), rates, st.floats(0, 100))
def test_the_load_is_there_when_computing_gets_to_the_meeting_point(position, more, given_rates, busy):
    loaded_from = math.ceil(position) + more
    meet = meeting_point(position, loaded_from, given_rates, busy)
    assert position <= meet <= loaded_from
    computing = busy + (meet - position) / given_rates.computed
    loading = (loaded_from - meet) / given_rates.loaded
    assert loading <= computing + 1e-6 * (1 + loading)
    earlier = meet - 1
    if earlier >= position:  # one chunk less to compute, one more to load: that would be late
        assert (loaded_from - earlier) / given_rates.loaded + 1e-6 * (1 + loading) >= busy + (
            earlier - position
        ) / given_rates.computed


@given(st.integers(0, 500), st.integers(0, 2000), rates)
def test_a_meeting_that_pays_is_sooner_than_computing_alone_with_its_jump(begin, chunks, given_rates):
    end = begin + chunks
    if not meeting_pays(begin, end, given_rates):
        return
    meet = meeting_point(begin, end, given_rates)
    alone = chunks / given_rates.computed
    assert begin <= meet < end
    assert (meet - begin) / given_rates.computed + JUMP_SECONDS <= MARGIN * alone + 1e-9


@pytest.mark.parametrize(
    ("chunks", "rates", "pays"),
    [
        (250, Rates(126.0, 57.0), True),  # 32,000 tokens: 1.98 s against 1.40
        (32, Rates(8.0, 4.0), True),
        (2, Rates(126.0, 57.0), False),  # 16 ms of computing: less than a jump
        (250, Rates(126.0, 5.0), False),  # a tier this slow saves 4 %
        (0, Rates(1.0, 1.0), False),
        (1, Rates(0.1, 0.05), False),  # one chunk is computed or loaded, not half of each
    ],
)
def test_what_pays(chunks, rates, pays):
    assert meeting_pays(0, chunks, rates) is pays


@given(st.integers(-500, 100_000), st.sampled_from([16, 128, 256]), rates)
def test_a_step_never_goes_beyond_the_meeting_point_and_is_not_too_short(distance, chunk_tokens, given_rates):
    tokens = step_tokens_max(distance, chunk_tokens, given_rates)
    assert tokens > 0
    if distance > 0:
        assert tokens <= distance
        assert tokens == distance or tokens % chunk_tokens == 0
        assert tokens >= min(distance, STEP_SECONDS * given_rates.computed * chunk_tokens)
    else:
        assert tokens >= chunk_tokens


@given(rates)
def test_a_job_is_at_least_one_chunk_and_about_a_second(given_rates):
    chunks = job_chunks_max(given_rates)
    assert chunks == 1 or chunks <= given_rates.loaded
