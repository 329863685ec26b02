from __future__ import annotations

import random

import pytest
from soak.flatness import POINTS_LEAST, second_half, trend


def series(rise_per_second: float, noise: float, points: int = 100) -> list[tuple[float, float]]:
    chance = random.Random(f"{rise_per_second} {noise}")
    return [(5.0 * n, 1000.0 + rise_per_second * 5.0 * n + chance.uniform(-noise, noise)) for n in range(points)]


def test_a_leak_in_noise_is_seen() -> None:
    seen = trend(series(0.2, 20.0))
    assert seen is not None
    assert seen.rise == pytest.approx(0.2 * 495.0, rel=0.2)
    assert seen.grows(50.0)
    assert not seen.grows(200.0), "within what is allowed"


def test_noise_alone_is_flat() -> None:
    seen = trend(series(0.0, 200.0))
    assert seen is not None
    assert not seen.grows(0.0) or seen.z < 3


def test_outliers_do_not_make_a_trend() -> None:
    points = series(0.0, 1.0)
    points[-1] = (points[-1][0], 1e9)
    seen = trend(points)
    assert seen is not None
    assert not seen.grows(10.0)


def test_a_constant_is_flat_and_a_staircase_is_not() -> None:
    constant = trend([(5.0 * n, 7.0) for n in range(50)])
    stairs = trend([(5.0 * n, float(n // 5)) for n in range(50)])
    assert constant is not None and stairs is not None
    assert (constant.rise, constant.z) == (0.0, 0.0)
    assert stairs.grows(4.0)


def test_the_first_half_does_not_count() -> None:
    filling = [(5.0 * n, float(min(n, 50))) for n in range(101)]
    whole, later = trend(filling), trend(second_half(filling))
    assert whole is not None and later is not None
    assert whole.grows(4.0)
    assert not later.grows(4.0)


def test_short_series_say_nothing() -> None:
    assert trend([(float(n), 1.0) for n in range(POINTS_LEAST - 1)]) is None
    assert trend([(float(n), 1.0) for n in range(60)]) is None, "a minute only"
    assert second_half([]) == []
