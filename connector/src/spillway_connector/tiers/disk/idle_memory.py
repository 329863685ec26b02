"""Whether enough memory is idle to use the page cache for frames: of the node, and of the cgroups of this process.

The page cache takes unused memory and gives it back on demand. But reclaiming it costs processor time, and in a
container it counts against the memory limit until then. Kubelet counts the part of it that was read twice as in use,
and evicts pods when little else is left. So idle is what kubelet calls available: memory that is free, or holds pages
of files that were not read twice.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

from spillway_connector.tiers.tier import Clock

IDLE_FRACTION = 1 / 8  # of the node's memory, and of a cgroup's limit
IDLE_BYTES_MAX = 1 << 30  # that a cgroup must have: its limit was set with the page cache in mind (memory.pageCache)
CHECK_SECONDS = 2.0
_MEMORY_FILES = {  # limit, in use, and what is idle of that in memory.stat
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


class IdleMemory:
    """``root``: where /proc and /sys are. Safe from several threads."""

    def __init__(self, clock: Clock, root: Path = Path("/")) -> None:
        self._clock = clock
        self._root = root
        self._lock = threading.Lock()
        self._next_check = float("-inf")
        self._enough = False

    @property
    def enough(self) -> bool:
        """Whether enough memory is idle, read at most every CHECK_SECONDS. False if it cannot be read."""
        with self._lock:  # the first to come reads for all
            now = self._clock()
            if now >= self._next_check:
                self._enough = self._read()
                self._next_check = now + CHECK_SECONDS
            return self._enough

    def _read(self) -> bool:
        try:
            node = _fields(self._root / "proc/meminfo")
            if node["MemFree:"] + node["Inactive(file):"] < IDLE_FRACTION * node["MemTotal:"]:
                return False
            groups = self._groups(node["MemTotal:"] * 1024)
            return all(idle >= min(IDLE_FRACTION * limit, IDLE_BYTES_MAX) for idle, limit in groups)
        except (OSError, KeyError, ValueError, IndexError):
            return False

    def _groups(self, node_bytes: int) -> Iterator[tuple[int, int]]:
        """Idle bytes and the limit of every cgroup above this process that has one."""
        for line in (self._root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            version = 1 if controllers else 2
            mounted = self._root / ("sys/fs/cgroup/memory" if controllers else "sys/fs/cgroup")
            folder = mounted / path.lstrip("/")
            # In a container with the node's cgroup names its own group is what is mounted.
            for group in [folder, *folder.parents] if folder.is_dir() else [mounted]:
                yield from _idle_of(group, version, node_bytes)
                if group == mounted:
                    break


def _idle_of(group: Path, version: int, node_bytes: int) -> Iterator[tuple[int, int]]:
    limit_name, used_name, idle_name = _MEMORY_FILES[version]
    try:
        limit = (group / limit_name).read_text().strip()
    except FileNotFoundError:
        return  # the root group, or one whose memory is not controlled
    if limit == "max" or int(limit) >= node_bytes:
        return
    used = int((group / used_name).read_text())
    yield int(limit) - used + _fields(group / "memory.stat")[idle_name], int(limit)


def _fields(path: Path) -> dict[str, int]:
    """Return the first and second word of each line."""
    return {words[0]: int(words[1]) for words in map(str.split, path.read_text().splitlines())}
