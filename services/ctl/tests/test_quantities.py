from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_ctl.quantities import (
    format_age,
    format_bytes,
    format_seconds,
    format_share,
    parse_age_seconds,
    parse_rate,
    plural,
)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("30m", 1800), ("1.5h", 5400), ("7d", 604_800), ("2 W", 1_209_600)]
)
def test_ages_are_read(text: str, seconds: float) -> None:
    assert parse_age_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "7", "d", "-1d", "1y", "1d2h", "7 days ago"])
def test_what_is_no_age_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="7d"):
        parse_age_seconds(text)


def test_rates_are_read() -> None:
    assert parse_rate("200MiB/s") == 200 << 20
    assert parse_rate("1GB") == 10**9
    assert parse_rate("none") is None


@pytest.mark.parametrize("text", ["0", "fast", "0.1B", "-3MiB", "MiB/s"])
def test_what_is_no_rate_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="200MiB/s"):
        parse_rate(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.96, "10.0 s"),
        (42.9, "42 s"),
        (180, "3 min"),
        (7500, "2 h 5 min"),
        (7200, "2 h"),
        (86_400, "1 d"),
        (90_000, "1 d 1 h"),
        (25 * 86_400 + 5000, "25 d"),
    ],
)
def test_seconds_are_shown_in_units_that_fit(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@given(st.floats(min_value=0, max_value=1e12))
def test_any_duration_is_short(seconds: float) -> None:
    assert 0 < len(format_seconds(seconds)) < 20


def test_ages_in_the_future_are_said_to_be_there() -> None:
    assert format_age(1000.0, 940.0) == "60 s ago"
    assert format_age(1000.0, 1000.5) == "0.0 s ago"
    assert format_age(1000.0, 8200.0) == "2 h in the future"


def test_counts_shares_and_sizes() -> None:
    assert (plural(1, "frame"), plural(1234, "frame")) == ("1 frame", "1,234 frames")
    assert (format_share(0, 10), format_share(1, 10_000), format_share(62, 100), format_share(1, 0)) == (
        "0%",
        "<1%",
        "62%",
        "100%",
    )
    assert format_bytes(3 << 20) == "3.0 MiB"
