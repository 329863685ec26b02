"""Files of vLLM's shared offload region: which are there, which are mapped by a living process, which are left over.

After a kill, `/dev/shm/vllm_offload_<instance>.mmap` remains; in a pod that folder survives container
restarts, so the next start finds it full. vLLM 0.23 removes the file only on a clean stop.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from spillway_engine.machine import SHARED_MEMORY_FOLDER

REGION_PATTERN = "vllm_offload_*.mmap*"  # vLLM 0.33 splits one into <name>.mmap, <name>.mmap.1 and so on

_Inode = tuple[int, int]  # device and number


@dataclass(frozen=True, slots=True)
class Sweep:
    removed: tuple[Path, ...]
    freed_bytes: int
    kept: tuple[Path, ...]  # mapped by a living process, or not ours to remove


def sweep_stale_regions(folder: Path = SHARED_MEMORY_FOLDER, proc: Path = Path("/proc")) -> Sweep:
    """Remove every region file that no living process maps or holds open.

    A file younger than its first mapping cannot be distinguished from a stale one by its maps alone, hence also the
    look at open descriptors: vLLM keeps the descriptor from creation on.
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
    wanted = {key: path for path in paths if (key := _inode_of(path)) is not None}
    found: set[Path] = set()
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            maps = (entry / "maps").read_text(errors="replace")
            descriptors = list((entry / "fd").iterdir())
        except OSError:
            continue
        mapped = _mapped_inodes(maps)
        # Names are compared too: on a layered file system the numbers in maps are those of another layer.
        found |= {path for key, path in wanted.items() if key in mapped or str(path) in maps}
        for descriptor in descriptors:
            # Each may be closed by now, without that saying anything about the others.
            key = _inode_of(descriptor)
            if key in wanted:
                found.add(wanted[key])
    return found


def files_of_group(group_id: int, folder: Path = SHARED_MEMORY_FOLDER, proc: Path = Path("/proc")) -> set[Path]:
    """Shared-memory files mapped by the living members of a process group: what to remove after the end of that group.

    Besides the offload region these are the queues (psm_*) and semaphores (sem.mp-*) of Python's multiprocessing.
    """
    mapped: set[_Inode] = set()
    for pid in group_members(group_id, proc):
        with contextlib.suppress(OSError):
            mapped |= _mapped_inodes((proc / str(pid) / "maps").read_text(errors="replace"))
    return {file for file in folder.iterdir() if _inode_of(file) in mapped} if mapped else set()


def _mapped_inodes(maps: str) -> set[_Inode]:
    """Files in the text of /proc/PID/maps. By inode: glibc maps a semaphore under a passing name and links it after."""
    found: set[_Inode] = set()
    for line in maps.splitlines():
        _, _, _, device, inode, *_ = line.split(maxsplit=5)
        if inode != "0":
            major, minor = device.split(":")
            found.add((os.makedev(int(major, 16), int(minor, 16)), int(inode)))
    return found


def _inode_of(path: Path) -> _Inode | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


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
