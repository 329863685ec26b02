"""The stack's background process: starts the planned components, restarts one that exits, stops all in order.

    python -m spillway_stack.supervisor STATE_FOLDER

Reads plan.json once, writes state.json at each change. Components are leaders of their own sessions, so they outlive a
killed supervisor; state.json names them with their start times, and `down` ends them from there.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from spillway_stack.components import Component
from spillway_stack.processes import ProcessIdentity
from spillway_stack.state_folder import StateFolder, write_json

LOG_BYTES_MAX = 50 << 20  # at a restart a longer log is rotated, one generation is kept
HURRY_AFTER_SECONDS = 0.3
TICK_SECONDS = 0.1
FIRST_DELAY_SECONDS = 1.0
DELAY_SECONDS_MAX = 30.0
STEADY_SECONDS = 60.0  # having run this long, the next failure counts as the first again
_PR_SET_CHILD_SUBREAPER = 36


def restart_delay_seconds(failures_in_a_row: int) -> float:
    """Return 1, 2, 4, ... 30 seconds for the first, second, third, ... failure. Pure."""
    return float(min(DELAY_SECONDS_MAX, FIRST_DELAY_SECONDS * 2 ** min(16, max(0, failures_in_a_row - 1))))


def failures_after_exit(failures_in_a_row: int, ran_seconds: float, exit_code: int) -> int:
    """Return the failures after an exit. A clean exit is a requested restart and counts as no failure. Pure."""
    if exit_code == 0:
        return 0
    return 1 if ran_seconds >= STEADY_SECONDS else failures_in_a_row + 1


@dataclass(slots=True)
class _Child:
    component: Component
    process: subprocess.Popen[bytes] | None = None
    identity: ProcessIdentity | None = None
    started_at: float = 0.0  # time.time, for display
    started: float = 0.0  # time.monotonic
    restarts: int = 0
    failures_in_a_row: int = 0
    start_again_at: float | None = None
    exit_count: int = 0
    exits: list[dict[str, Any]] = field(default_factory=list)  # the last ten

    def record(self) -> dict[str, Any]:
        running = self.identity.record() if self.identity is not None else {"pid": None, "start_ticks": None}
        return {
            **running,
            "port": self.component.port,
            "ready_path": self.component.ready_path,
            "ports": list(self.component.ports),
            "started_at": self.started_at,
            "restarts": self.restarts,
            "exit_count": self.exit_count,
            "exits": self.exits,
            "stop_rank": self.component.stop_rank,
            "hurry": self.component.hurry,
            "stop_timeout_seconds": self.component.stop_timeout_seconds,
        }


class Supervisor:
    """Runs in the main thread of its own process until SIGTERM or SIGINT."""

    def __init__(self, folder: StateFolder, components: list[Component]) -> None:
        self._folder = folder
        self._children = [_Child(component) for component in components]
        self._stopping = False

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        # Orphans of a killed engine become children of this process, which reaps them.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        for child in self._children:
            self._start(child)
        self._write_state()
        while not self._stopping:
            self._restart_exited()
            self._reap_orphans()
            time.sleep(TICK_SECONDS)
        self._stop_all()
        self._folder.state_file.unlink(missing_ok=True)
        return 0

    def _on_signal(self, *_: object) -> None:
        self._stopping = True

    def _restart_exited(self) -> None:
        changed = False
        for child in self._children:
            if child.process is not None and child.process.poll() is not None:
                self._note_exit(child, child.process.returncode)
                changed = True
            elif child.start_again_at is not None and time.monotonic() >= child.start_again_at:
                child.restarts += 1
                self._start(child)
                changed = True
        if changed:
            self._write_state()

    def _reap_orphans(self) -> None:
        components = {child.process.pid for child in self._children if child.process is not None}
        for pid in map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()):
            if pid not in components:
                try:
                    os.waitpid(pid, os.WNOHANG)
                except ChildProcessError:
                    continue

    def _start(self, child: _Child) -> None:
        component = child.component
        child.start_again_at = None
        with _open_log(self._folder.log_file(component.name)) as log:
            child.process = subprocess.Popen(
                list(component.arguments),
                env={**os.environ, **component.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        child.identity = ProcessIdentity.of(child.process.pid)
        child.started, child.started_at = time.monotonic(), time.time()

    def _note_exit(self, child: _Child, exit_code: int) -> None:
        ran_seconds = time.monotonic() - child.started
        child.failures_in_a_row = failures_after_exit(child.failures_in_a_row, ran_seconds, exit_code)
        child.exit_count += 1
        child.exits = [*child.exits, {"at": time.time(), "code": exit_code, "ran_seconds": round(ran_seconds, 1)}][-10:]
        child.process, child.identity = None, None
        delay = restart_delay_seconds(child.failures_in_a_row) if child.failures_in_a_row else 0.0
        child.start_again_at = time.monotonic() + delay
        print(
            f"{child.component.name} ended with {exit_code} after {ran_seconds:.1f} s, again in {delay:g} s", flush=True
        )

    def _write_state(self) -> None:
        supervisor = ProcessIdentity.of(os.getpid())
        write_json(
            self._folder.state_file,
            {
                "supervisor": supervisor.record() if supervisor is not None else None,
                "components": {child.component.name: child.record() for child in self._children},
            },
        )

    def _stop_all(self) -> None:
        for rank in sorted({child.component.stop_rank for child in self._children}):
            stop_together([child for child in self._children if child.component.stop_rank == rank])


def stop_together(children: list[_Child]) -> None:
    """Send SIGTERM, a second one to components that hurry on it, and SIGKILL at each one's deadline."""
    running = [child for child in children if child.process is not None]
    for child in running:
        assert child.process is not None
        child.process.terminate()
    hurry_at = time.monotonic() + HURRY_AFTER_SECONDS
    begun = time.monotonic()
    hurried = False
    while running := [child for child in running if child.process is not None and child.process.poll() is None]:
        if not hurried and time.monotonic() >= hurry_at:
            hurried = True
            for child in running:
                if child.component.hurry and child.process is not None:
                    child.process.terminate()
        for child in running:
            if child.process is not None and time.monotonic() - begun > child.component.stop_timeout_seconds:
                child.process.kill()
        time.sleep(0.05)


def _open_log(path: Path) -> IO[bytes]:
    if path.exists() and path.stat().st_size > LOG_BYTES_MAX:
        path.replace(path.with_suffix(".log.1"))
    return path.open("ab")


def main(arguments: list[str]) -> int:
    folder = StateFolder(Path(arguments[0]))
    plan = folder.read_plan()
    if plan is None:
        print(f"{folder.plan_file} is missing or unreadable", file=sys.stderr)
        return 1
    return Supervisor(folder, [Component.from_dict(values) for values in plan["components"]]).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
