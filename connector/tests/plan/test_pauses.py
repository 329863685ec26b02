from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_connector.plan.pauses import OwnPauses, PauseLengths


def learned(
    pause_of: Callable[[random.Random, int], float], sessions: int = 20, pauses: int = 900, seed: int = 1
) -> tuple[PauseLengths, list[OwnPauses]]:
    """Return the pauses of a tenant and of its sessions, by number, that paused in turn."""
    rng, lengths = random.Random(seed), PauseLengths()
    own = [OwnPauses() for _ in range(sessions)]
    for at in range(pauses):
        lengths.add(own[at % sessions], pause_of(rng, at % sessions))
    return lengths, own


@pytest.mark.parametrize("idle_seconds", [0.0, 0.1, 1.0, 5.0, 20.0, 40.0])
def test_exponential_pauses_say_nothing_of_the_rest_of_one(idle_seconds: float):
    lengths, own = learned(lambda rng, session: rng.expovariate(1 / 30.0))
    for one in (OwnPauses(), *own):
        assert lengths.return_seconds(one, idle_seconds, 0.0) == pytest.approx(30.0, rel=0.25)


def test_a_session_that_is_idle_for_longer_than_the_brief_pauses_comes_back_after_a_long_one():
    lengths, own = learned(lambda rng, session: (10.0 if rng.random() < 0.7 else 300.0) * rng.uniform(0.8, 1.2))
    assert lengths.return_seconds(own[0], 2.0, 0.0) < 30.0
    assert lengths.return_seconds(own[0], 30.0, 0.0) > 200.0
    assert lengths.return_seconds(own[0], 200.0, 0.0) < 150.0


def test_sessions_whose_pauses_differ_are_each_expected_after_their_own():
    lengths, own = learned(lambda rng, session: rng.expovariate(1 / (5.0 if session % 2 else 200.0)))
    often, rarely = own[1::2], own[::2]
    assert max(lengths.return_seconds(one, 1.0, 0.0) for one in often) < 50.0
    assert min(lengths.return_seconds(one, 1.0, 0.0) for one in rarely) > 50.0


def test_the_longer_a_session_has_been_idle_the_likelier_it_has_ended():
    lengths, own = learned(lambda rng, session: rng.expovariate(1 / 30.0))
    away = [lengths.return_seconds(own[0], idle, 0.1) for idle in (30.0, 60.0, 120.0, 240.0, 1e3, 1e6)]
    assert away == sorted(away) and away[2] > 1.5 * away[0]


@pytest.mark.parametrize("seed", range(20))
def test_pauses_of_agents_are_taken_for_exponential_and_others_are_not(seed: int):
    def taken_for_exponential(pause_of: Callable[[random.Random, int], float]) -> bool:
        return learned(pause_of, pauses=450, seed=seed)[0].is_exponential

    assert PauseLengths().is_exponential
    assert taken_for_exponential(lambda rng, session: rng.expovariate(1 / 30.0))
    assert not taken_for_exponential(lambda rng, session: rng.expovariate(1 / (5.0 if session % 2 else 100.0)))
    assert not taken_for_exponential(lambda rng, session: 10.0 if rng.random() < 0.7 else 300.0)


def test_a_tenants_older_pauses_count_less():
    lengths, own = learned(lambda rng, session: rng.expovariate(1 / 30.0), pauses=600)
    rng = random.Random(2)
    for at in range(3_000):
        lengths.add(own[at % len(own)], rng.expovariate(1.0))
    assert lengths.return_seconds(OwnPauses(), 0.0, 0.0) < 2.0


@given(st.lists(st.floats(0.0, 1e9), max_size=60), st.floats(0.0, 1e12), st.floats(0.0, 1e3))
def test_some_time_is_said_whatever_pauses_were(pauses: list[float], idle: float, ended: float):
    lengths, own = PauseLengths(), OwnPauses()
    for pause in pauses:
        lengths.add(own, pause)
    for one in (own, OwnPauses()):
        away = lengths.return_seconds(one, idle, ended)
        assert math.isfinite(away) and away > 0
