"""The checks that run in vLLM's process before vLLM starts."""

from __future__ import annotations

import json
import os
import socket
import sys
from argparse import ArgumentParser
from pathlib import Path

import pytest

from spillway_connector.setting_names import SettingNames
from spillway_engine import argument_verdicts, server
from spillway_engine.argument_verdicts import ArgumentVerdictError, ServerParser
from spillway_engine.pod_channel import ENVIRONMENT_VARIABLE, REFUSED_EXIT_CODE, PodBrief

NAMES = SettingNames(others="engine.{path}")


@pytest.fixture
def parser(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a parser that knows the flag --eager alone in place of vLLM's."""
    parser = ArgumentParser(add_help=False)
    parser.error = argument_verdicts._raise  # type: ignore[method-assign]
    parser.add_argument("model_tag", nargs="?")
    parser.add_argument("--eager", action="store_true")
    monkeypatch.setattr(server, "installed_parser", lambda: ServerParser(parser, "0.32"))


def test_sentences_name_the_setting(parser: None) -> None:
    assert server.refusal(["--eagr", "--eager", "x"], NAMES) == (
        "engine.extraArgs: --eagr is no argument of vLLM 0.32; did you mean --eager?\n"
        "engine.extraArgs[2]: no flag before it takes this value; write --flag=value, or flag and value as two entries"
    )
    assert server.refusal(["--eager"], NAMES) is None


def test_a_refusal_fits_into_one_message(parser: None) -> None:
    text = server.refusal([f"--quite-else-{index}" for index in range(500)], NAMES) or ""

    assert text.endswith("\nand 480 more") and len(text) < 8_000


def test_a_vllm_without_such_a_parser_judges_when_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> ServerParser:
        raise ArgumentVerdictError("elsewhere")

    monkeypatch.setattr(server, "installed_parser", missing)

    assert server.refusal(["--eagr"], NAMES) is None


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file to which the stand-in for vLLM writes its command line."""
    written = tmp_path / "arguments.json"
    program = f"import json, pathlib, sys\nif __name__ == '__main__':\n    pathlib.Path({str(written)!r}).write_text("
    (tmp_path / "stand_in_server.py").write_text(f"{program}json.dumps(sys.argv[1:]))\n")
    monkeypatch.syspath_prepend(tmp_path)
    return written


def run(monkeypatch: pytest.MonkeyPatch, brief: PodBrief, *arguments: str) -> int:
    monkeypatch.setitem(os.environ, ENVIRONMENT_VARIABLE, brief.to_environment()[ENVIRONMENT_VARIABLE])
    monkeypatch.setattr(sys, "argv", ["server.py", "stand_in_server", *arguments])
    return server.main()


def test_vllm_gets_the_whole_command_line(parser: None, served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, PodBrief(extra_arguments=1), "--model", "m", "--eager") == 0
    assert json.loads(served.read_text()) == ["--model", "m", "--eager"]


def test_without_added_arguments_nothing_is_judged(served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "installed_parser", lambda: pytest.fail("vLLM's parser was asked"))

    assert run(monkeypatch, PodBrief(), "--eagr") == 0
    assert json.loads(served.read_text()) == ["--eagr"]


def test_a_refusal_goes_to_the_parent_and_vllm_does_not_start(
    parser: None, served: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = socket.socketpair()
    brief = PodBrief(extra_arguments=1, control_fd=theirs.detach(), names=NAMES)

    assert run(monkeypatch, brief, "--model", "m", "--eagr") == REFUSED_EXIT_CODE
    with ours:
        message = json.loads(ours.recv(4096))
    assert message["event"] == "refused" and message["reason"].startswith("engine.extraArgs: --eagr is no argument")
    assert not served.exists()
