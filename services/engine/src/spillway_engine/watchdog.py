"""Ends an engine's process group when the pod's parent process has ended, whatever ended it.

A separate process in a session of its own: `kill -9` of the parent reaches neither signal handlers nor `finally`, and
vLLM's engine core outlives its API server. It holds the read end of a pipe whose only write end is the parent's.

    python -m spillway_engine.watchdog GROUP_ID

One line "dismissed" on its standard input means that the parent has ended the group itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from spillway_engine.shared_memory import files_of_group, group_members, paths_in_use

DISMISSAL = b"dismissed\n"
GROUP_END_SECONDS = 10.0
TRACKER_END_SECONDS = 3.0


def start_watchdog(group_id: int) -> subprocess.Popen[bytes]:
    """Start it beside the group; keep the returned process's stdin open for as long as the parent lives."""
    return subprocess.Popen(
        [sys.executable, "-m", "spillway_engine.watchdog", str(group_id)],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )


def dismiss_watchdog(watchdog: subprocess.Popen[bytes]) -> None:
    """Call it after the end of the group; waits for the watchdog to end."""
    assert watchdog.stdin is not None
    try:
        watchdog.stdin.write(DISMISSAL)
        watchdog.stdin.close()
    except BrokenPipeError:
        pass
    try:
        watchdog.wait(timeout=5)
    except subprocess.TimeoutExpired:
        watchdog.kill()
        watchdog.wait()


def end_group(group_id: int, known_files: Iterable[Path] = ()) -> list[Path]:
    """SIGKILL every member and remove the shared-memory files they had mapped; returns the removed files.

    Files are listed before the kill: afterwards their owner cannot be found. `known_files`: listed earlier, for a group
    that another process has killed. Python's resource trackers are killed last: given time, they unlink the semaphores
    and queues of ended processes and exit.
    """
    files = files_of_group(group_id) | set(known_files)
    begun = time.monotonic()
    while members := group_members(group_id):
        elapsed_seconds = time.monotonic() - begun
        if elapsed_seconds > GROUP_END_SECONDS:
            break
        files |= files_of_group(group_id)
        for pid in members:
            if elapsed_seconds < TRACKER_END_SECONDS and is_resource_tracker(pid):
                continue
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)
    removed = sorted(file for file in files - paths_in_use(files) if file.exists())
    for file in removed:
        file.unlink(missing_ok=True)
    return removed


def is_resource_tracker(pid: int) -> bool:
    """Python's cleaner of semaphores and queues; it exits shortly after the processes that it tracks."""
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def main(arguments: list[str]) -> int:
    group_id = int(arguments[0])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.stdin.buffer.read() != DISMISSAL:
        removed = end_group(group_id)
        print(
            f"spillway_engine: the parent process died; ended its engine, removed {len(removed)} shared-memory files",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
