"""The processes of one engine: the pod's parent, and vLLM's own group below it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from spillway_engine.shared_memory import files_of_group, group_members
from spillway_stack.processes import PROC, ProcessIdentity, command_line

SERVER_MODULE = "vllm.entrypoints.openai.api_server"
ENGINE_CORE = "VLLM::EngineCore"


def vllm_group(parent: ProcessIdentity) -> int:
    """The process group that the API server leads."""
    children = (PROC / str(parent.pid) / "task" / str(parent.pid) / "children").read_text().split()
    servers = [int(pid) for pid in children if SERVER_MODULE in command_line(int(pid))]
    assert len(servers) == 1, f"children of {parent.pid}: {[command_line(int(pid)) for pid in children]}"
    return os.getpgid(servers[0])


def engine_core(group: int) -> ProcessIdentity:
    cores = [pid for pid in group_members(group) if command_line(pid).startswith(ENGINE_CORE)]
    assert len(cores) == 1, f"members of group {group}: {[command_line(pid) for pid in group_members(group)]}"
    identity = ProcessIdentity.of(cores[0])
    assert identity is not None
    return identity


def shared_memory_of(group: int) -> set[Path]:
    return files_of_group(group)


def kill_group(group: int) -> None:
    os.killpg(group, signal.SIGKILL)
