"""Files of vLLM's shared offload region: which are there, which are mapped by a living process, which are left over.

A killed engine leaves `/dev/shm/vllm_offload_<instance>.mmap` behind; in a pod that folder survives container
restarts, so the next start finds it full. vLLM 0.23 removes the file only on a clean stop.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from spillway_engine.machine import SHARED_MEMORY_FOLDER

REGION_PATTERN = "vllm_offload_*.mmap"


@dataclass(frozen=True, slots=True)
class Sweep:
    removed: tuple[Path, ...]
    freed_bytes: int
    kept: tuple[Path, ...]  # mapped by a living process, or not ours to remove


def sweep_stale_regions(folder: Path = SHARED_MEMORY_FOLDER, proc: Path = Path("/proc")) -> Sweep:
    """Remove every region file that no living process maps or holds open.

    A file younger than its first mapping cannot be told from a stale one by its maps alone, hence also the look at
    open descriptors: vLLM keeps the descriptor from creation on.
    """
    regions = sorted(folder.glob(REGION_PATTERN))
    in_use = paths_in_use(regions, proc) if regions else set()
    removed: list[Path] = []
    kept: list[Path] = []
    freed_bytes = 0
    for region in regions:
        if region in in_use:
            kept.append(region)
            continue
        try:
            size_bytes = region.stat().st_blocks * 512
            region.unlink()
        except FileNotFoundError:
            continue
        except PermissionError:
            kept.append(region)
            continue
        removed.append(region)
        freed_bytes += size_bytes
    return Sweep(tuple(removed), freed_bytes, tuple(kept))


def paths_in_use(paths: Iterable[Path], proc: Path = Path("/proc")) -> set[Path]:
    """The subset of `paths` that some living process maps or has open. Processes of other users are skipped unread."""
    wanted = {str(path): path for path in paths}
    found: set[Path] = set()
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            maps = (entry / "maps").read_text(errors="replace")
            descriptors = list((entry / "fd").iterdir())
        except OSError:
            continue
        found |= {path for text, path in wanted.items() if text in maps}
        for descriptor in descriptors:
            # Each may be closed by now, without that saying anything about the others.
            with contextlib.suppress(OSError):
                target = os.readlink(descriptor)
                if target in wanted:
                    found.add(wanted[target])
    return found


def files_of_group(group_id: int, folder: Path = SHARED_MEMORY_FOLDER, proc: Path = Path("/proc")) -> set[Path]:
    """Shared-memory files mapped by the living members of a process group: what to remove once that group is dead.

    Besides the offload region these are the queues (psm_*) and semaphores (sem.mp-*) of Python's multiprocessing.
    """
    prefix = f"{folder}/"
    mapped: set[Path] = set()
    for pid in group_members(group_id, proc):
        try:
            maps = (proc / str(pid) / "maps").read_text(errors="replace")
        except OSError:
            continue
        for line in maps.splitlines():
            path = line[line.find("/") :] if prefix in line else ""
            if path.startswith(prefix) and not path.endswith(" (deleted)"):
                mapped.add(Path(path))
    return mapped


def group_members(group_id: int, proc: Path = Path("/proc")) -> list[int]:
    """Pids whose process group is `group_id`, zombies excluded."""
    members = []
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # Fields after the command, which may hold spaces and parentheses: state, parent, group.
            state, _, group, *_ = (entry / "stat").read_text().rsplit(")", 1)[1].split()
        except (OSError, IndexError, ValueError):
            continue
        if int(group) == group_id and state not in "ZX":
            members.append(int(entry.name))
    return members
