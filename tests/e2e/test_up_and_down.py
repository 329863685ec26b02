"""Starting twice, starting where a port is taken, and leaving nothing behind."""

from __future__ import annotations

import signal
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from stack_driver.footprint import Footprint, processes_naming, taken
from stack_driver.running_stack import RunningStack, stack_settings

from spillway_stack.errors import PreflightFailed, StackDiffers
from spillway_stack.local_stack import LocalStack
from spillway_stack.processes import wait_gone


def test_taken_port_is_reported_and_nothing_starts(tmp_path: Path) -> None:
    settings = stack_settings("nvme")
    with socket.create_server(("127.0.0.1", settings.engine_port(1))):
        stack = LocalStack(settings, tmp_path)
        with pytest.raises(PreflightFailed) as refused:
            stack.start()
    message = str(refused.value)
    assert str(settings.engine_port(1)) in message and "engine-1" in message
    assert "pytest" in message or "python" in message, f"the holder is not named: {message}"
    assert stack.status() == []
    assert processes_naming(tmp_path) == []


def test_second_up_is_quick_and_changes_nothing(stack: RunningStack) -> None:
    processes = {status.name: status.identity for status in stack.local.status()}
    again = LocalStack(stack.local.settings, stack.local.folder.root)
    assert again.start() is False
    again.wait_ready(timeout_seconds=120)
    assert {status.name: status.identity for status in again.status()} == processes


def test_up_with_other_settings_is_refused_while_running(stack: RunningStack) -> None:
    with pytest.raises(StackDiffers, match="engines: 2 -> 1"):
        LocalStack(replace(stack.local.settings, engines=1), stack.local.folder.root).start()


@pytest.mark.ends_stack
@pytest.mark.tiers("nvme")
def test_down_after_kill_of_the_supervisor_leaves_nothing(stack: RunningStack) -> None:
    footprint = Footprint.of(stack.local.folder)
    stack.supervisor.signal(signal.SIGKILL)
    assert not wait_gone([stack.supervisor], 60)
    _end_and_check(stack, footprint)


@pytest.mark.ends_stack
@pytest.mark.tiers("redis")
def test_down_leaves_nothing(stack: RunningStack) -> None:
    _end_and_check(stack, Footprint.of(stack.local.folder))


def _end_and_check(stack: RunningStack, footprint: Footprint) -> None:
    assert taken(footprint.ports) == sorted(footprint.ports), "every port was in use while the stack ran"
    assert footprint.shared_memory, "vLLM's queues between its processes lie in shared memory"
    stack.local.close()
    assert footprint.left() == []
    assert processes_naming(stack.local.folder.root) == []
    stack.local.close()  # a second `down` is harmless
    assert stack.local.status() == []
