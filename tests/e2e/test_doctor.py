"""`spillway doctor` on real engines of two vLLMs with one Redis: what every process says."""

from __future__ import annotations

import json

import pytest
from stack_driver.running_stack import RunningStack

from spillway_ctl.command import main

pytestmark = pytest.mark.tiers("upgrade")

PROCESSES = ("CPU blocks", "block size", "chunk size", "shared tiers", "generatedTokens", "copy transport", "maxLength")


def examine(stack: RunningStack, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[tuple[str, str], dict]]:
    status = main(["doctor", "--stack", str(stack.local.folder.root), "--window", "1s", "--json"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    return status, {(finding["check"], finding["where"]): finding for finding in findings}


def test_every_process_of_both_vllms_says_what_it_obeys(
    stack: RunningStack, capsys: pytest.CaptureFixture[str]
) -> None:
    _, found = examine(stack, capsys)
    for engine in ("engine-0", "engine-1"):
        for check in (*PROCESSES, "version", "devices", "shared tier", "event stream"):
            assert found[check, engine]["verdict"] == "ok", found[check, engine]
        assert "EngineCore" in found["version", engine]["found"] and "worker-0" in found["version", engine]["found"]
        assert "lag" in found["event stream", engine]["found"]
    assert found["vLLM of all engines", stack.model]["verdict"] == "warning"
    assert found["tokenizer of engines", stack.model]["verdict"] == "ok"
