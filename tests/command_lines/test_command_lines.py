"""Every command of a person says what it takes, and refuses what it does not take before it does anything."""

from __future__ import annotations

import pytest
from command_lines.asked import OPTIONS, commands
from module_runs import module_runs


@pytest.mark.timeout(600)  # imports what all commands import
def test_each_command_answers_help_and_refuses_an_unknown_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    asked = module_runs("command_lines.asked", timeout_seconds=580)
    assert [(run["command"], run["option"]) for run in asked] == [
        (each, option) for each in commands() for option in OPTIONS
    ]
    wrong = []
    for run in asked:
        helps = run["option"] == "--help"
        wanted = "usage:" if helps else ": "
        if run["status"] != (0 if helps else 2) or wanted not in run["said"]:
            wrong.append(f"{run['command']} {run['option']}: {run['status']!r} {run['said'][-300:]}")
    assert not wrong, "\n".join(wrong)
