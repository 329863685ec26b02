"""Engines that stop at random lines of what shares the rows, until others have changed them, or are killed there.

Each is a process that works as those of :mod:`node_tier.killed` do. It stops itself with SIGSTOP, between two lines of
the modules below, so a moment that lasts a microsecond is met as often as any other. Whoever watches it lets the others
make some rounds, and then lets it go on with SIGCONT, or kills it with SIGKILL.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from node_tier.killed import require_right_rows, work
from spillway_connector.engine.node_tier import picture, rows
from spillway_connector.plan import node_index, node_records

FILES = frozenset(str(module.__file__) for module in (picture, rows, node_index, node_records))
NUM_ROWS = 4  # so few that others take a row within two rounds
_LINES_BETWEEN = 1500  # two stops of an engine, at most; a few rounds
_ROUNDS_MAX = 12  # of the others while one is stopped; a chunk leaves within that many
_STOPPED_SECONDS_MAX = 0.05  # the others wait for one that is stopped with the lock
_WAIT_SECONDS = 120.0  # for what takes a fraction of a second


def run(folder: Path, stops: int, kills: int, processes: int = 3, seed: int = 0) -> int:
    """Stop engines `stops` times, and kill `kills` more that have stopped. Returns how many chunks they have loaded
    and compared.

    Raises AssertionError when bytes were wrong or a row stays claimed.
    """
    chosen = random.Random(seed)
    events = ["stop"] * stops + ["kill"] * kills
    chosen.shuffle(events)
    running = _Running(folder, kills + processes, seed)
    try:
        for _ in range(processes):
            running.start()
        deadline = time.monotonic() + _WAIT_SECONDS
        while events:
            assert time.monotonic() < deadline, "no engine makes progress"
            for process in running.take_stopped():
                deadline = time.monotonic() + _WAIT_SECONDS
                if events and events.pop() == "kill":
                    running.kill(process)
                    running.start()
                else:
                    running.leave_stopped(process, chosen.randint(0, _ROUNDS_MAX))
            running.let_go_on()
            time.sleep(0.0002)
    finally:
        running.kill_all()
    require_right_rows(folder, NUM_ROWS)
    return sum(running.loaded)


class _Running:
    """The processes, each with two words that they share with this one: its rounds, and the chunks it has compared."""

    def __init__(self, folder: Path, processes_max: int, seed: int) -> None:
        self._folder, self._seed = folder, seed
        self._rounds = memoryview(mmap.mmap(-1, 8 * processes_max)).cast("Q")
        self.loaded = memoryview(mmap.mmap(-1, 8 * processes_max)).cast("Q")
        self._started = 0
        self._running: set[int] = set()
        self._stopped: dict[int, tuple[int, float]] = {}  # until so many rounds, or until then

    def start(self) -> None:
        number, self._started = self._started, self._started + 1
        if process := os.fork():
            self._running.add(process)
            return
        status = 1
        try:

            def count() -> None:
                self._rounds[number] += 1

            def count_loaded(chunks: int) -> None:
                self.loaded[number] += chunks

            sys.settrace(_stop_at_lines(random.Random(self._seed + number)))
            status = work(self._folder, self._seed + number, count, count_loaded, NUM_ROWS)
        finally:
            os._exit(status)

    def take_stopped(self) -> list[int]:
        """Return the processes that have stopped since the last call."""
        found: list[int] = []
        for each in list(self._running):
            process, status = os.waitpid(each, os.WNOHANG | os.WUNTRACED)
            if process:
                if not os.WIFSTOPPED(status):
                    self._running.discard(process)
                    raise AssertionError(f"an engine ended with status {os.waitstatus_to_exitcode(status)}")
                found.append(process)
        return found

    def leave_stopped(self, process: int, rounds: int) -> None:
        self._stopped[process] = sum(self._rounds) + rounds, time.monotonic() + _STOPPED_SECONDS_MAX

    def let_go_on(self) -> None:
        """Continue those behind whose stop the others have made their rounds."""
        made, now = sum(self._rounds), time.monotonic()
        for process, (wanted, deadline) in list(self._stopped.items()):
            if made >= wanted or now >= deadline or len(self._stopped) == len(self._running):
                del self._stopped[process]
                os.kill(process, signal.SIGCONT)

    def kill(self, process: int) -> None:
        self._running.discard(process)
        self._stopped.pop(process, None)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)

    def kill_all(self) -> None:
        for process in list(self._running):
            self.kill(process)


def _stop_at_lines(chosen: random.Random) -> Callable[[FrameType, str, object], object]:
    left = chosen.randint(1, _LINES_BETWEEN)

    def at_line(_: FrameType, event: str, __: object) -> object:
        nonlocal left
        if event == "line":
            left -= 1
            if not left:
                left = chosen.randint(1, _LINES_BETWEEN)
                os.kill(os.getpid(), signal.SIGSTOP)
        return at_line

    def at_call(frame: FrameType, _: str, __: object) -> object:
        return at_line if frame.f_code.co_filename in FILES else None

    return at_call
