"""Numbers of prefill and decode engines that a trace needs."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_ctl.errors import CommandError
from spillway_ctl.plan_ratio import USED_SHARE, ApartRates, apart, apart_line

RATES = ApartRates(prefill_tokens_per_second=1_000.0, token_seconds=0.05, answers=10)


def line(at_seconds: float, prompt: int, answer: int, *ids: int) -> str:
    lengths = {"input_length": prompt, "output_length": answer}
    return json.dumps({"timestamp": 1000.0 * at_seconds, **lengths, "hash_ids": list(ids)})


def test_the_busiest_minute_decides_and_what_was_there_before_is_cached():
    found = apart(
        [line(0, 60_000, 12_000, 1, 2), line(1, 120_000, 0, 1, 2, 3, 4), "", line(70, 1_000, 1_000, 9)], RATES
    )
    assert (found.requests, found.cached_share) == (3, pytest.approx(60_000 / 181_000))
    assert found.prefill_busiest == pytest.approx(2.0), "60,000 tokens of the first and half of the second, in 60 s"
    assert found.decode_busiest == pytest.approx(1.0), "12,000 tokens of 50 ms, ten answers at once"
    assert (found.prefill_mean, found.decode_mean) == (pytest.approx(121 / 120), pytest.approx(65 / 120))
    assert (found.prefill_engines, found.decode_engines) == (3, 2)
    assert "3 prefill and 2 decode engines" in apart_line(found)


REQUESTS = st.tuples(
    st.floats(0, 600), st.integers(1, 9_000), st.integers(0, 900), st.lists(st.integers(0, 9), min_size=1, max_size=6)
)


@given(st.lists(REQUESTS, min_size=1, max_size=20))
def test_engines_suffice_for_every_minute(requests):
    requests.sort(key=lambda each: each[0])
    found = apart([line(at, prompt, answer, *ids) for at, prompt, answer, ids in requests], RATES)
    assert 0 <= found.cached_share <= 1
    for engines, busiest, mean in (
        (found.prefill_engines, found.prefill_busiest, found.prefill_mean),
        (found.decode_engines, found.decode_busiest, found.decode_mean),
    ):
        assert mean <= busiest + 1e-9 and busiest <= engines * USED_SHARE + 1e-9


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ([], "no request in it"),
        (["{}"], "line 1: KeyError"),
        (["[1]"], "line 1: TypeError"),
        ([line(0, 5, 5, 1), "x"], "line 2"),
        ([line(0, 0, 5, 1)], "line 1: a time or a length below its least"),
        ([line(0, 5, 5)], "no hash_ids"),
        (['{"timestamp": NaN, "input_length": 1, "output_length": 1, "hash_ids": [1]}'], "line 1"),
    ],
)
def test_what_is_no_trace_is_refused(lines, sentence):
    with pytest.raises(CommandError, match=sentence):
        apart(lines, RATES)
