from __future__ import annotations

import json

import pytest
from system import legs_simulated
from system.legs_load import Kind, arrivals
from system.legs_simulated import LegsRun
from system.legs_systems import SYSTEMS

from spillway_gateway.config.disaggregation import DisaggregationConfig

LOAD = arrivals((Kind(8_192, 8, 1.5), Kind(256, 32, 8.0)), 1.0, 6.0, 3)


def run_of(name: str, prompts: str = "a") -> LegsRun:
    way = SYSTEMS[name]
    terms = DisaggregationConfig(mode=way.mode, strict_roles=way.strict, uncached_tokens_min=128)
    run = LegsRun(way, terms, engines=2, prompts=prompts)
    requests = run.run(LOAD)
    assert len(requests) == len(LOAD) and all(one.first_token_seconds > 0 for one in requests)
    assert all(len(one.ids) == one.kind.answer_tokens == len(one.gaps) + 1 for one in requests)
    return run


@pytest.mark.parametrize("name", ["auto", "auto_both"])
def test_auto_chooses_as_plain_does_request_by_request(name: str) -> None:
    assert run_of(name).chosen == run_of("plain").chosen


def test_always_takes_two_legs_and_strict_roles_keep_answers_on_decode_engines() -> None:
    assert run_of("always").legs == {"one": 0, "two": len(LOAD)}
    strict = run_of("auto_strict").chosen
    assert {engine for decision, engine in strict if decision == "one"} == {"engine-1"}


def test_the_price_of_two_legs_follows_transfers_that_are_slow() -> None:
    """No gate leaves a transfer of the engines' own connectors out: only the price keeps further prompts from it."""
    terms = DisaggregationConfig(mode="auto", strict_roles=True, hand_over="connector")
    load = arrivals((Kind(8_192, 8, 3.0),), 1.0, 20.0, 3)
    shares = {}
    for slower in (1.0, 100.0):
        run = LegsRun(SYSTEMS["auto_strict"], terms, engines=2, prompts="a", transfers_slower=slower)
        run.run(load)
        shares[slower] = run.legs["two"] / len(load)
    assert 0 < shares[100.0] < shares[1.0] / 2


def test_runs_are_compared_with_those_of_plain(tmp_path) -> None:
    output = tmp_path / "simulated.json"
    arguments = ["--systems", "plain", "auto", "--mixes", "decode_heavy", "--runs", "2", "--seconds", "2"]
    assert legs_simulated.main([*arguments, "--output", str(output)]) == 0
    written = json.loads(output.read_text())
    assert written["auto_decode_heavy_share_of_two_legs"] == 0
    assert written["auto_decode_heavy_goodput_requests_per_second_over_plain"] == 1.0
