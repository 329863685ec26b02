"""Processes by identity: a pid together with its start time, so that a reused pid is never mistaken for a component."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROC = Path("/proc")
POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    pid: int
    start_ticks: int  # since boot, as the kernel counts; with the pid it names one process until the next boot

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity | None:
        """Return the process; None if no such process runs (a zombie does not run)."""
        fields = _stat_fields(pid)
        return None if fields is None or fields[0] in "ZX" else cls(pid, int(fields[19]))

    @classmethod
    def from_record(cls, record: dict[str, Any] | None) -> ProcessIdentity | None:
        return cls(int(record["pid"]), int(record["start_ticks"])) if record and record.get("pid") else None

    def record(self) -> dict[str, int]:
        return {"pid": self.pid, "start_ticks": self.start_ticks}

    def is_alive(self) -> bool:
        return ProcessIdentity.of(self.pid) == self

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has exited or its pid has been reused."""
        if self.is_alive():
            try:
                os.kill(self.pid, number)
            except ProcessLookupError:
                pass


def wait_gone(processes: Iterable[ProcessIdentity], timeout_seconds: float) -> list[ProcessIdentity]:
    """Wait for these processes to exit; returns those still alive at the timeout."""
    deadline = time.monotonic() + timeout_seconds
    alive = [process for process in processes if process.is_alive()]
    while alive and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
        alive = [process for process in alive if process.is_alive()]
    return alive


def descendants(pid: int) -> list[int]:
    """Return `pid` and all its descendants, and the members of the sessions that its children lead."""
    children: dict[int, list[int]] = {}
    sessions: dict[int, list[int]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (fields := _stat_fields(int(entry.name))) is not None:
            children.setdefault(int(fields[1]), []).append(int(entry.name))
            sessions.setdefault(int(fields[3]), []).append(int(entry.name))
    found: list[int] = []
    waiting = [pid]
    while waiting:
        current = waiting.pop()
        if current not in found:
            found.append(current)
            waiting += [*children.get(current, []), *sessions.get(current, [])]
    return found


def resident_bytes(pids: Iterable[int]) -> int:
    """Return the proportional set size, in which pages shared between processes count once."""
    total = 0
    for pid in pids:
        try:
            rollup = (PROC / str(pid) / "smaps_rollup").read_text()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss:"))
    return total


def command_line(pid: int) -> str:
    try:
        return (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "?"


def _stat_fields(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat after the command name: state, parent, ..., start time at index 19."""
    try:
        return (PROC / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return None
