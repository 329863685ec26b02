from __future__ import annotations

import math

from gateway_load.cells import Cell, Memory, Probed
from gateway_load.report import LIMIT, Results, flat, goals, render


def cell(rate: float, p50: float, p99: float, *, failures: int = 0) -> Cell:
    return Cell(rate, p50, p99, p50, p99, 100.0, 0.5, 2.0, 1.0, 90.0, failures, "")


def results(own: float, stack: float, cache_aware: float, sglang: float = 6000.0) -> Results:
    found = Results()
    for name, rate, p50 in (
        (LIMIT, 9000.0, 0.1),
        ("spillway", own, 0.4),
        ("production-stack prefixaware", stack, 1.2),
        ("vllm-router cache_aware", cache_aware, 0.6),
        ("sglang-router cache_aware", sglang, 0.6),
    ):
        for concurrent in (1, 64, 512):
            for stream in (False, True):
                rounds = [cell(rate * share, p50, 4 * p50) for share in (1.0, 0.9, 1.1)]
                found.cells[name, stream, concurrent] = rounds
    found.probed["spillway"] = Probed(1000, 60, 0, 12.0, 1.0, 0, "")
    found.memory = Memory(1000, [100.0, 110, 120, 121, 121, 121, 122, 122, 122, 122], 0)
    return found


def test_each_goal_is_met_missed_or_unmeasured() -> None:
    assert set(goals(results(3000, 1000, 2500)).values()) == {"met"}
    missed = goals(results(2400, 1000, 2500))
    assert [goal for goal, outcome in missed.items() if outcome == "missed"] == [
        "at least 3x production-stack prefixaware's requests/s at 64",
        "no fewer requests/s at 64 than vllm-router cache_aware",
        "at least half of sglang-router cache_aware's requests/s at 64",
    ]
    assert set(goals(Results()).values()) == {"unmeasured"}


def test_a_stream_or_probe_that_failed_misses_its_goal() -> None:
    found = results(3000, 1000, 2500)
    found.probed["spillway"] = Probed(1000, 60, 1, 1000.0, 1.0, 0, "")

    assert goals(found)["1,000 streams at once without a failed probe or stream"] == "missed"


def test_figures_are_medians_with_units_in_their_names() -> None:
    found = results(3000, 1000, 2500)
    found.left_out["litellm"] = "cannot be installed here"
    figures = flat(found)

    assert figures["spillway_plain_64_requests_per_second"] == 3000
    assert math.isclose(float(figures["spillway_plain_1_added_p50_ms"]), 0.3)
    assert figures["spillway_distinct_second_half_growth_ratio"] == round(122 / 121 - 1, 4)
    assert figures["litellm_left_out"] == "cannot be installed here"
    assert "engines_alone_plain_1_added_p50_ms" not in figures


def test_the_tables_name_every_router_and_what_was_left_out() -> None:
    found = results(3000, 1000, 2500)
    found.left_out["litellm"] = "no network"
    found.cells["slow", False, 512] = [cell(0.0, math.nan, math.nan)]
    text = render(found)

    assert all(
        name in text for name in ("spillway", "production-stack prefixaware", LIMIT, "left out: litellm: no network")
    )
    assert "nan" not in text
