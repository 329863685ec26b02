"""Folders in memory, named after the process of the bench. One that is killed leaves its folder, which takes memory
until the next bench removes it."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MEMORY = Path("/dev/shm")
_PREFIX = "spillway-bench-"
_OWNER = re.compile(rf"{_PREFIX}(\d+)(?:-|$)")


def own_name() -> str:
    return f"{_PREFIX}{os.getpid()}"


def remove_left(memory: Path = MEMORY) -> None:
    """Remove the folders of benches that have ended."""
    for folder in memory.glob(f"{_PREFIX}*"):
        owner = _OWNER.match(folder.name)
        if owner is not None and not Path("/proc", owner.group(1)).exists():
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def memory_folder(memory: Path = MEMORY) -> Iterator[Path]:
    """A new folder, until the end."""
    remove_left(memory)
    with tempfile.TemporaryDirectory(prefix=f"{own_name()}-", dir=memory) as folder:
        yield Path(folder)
