import sys
from pathlib import Path

import pytest

from spillway_stack.engine_environments import VLLM_HERE, environment_problems, interpreter


def test_this_interpreter_runs_the_default_engines() -> None:
    assert interpreter(VLLM_HERE) == Path(sys.executable)
    assert environment_problems([VLLM_HERE]) == []


def test_a_missing_environment_is_named_once_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "local"))
    (problem,) = environment_problems(["0.32", VLLM_HERE, "0.32"])
    assert problem.startswith(f"VLLM=0.32 needs an environment of its own, and {tmp_path}/vllm-0.32/bin/python")
    assert problem.endswith("run make install VLLM=0.32")

    python = tmp_path / "vllm-0.32" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert environment_problems(["0.32"]) == []
