"""The connector's types against vLLM 0.32's, whose modules the environment of `make check` does not hold."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MYPY = ROOT / ".venv" / "local" / "bin" / "mypy"
CONFIG = Path(__file__).parent / "vllm-0.32.ini"
SETTINGS = ("settings/src", "connector/src")


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    cache = ROOT / ".mypy_cache" / "vllm-0.32"
    command = [MYPY, "--config-file", CONFIG, "--python-executable", sys.executable, "--cache-dir", cache, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=540, check=False)


@pytest.mark.timeout(600)
def test_the_connector_has_no_type_error() -> None:
    done = check(*SETTINGS)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(600)
def test_a_wrong_call_of_vllm_is_seen(tmp_path: Path) -> None:
    """The modules of vLLM would be unknown otherwise, and everything allowed."""
    wrong = tmp_path / "wrong.py"
    wrong.write_text("from vllm.v1.kv_offload.base import OffloadingEvent\nOffloadingEvent(no_such_field=1)\n")
    done = check(str(wrong))
    assert "no_such_field" in done.stdout, done.stdout + done.stderr
