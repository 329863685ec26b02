"""Ending engines and the gateway in every way there is, and waiting until their successors serve."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from stack_driver.deadlines import eventually
from stack_driver.engine_processes import engine_core, kill_group, shared_memory_of, vllm_group
from stack_driver.running_stack import RunningStack

from soak.outages import GATEWAY, Outages
from soak.schedule import Fault
from spillway_stack.processes import ProcessIdentity, descendants, wait_gone

READY_SECONDS = 300.0
# What the local stack's configuration grants to requests in flight: engines 1 s of delay and 30 s, the gateway 30 s.
DRAIN_SECONDS = 30.0
# The gateway closes its socket at once: a client that found it open has connected by then.
CONNECT_SECONDS = 1.0


def end_gateway(process: ProcessIdentity) -> None:
    time.sleep(CONNECT_SECONDS)
    process.signal(signal.SIGTERM)


class EngineFaults:
    def __init__(self, stack: RunningStack, outages: Outages) -> None:
        self._stack, self._outages = stack, outages
        self.left_shared_memory: list[str] = []
        self.left_processes: list[str] = []

    def strike(self, fault: Fault) -> None:
        """Ends the target and returns when its successor is ready. Raises AssertionError when it does not come."""
        if fault.kind == "gateway_terminated":
            self._restart(GATEWAY, fault.kind, end_gateway, DRAIN_SECONDS)
            return
        name = self._stack.local.engines[fault.target].name
        before = self._stack.process(name)
        group = vllm_group(before)
        memory = shared_memory_of(group)
        family = [identity for pid in descendants(before.pid) if (identity := ProcessIdentity.of(pid)) is not None]
        end: dict[str, Callable[[ProcessIdentity], None]] = {
            "engine_killed": lambda process: kill_group(group),
            "engine_core_killed": lambda process: engine_core(group).signal(signal.SIGKILL),
            "engine_parent_killed": lambda process: process.signal(signal.SIGKILL),
            "engine_terminated": lambda process: process.signal(signal.SIGTERM),
        }
        self._restart(name, fault.kind, end[fault.kind], DRAIN_SECONDS if fault.kind == "engine_terminated" else 0.0)
        self.left_shared_memory += [str(file) for file in memory if file.exists()]
        self.left_processes += [f"{name}: pid {process.pid}" for process in wait_gone(family, 5.0)]

    def _restart(self, name: str, kind: str, end: Callable[[ProcessIdentity], None], drain_seconds: float) -> None:
        before = self._stack.process(name)
        self._outages.close(name, kind, drain_seconds=drain_seconds)
        end(before)

        def successor_is_ready() -> bool:
            status = self._stack.component(name)
            return status.ready and status.identity is not None and status.identity != before

        eventually(f"{name} is ready again after {kind}", successor_is_ready, READY_SECONDS)
        self._outages.open(name)
