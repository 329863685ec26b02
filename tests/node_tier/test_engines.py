"""Two real engines of one machine, and one that starts after both were killed: a prefix is computed once."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from engine_matrix.models import VOCABULARY

_TESTS = Path(__file__).parent.parent


class _Engine:
    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process, self._log = process, log
        self.block_tokens = int(self._line("READY"))

    def _line(self, mark: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(mark):
                return line.removeprefix(mark)
        raise AssertionError(self._log.read_text()[-12_000:])

    def ask(self, prompt: list[int]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(prompt) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._line("ANSWER"))
        return answer

    def kill(self) -> None:
        """All of its processes, as one container."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@contextmanager
def _running(folder: Path, region: Path, executor: str) -> Iterator[_Engine]:
    paths = os.pathsep.join([str(_TESTS), *sys.path])
    log = folder / f"engine-{executor}-{os.urandom(4).hex()}.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "node_tier.engine", str(folder), str(region), executor],
            env={**os.environ, "PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1", "PYTHONPATH": paths},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    try:
        yield _Engine(process, log)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _prompt(name: str, block_tokens: int) -> list[int]:
    chosen = random.Random(name)
    return [chosen.randrange(3, VOCABULARY) for _ in range(6 * block_tokens + 3)]


@pytest.mark.timeout(900)
def test_a_prefix_is_computed_once_for_all_engines_of_a_node_and_survives_them(tmp_path: Path):
    region = tmp_path / "region"
    with ExitStack() as first_two:
        first = first_two.enter_context(_running(tmp_path, region, "uni"))
        tokens = first.block_tokens
        common = _prompt("common", tokens)
        computed = first.ask(common)
        assert computed["cached"] == 0
        first.ask(_prompt("other", tokens))  # stores are submitted with the step after their own
        second = first_two.enter_context(_running(tmp_path, region, "mp"))
        loaded = second.ask(common)
        assert loaded == {"tokens": computed["tokens"], "cached": 6 * tokens}
        second.ask(_prompt("third", tokens))
        assert first.ask(_prompt("third", tokens))["cached"] == 6 * tokens
        first.kill()
        second.kill()
    with _running(tmp_path, region, "uni") as third:
        assert third.ask(common) == loaded
