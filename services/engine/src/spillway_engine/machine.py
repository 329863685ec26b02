"""Facts about this machine: instruction sets, memory, shared memory. Read once at start, then passed on as values."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from spillway_engine.ascend_versions import AscendVersions, read_ascend_versions

SHARED_MEMORY_FOLDER = Path("/dev/shm")  # noqa: S108  vLLM 0.23 puts its shared region there, without a setting


@dataclass(frozen=True, slots=True)
class Machine:
    platform: str  # cpu | cuda | npu
    cpu_flags: frozenset[str]
    cores: tuple[int, ...]  # numbers of those that this process may use
    memory_available_bytes: int  # the smaller of what the kernel and the cgroup allow
    memory_limit_source: str  # where memory_available_bytes comes from
    shared_memory_free_bytes: int
    shared_memory_total_bytes: int
    ascend: AscendVersions | None = None  # on an NPU alone
    memory_nodes: int = 1  # NUMA nodes whose memory this process may use


def probe_machine(platform: str = "auto") -> Machine:
    """Look at /proc, /sys/fs/cgroup and /dev; opens nothing for writing."""
    available_bytes = _memory_available(Path("/proc/meminfo").read_text())
    source = "MemAvailable"
    cgroup_free_bytes = cgroup_memory_free(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup").read_text())
    if cgroup_free_bytes is not None and cgroup_free_bytes < available_bytes:
        available_bytes, source = cgroup_free_bytes, "cgroup limit"
    shared = os.statvfs(SHARED_MEMORY_FOLDER)
    platform = _detect_platform() if platform == "auto" else platform
    return Machine(
        platform=platform,
        cpu_flags=cpu_flags(Path("/proc/cpuinfo").read_text()),
        cores=tuple(sorted(os.sched_getaffinity(0))),
        memory_available_bytes=available_bytes,
        memory_limit_source=source,
        shared_memory_free_bytes=shared.f_bavail * shared.f_frsize,
        shared_memory_total_bytes=shared.f_blocks * shared.f_frsize,
        ascend=read_ascend_versions(os.environ) if platform == "npu" else None,
        memory_nodes=memory_nodes(Path("/proc/self/status").read_text()),
    )


def cpu_flags(cpuinfo: str) -> frozenset[str]:
    """Text of /proc/cpuinfo -> flags of the first core (x86 `flags`, Arm `Features`)."""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def memory_nodes(status: str) -> int:
    """Text of /proc/self/status -> how many NUMA nodes its `Mems_allowed_list` names (`0,2-3` is three); at least 1."""
    line = next((line for line in status.splitlines() if line.startswith("Mems_allowed_list:")), "")
    count = 0
    for part in filter(None, line.partition(":")[2].strip().split(",")):
        first, _, last = part.partition("-")
        count += int(last or first) - int(first) + 1
    return max(1, count)


def cgroup_memory_free(root: Path, self_cgroup: str) -> int | None:
    """Bytes left under the tightest memory limit of this process's cgroup v2 ancestors; None without a limit.

    `self_cgroup` is the text of /proc/self/cgroup. Page cache that can be dropped counts as free.
    """
    relative = next((line[3:] for line in self_cgroup.splitlines() if line.startswith("0::")), "/")
    folder = root / relative.strip().lstrip("/")
    left: list[int] = []
    for place in (folder, *folder.parents):
        limit_file = place / "memory.max"
        if limit_file.is_file():
            limit = limit_file.read_text().strip()
            if limit != "max":
                used = int((place / "memory.current").read_text())
                left.append(int(limit) - used + _reclaimable(place / "memory.stat"))
        if place == root:
            break
    return max(0, min(left)) if left else None


def _reclaimable(stat: Path) -> int:
    if not stat.is_file():
        return 0
    return sum(
        int(value)
        for name, value in (line.split() for line in stat.read_text().splitlines())
        if name in ("inactive_file", "active_file")
    )


def _memory_available(meminfo: str) -> int:
    line = next(line for line in meminfo.splitlines() if line.startswith("MemAvailable:"))
    return int(line.split()[1]) * 1024


def _detect_platform() -> str:
    if Path("/dev/davinci_manager").exists() and importlib.util.find_spec("torch_npu"):
        return "npu"
    if Path("/dev/nvidiactl").exists():
        return "cuda"
    return "cpu"
