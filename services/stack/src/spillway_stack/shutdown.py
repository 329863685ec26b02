"""Stops a stack in any state: with its supervisor, without it, half started."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable
from typing import Any

from spillway_engine.shared_memory import sweep_stale_regions
from spillway_stack.processes import ProcessIdentity, descendants, wait_gone
from spillway_stack.state_folder import StateFolder
from spillway_stack.supervisor import HURRY_AFTER_SECONDS

SUPERVISOR_STOP_SECONDS = 90.0  # above the sum of what it grants its components


def take_down(folder: StateFolder, log: Callable[[str], None]) -> bool:
    """Stop everything. Returns False if nothing ran. No process, port or shared-memory file of the stack remains."""
    state = folder.read_state()
    if state is None:
        _free_memory(folder)
        return False
    supervisor = ProcessIdentity.from_record(state["supervisor"])
    if supervisor is not None and supervisor.is_alive():
        log("stopping the gateway, the engines and Valkey")
        supervisor.signal(signal.SIGTERM)
        for process in wait_gone([supervisor], SUPERVISOR_STOP_SECONDS):
            process.signal(signal.SIGKILL)
        state = folder.read_state() or state
    else:
        log("the supervisor is gone; stopping its components one by one")
    _end_recorded(state["components"])
    _free_memory(folder)
    folder.state_file.unlink(missing_ok=True)
    return True


def _free_memory(folder: StateFolder) -> None:
    sweep_stale_regions()
    shutil.rmtree(folder.node_tier, ignore_errors=True)


def _end_recorded(components: dict[str, dict[str, Any]]) -> None:
    for rank in sorted({int(record["stop_rank"]) for record in components.values()}):
        together = [record for record in components.values() if int(record["stop_rank"]) == rank]
        processes = [identity for record in together if (identity := ProcessIdentity.from_record(record)) is not None]
        alive = [process for process in processes if process.is_alive()]
        if not alive:
            continue
        below = [
            identity
            for process in alive
            for pid in descendants(process.pid)
            if (identity := ProcessIdentity.of(pid)) is not None
        ]
        for process in alive:
            process.signal(signal.SIGTERM)
        time.sleep(HURRY_AFTER_SECONDS)
        for record in together:
            identity = ProcessIdentity.from_record(record)
            if record["hurry"] and identity is not None:
                identity.signal(signal.SIGTERM)
        left = wait_gone(alive, max(float(record["stop_timeout_seconds"]) for record in together))
        for process in left:
            process.signal(signal.SIGKILL)
        for process in wait_gone(below, 5.0):
            process.signal(signal.SIGKILL)
        wait_gone(below, 5.0)
