"""Rounds of bench/gpu_chat_turns.py and the reports on them; the engines themselves need a GPU."""

from __future__ import annotations

import argparse
import math
from typing import Any

import pytest
from gpu import BLOCK_TOKENS
from gpu_chat_turns import CONFIGURATIONS, GROUPS, Sizes, render, report_of, rounds_in_turn, transfer_config

GIVEN = argparse.Namespace(eager=False, conversations=2, turns=2, tokens=300, rounds=6, requests=4, answer=1024)
GIVEN.seconds = math.inf


def turns_of(cached: list[list[int]], seconds: list[list[float]]) -> list[list[tuple[int, int, float]]]:
    return [
        [(300 if turn == 0 else 900, one, first) for one, first in zip(cached[turn], seconds[turn], strict=True)]
        for turn in range(len(cached))
    ]


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_other_prompts_displace_a_conversation_from_where_it_may_not_be(name: str) -> None:
    sizes = Sizes(name, GIVEN)
    filled = sizes.fillers * sizes.conversation
    assert filled >= sizes.device
    if name in GROUPS[1]:
        assert sizes.conversation < sizes.cpu <= filled
    else:
        per_round = GIVEN.conversations * sizes.conversation + filled
        assert sizes.cpu >= per_round, "what is asked between two turns would displace the conversations"
    assert sizes.device * BLOCK_TOKENS > sizes.filler_tokens


def test_configurations_differ_in_what_they_keep() -> None:
    assert transfer_config("off", Sizes("off", GIVEN)) is None
    extra: dict[str, dict[str, Any]] = {}
    for name in CONFIGURATIONS[1:]:
        config = transfer_config(name, Sizes(name, GIVEN))
        assert config is not None
        extra[name] = config["kv_connector_extra_config"]
    assert [extra[name]["generated_tokens"] for name in extra] == ["off", "on", "auto", "on"]
    assert [name for name in extra if "secondary_tiers" in extra[name]] == ["nvme"]
    assert "prefill_tokens_per_second" not in extra["nvme"]


def test_report_and_table_of_turns() -> None:
    measured = {
        "turns": {
            "off": turns_of([[0, 0], [0, 0]], [[0.02, 0.03], [0.06, 0.08]]),
            "generated": turns_of([[0, 0], [512, 384]], [[0.02, 0.02], [0.03, 0.05]]),
        }
    }
    report = report_of(measured, GIVEN)
    assert report["turn_2_most_share"] == round(512 / 900, 3)  # 599 of 600 tokens are computed: four whole blocks
    assert report["generated_turn_2_cached_share"] == round(448 / 900, 3)
    assert report["generated_turn_2_least_cached_share"] == round(384 / 900, 3)
    assert report["off_turn_2_first_token_seconds"] == 0.07
    table = render(report).splitlines()
    assert table[-1].split() == ["2", "900", "57%", "0%", "70.0", "(60.0,", "80.0)", "50%", "40.0", "(30.0,", "50.0)"]


def test_speeds_are_compared_within_rounds_that_all_have() -> None:
    off = [100.0, 110.0, 90.0, 100.0, 105.0, 95.0]
    measured = {"decode": {"off": off, "prompts": [value * 0.99 for value in off], "generated": [98.0, 107.8, 88.2]}}
    report = report_of(measured, GIVEN)
    assert report["decode_rounds_count"] == 3
    assert report["prompts_decode_ratio_to_off"] == 0.99
    assert (report["generated_decode_ratio_to_off_low"], report["generated_decode_ratio_to_off_high"]) == (0.98, 0.98)
    assert report["generated_decode_ratio_to_prompts"] == round(0.98 / 0.99, 4)
    assert "off_decode_ratio_to_prompts" not in report
    assert "0.9800 of off (0.9800 to 0.9800)" in render(report)


def test_what_auto_decides_parts_its_rounds() -> None:
    measured = {
        "decode": {"prompts": [100.0] * 6, "generated": [97.0] * 6, "auto": [97.0, 97.0, 90.0, 101.0, 99.0, 101.0]},
        "given_up": {"auto": [False, False, True, True, True, True]},
    }
    report = report_of(measured, GIVEN)
    assert (report["auto_keeps_decode_rounds_count"], report["auto_gave_up_decode_rounds_count"]) == (2, 3)
    assert report["auto_keeps_decode_ratio_to_prompts"] == 0.97
    assert report["auto_gave_up_decode_ratio_to_prompts"] == 1.01
    assert report["auto_gave_up_decode_ratio_to_generated"] == round(101 / 97, 4)
    assert "1.0100 of prompts (0.9900 to 1.0100)" in render(report)


def test_auto_that_decides_nothing_has_one_row() -> None:
    report = report_of(
        {"decode": {"prompts": [100.0] * 6, "auto": [98.0] * 6}, "given_up": {"auto": [False] * 6}}, GIVEN
    )
    assert report["auto_keeps_decode_rounds_count"] == 6
    assert "auto_gave_up" not in render(report)


def test_no_round_begins_after_the_time_is_over() -> None:
    given = argparse.Namespace(rounds=6, seconds=-1.0)
    assert not list(rounds_in_turn({"off": Echo()}, given, "decode"))


def test_first_tokens_are_compared_within_rounds_of_engines_in_turn() -> None:
    off = [[0.02, 0.03, 0.02], [0.04, 0.04, 0.05]]
    measured = {"first": {"off": off, "generated": [[0.03, 0.09, 0.03], [0.06, 0.06, 0.01]], "nvme": off}}
    report = report_of(measured, GIVEN)
    assert (report["off_first_token_seconds"], report["off_first_prompts_count"]) == (0.035, 6)
    assert report["generated_first_token_seconds_p90"] == 0.09
    assert report["generated_first_token_ratio_to_off"] == 1.5
    assert "nvme_first_token_ratio_to_off" not in report, "it ran by itself"
    assert "1.500 of off (1.500 to 1.500)" in render(report)


class Echo:
    """An engine that answers with the round's own words."""

    def round(self, line: str) -> str:
        return f'"{line}"'


def test_the_first_round_warms_up_and_every_engine_answers_each() -> None:
    rounds = list(rounds_in_turn({"off": Echo(), "prompts": Echo()}, GIVEN, "first"))

    assert rounds == [{"off": f"first {number}", "prompts": f"first {number}"} for number in range(GIVEN.rounds)]
