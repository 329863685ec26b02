"""Engines that share one device and take turns: each is a process that answers rounds, one line in, one line out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

from bench_report import BenchError

_ROUND = "ROUND "  # prefix of the result lines of an engine's process, among vLLM's log lines


def answer_rounds(answer: Callable[[str], str]) -> None:
    """The engine's process, once its engine is ready: one result for each line of the input."""
    print(f"{_ROUND}ready", flush=True)
    for line in sys.stdin:
        print(f"{_ROUND}{answer(line.strip())}", flush=True)


class Turn:
    """One engine's process, asked for rounds. variables: added to its environment."""

    def __init__(
        self, name: str, command: Sequence[str], log: TextIO, variables: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self._log = log
        self._process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **(variables or {})},
            start_new_session=True,
        )

    def wait_ready(self) -> None:
        self._answer()

    def round(self, line: str) -> str:
        assert self._process.stdin is not None
        print(line, file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """The process and all that it started, as a container that is killed."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_ROUND):
                return line.removeprefix(_ROUND).strip()
        raise BenchError(f"the engine {self.name} ended; see {self._log.name}")


@contextmanager
def engines_in_turn(
    commands: Mapping[str, Sequence[str]], folder: Path, *, at_once: bool = False
) -> Iterator[dict[str, Turn]]:
    """Started one after the other, since each measures the free memory at its start. Logs are <folder>/<name>.log.
    at_once: engines that are given the size of their KV start together, each with compiled code of its own."""
    with ExitStack() as stack:
        engines: dict[str, Turn] = {}
        for name, command in commands.items():
            log = stack.enter_context(log_of(folder, name).open("w"))
            variables = {"VLLM_CACHE_ROOT": str(folder / f"{name}-compiled")} if at_once else {}
            engines[name] = Turn(name, command, log, variables)
            stack.callback(engines[name].close)
            if not at_once:
                engines[name].wait_ready()
        for name, engine in engines.items():
            if at_once:
                engine.wait_ready()
            print(f"{name}: ready", flush=True)
        yield engines


def log_of(folder: Path, name: str) -> Path:
    return folder / f"{name}.log"
