"""The folder `.run`: every path in it, and the state file that survives a killed supervisor."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class StateFolder:
    root: Path

    @property
    def plan_file(self) -> Path:
        return self.root / "plan.json"

    @property
    def state_file(self) -> Path:
        return self.root / "state.json"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def config(self) -> Path:
        return self.root / "config"

    @property
    def nvme(self) -> Path:
        return self.root / "nvme"

    @property
    def node_tier(self) -> Path:
        """The node's tier in shared memory, named after this folder, so that two stacks share no rows."""
        # The import is not at the top: the engine's image prepares the model with this distribution alone
        # (bundled_model.py).
        from spillway_engine.machine import SHARED_MEMORY_FOLDER  # noqa: PLC0415

        name = hashlib.sha256(os.fsencode(self.root.resolve())).hexdigest()[:16]
        return SHARED_MEMORY_FOLDER / f"spillway-stack-{os.getuid()}-{name}"

    @property
    def valkey(self) -> Path:
        return self.root / "valkey"

    @property
    def object_store(self) -> Path:
        return self.root / "object-store"

    def log_file(self, component: str) -> Path:
        return self.logs / f"{component}.log"

    def create(self) -> None:
        for folder in (self.logs, self.config, self.nvme, self.valkey, self.object_store):
            folder.mkdir(parents=True, exist_ok=True)

    def read_state(self) -> dict[str, Any] | None:
        """Return the supervisor's last state; None if no stack was started here or it was stopped."""
        return _read_json(self.state_file)

    def read_plan(self) -> dict[str, Any] | None:
        return _read_json(self.plan_file)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a file to write, which takes the place of `path` at the end: a reader never sees half a file, and what fails
    leaves the previous one."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    with replacing(path) as partial:
        partial.write_text(json.dumps(value, indent=2) + "\n")


def last_lines(path: Path, count: int, bytes_max: int = 64 << 10) -> list[str]:
    """Return the end of a log, without reading the whole file."""
    try:
        with path.open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - bytes_max))
            return log.read().decode(errors="replace").splitlines()[-count:]
    except FileNotFoundError:
        return []


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return value if isinstance(value, dict) else None
