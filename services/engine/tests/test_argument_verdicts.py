"""Verdicts by a small parser that is built as vLLM's is; services/engine/tests/vllm has vLLM's own."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_engine import argument_verdicts as module
from spillway_engine.argument_verdicts import ServerParser, argument_verdicts, minor_version


def built() -> ServerParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.error = module._raise  # type: ignore[method-assign]
    parser.add_argument("model_tag", nargs="?")
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--share", type=float)
    parser.add_argument("--config", "-c", type=json.loads)
    parser.add_argument("--policy", choices=["fcfs", "priority"])
    parser.add_argument("--eager", action=argparse.BooleanOptionalAction)
    parser.add_argument("--trust", action="store_true")
    parser.add_argument("--names", nargs="+")
    return ServerParser(parser, "0.32")


SERVER = built()
FLAGS = [name for action in SERVER.parser._actions for name in action.option_strings]
WORDS = st.one_of(
    st.sampled_from([*FLAGS, *(f"{flag}=1" for flag in FLAGS), "--max-num", "--egar", "-x", "-1", "-", "--", ""]),
    st.text(max_size=6),
    st.integers().map(str),
)


@given(st.lists(WORDS, max_size=7))
def test_a_list_has_a_verdict_if_and_only_if_the_parser_refuses_it(arguments: list[str]) -> None:
    found = argument_verdicts(arguments, SERVER)

    assert bool(found) is (SERVER.refusal(arguments) is not None)
    assert all(verdict.problem and verdict.remedy for verdict in found)
    assert all(verdict.index is None or verdict.index < len(arguments) for verdict in found)


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("--max-num-seqs=many", '--max-num-seqs: "many" given, a whole number needed; write the number alone'),
        ("--max-num-seqs=1.5", '--max-num-seqs: "1.5" given, a whole number needed; write the number alone'),
        ("--share=half", '--share: "half" given, a number needed; write the number alone'),
        ("--config=a", "--config: text of 1 characters given that is no JSON, which this argument takes; write a map"),
        ("--config={'a': 1}", "--config: text of 8 characters given that is no JSON; close every brace and quote"),
        ("--policy=fifo", '--policy: "fifo" given, one of fcfs, priority needed; write one of these'),
        ("--policy=prioriti", "did you mean priority?"),
        ("--eager=true", "--eager takes no value; write it alone, or --no-eager for the opposite"),
        ("--trust=true", "--trust takes no value; write it alone"),
        ("--max-num-seqs", "--max-num-seqs has no value; write --flag=value, or flag and value as two entries"),
        ("--max-num", "--max-num is the beginning of --max-num-seqs, --max-num-batched-tokens; write one of these"),
        ("--eagr", "--eagr is no argument of vLLM 0.32; did you mean --eager?"),
        ("--quite_else=1", "--quite-else is no argument of vLLM 0.32; remove it, or use an image whose vLLM knows it"),
        ("word", "no flag before it takes this value; write --flag=value, or flag and value as two entries"),
    ],
)
def test_a_mistake_is_told_with_what_is_needed_and_the_remedy(argument: str, sentence: str) -> None:
    [verdict] = argument_verdicts([argument], SERVER)

    assert sentence in f"{verdict.problem}; {verdict.remedy}"


def test_every_mistake_is_told_at_once_and_values_by_their_place() -> None:
    found = argument_verdicts(
        ["--eagr", "--max-num-seqs", "8", "9", "--policy", "x", "--share", "-1", "--eager"], SERVER
    )

    assert [(verdict.setting, verdict.problem[:6]) for verdict in found] == [
        ("extraArgs", "--eagr"),
        ("extraArgs[3]", "no fla"),
        ("extraArgs", "--poli"),
    ]


def test_long_values_are_not_repeated() -> None:
    [verdict] = argument_verdicts([f"--max-num-seqs={'7x' * 100}"], SERVER)

    assert "text of 200 characters given" in verdict.problem and "7x" not in verdict.problem


@dataclass
class AttentionConfig:
    backend: str = ""


@pytest.mark.parametrize(
    ("message", "problem", "remedy"),
    [
        (
            "bakend\n  Unexpected keyword argument",
            "bakend is no key of AttentionConfig",
            "did you mean backend?",
        ),
        ("backend\n  Value error, Unknown backend.", "backend: Unknown backend.", "change this key of"),
        ("  Value error, two of these exclude each other", "two of these exclude each other", "change this"),
    ],
)
def test_what_a_configuration_of_vllm_says(
    message: str, problem: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(module.sys.modules, "vllm.config", argparse.Namespace(AttentionConfig=AttentionConfig))
    said = module._wrong_value("{}", f"1 validation error for AttentionConfig\n{message} [type=x]\n    For more")

    assert said[0] == problem and said[1].startswith(remedy)


def test_a_version_has_two_numbers() -> None:
    assert [minor_version(text) for text in ("0.32.1+cpu", "0.32", "0.23.0rc1")] == ["0.32", "0.32", "0.23"]
