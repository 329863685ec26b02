"""A full CPU tier that follows sessions finds no less than LRU does, whatever clients ask for."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

import pytest
from retention import hit_ratio, opened
from retention_loads import (
    Request,
    brief_sessions,
    closed_loop,
    one_name,
    requests_of,
    two_kinds,
    two_pauses,
    working_set_chunks,
    zipf_prompts,
)
from traces.session import Trace
from traces.synthetic import agents

SEEDS = range(2)
MARGIN = 0.01  # of the tokens that are asked for


def _zipf(seed: int, exponent: float, *, moving: bool = False, once: float = 0.0) -> list[Request]:
    return zipf_prompts(seed, exponent, prompts=150, asked=2_000, tokens=256, moving=moving, once=once)


def _agents(seed: int) -> Trace:
    sizes = {"common_tokens": 512, "opening_tokens": 1_024, "turn_tokens": 256, "answer_tokens": 128}
    return agents(seed=seed, sessions=40, sessions_per_second=0.1, turns=20, **sizes)


# By name: how many times the tier's size the working set has, and the requests of a seed.
LOADS: dict[str, tuple[float, Callable[[int], list[Request]]]] = {
    "zipf": (8.0, lambda seed: _zipf(seed, 1.0)),
    "flat zipf": (3.0, lambda seed: _zipf(seed, 0.6)),
    "zipf that moves": (8.0, lambda seed: _zipf(seed, 1.0, moving=True)),
    "zipf beside prompts that are asked once": (8.0, lambda seed: _zipf(seed, 1.0, once=0.5)),
    "pauses by chance": (2.0, lambda seed: requests_of(_agents(seed))),
    "pauses of two lengths": (6.0, lambda seed: requests_of(two_pauses(_agents(seed), seed))),
    "agents of two kinds": (3.0, lambda seed: requests_of(two_kinds(_agents(seed), seed))),
    "several conversations with one name": (2.0, lambda seed: one_name(requests_of(_agents(seed)))),
    "a closed loop": (1.5, lambda seed: requests_of(closed_loop(seed, agents_count=10, turns=15))),
    "brief sessions": (1.5, lambda seed: requests_of(brief_sessions(seed, sessions=3))),
}


def _found(policy: str, load: str, seed: int) -> float:
    live_to_tier, make = LOADS[load]
    requests = make(seed)
    with opened(policy, int(working_set_chunks(requests) / live_to_tier)) as cache:
        return hit_ratio(cache, requests)


@pytest.mark.parametrize("load", LOADS)
def test_sessions_find_no_less_than_lru(load: str):
    found = {
        policy: fmean(_found(policy, load, seed) for seed in SEEDS)
        for policy in ("lru", "retained_recognised", "retained_names")
    }
    assert min(found.values()) >= found["lru"] - MARGIN, found
