"""Resources of a running stack, and what of them is left afterwards."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from spillway_engine.shared_memory import files_of_group
from spillway_stack.ports import is_free
from spillway_stack.processes import PROC, ProcessIdentity, command_line, descendants, wait_gone
from spillway_stack.state_folder import StateFolder

from .engine_processes import vllm_group

GONE_SECONDS = 60.0  # for the kernel and the init process to reap ended processes on a busy machine


@dataclass(frozen=True, slots=True)
class Footprint:
    """processes: the supervisor, the components and their descendants."""

    processes: frozenset[ProcessIdentity]
    shared_memory: frozenset[Path]
    ports: frozenset[int]

    @classmethod
    def of(cls, folder: StateFolder) -> Footprint:
        """The footprint of the stack that runs in `folder`."""
        state = folder.read_state()
        assert state is not None, f"nothing was started in {folder.root}"
        records = state["components"]
        parents = {
            name: identity for name, record in records.items() if (identity := ProcessIdentity.from_record(record))
        }
        supervisor = ProcessIdentity.from_record(state["supervisor"])
        assert supervisor is not None
        below = [ProcessIdentity.of(pid) for parent in parents.values() for pid in descendants(parent.pid)]
        engines = [identity for name, identity in parents.items() if name.startswith("engine-")]
        return cls(
            frozenset([supervisor, *(identity for identity in below if identity is not None)]),
            frozenset(file for engine in engines for file in files_of_group(vllm_group(engine))),
            frozenset(port for record in records.values() for port in record["ports"]),
        )

    def left(self) -> list[str]:
        """Everything that still exists, as text."""
        alive = wait_gone(self.processes, GONE_SECONDS)
        return [
            *(f"process {identity.pid}: {command_line(identity.pid)}" for identity in alive),
            *(f"shared memory {file}" for file in sorted(self.shared_memory) if file.exists()),
            *(f"port {port}" for port in taken(self.ports)),
        ]


def taken(ports: Iterable[int]) -> list[int]:
    return sorted(port for port in ports if not is_free(port))


def processes_naming(folder: Path) -> list[str]:
    """Command lines that name the folder of a stack."""
    commands = [command_line(int(entry.name)) for entry in PROC.iterdir() if entry.name.isdigit()]
    return [command for command in commands if str(folder) in command]
