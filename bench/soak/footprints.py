"""Memory, descriptors and threads of every process of a stack over time, by process generation."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from soak.flatness import Trend, second_half, trend
from spillway_connector.tiers.disk.slab.layout import parse_chunk_name
from spillway_stack.processes import PROC, ProcessIdentity, command_line, descendants

MIB = 1 << 20
# What may be added in the half that is looked at. Memory: arenas of the allocators and numbers in metrics.
ALLOWANCES = {"own_memory_bytes": 32.0 * MIB, "descriptors": 4.0, "threads": 2.0}
RELATIVE_ALLOWANCE = 0.03  # of the median, where that is more

_ROLES = (
    ("VLLM::EngineCore", "core"),
    ("VLLM::Worker", "worker"),
    ("vllm.entrypoints", "server"),
    ("spillway_engine", "pod"),
    ("spillway_gateway", "gateway"),
    ("valkey", "valkey"),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """own_memory_bytes: anonymous pages and shared memory, by proportion. pss_bytes also counts program files, which
    this process pays for alone as soon as its peers are killed, so it jumps for reasons of others.

    descriptors: without those of a slab tier's chunks that are still there. It keeps each of them open, and in so small
    a tier each frame is a chunk: their number says how full it is. Of chunks that are gone they count.
    """

    seconds: float
    pss_bytes: int
    own_memory_bytes: int
    descriptors: int
    threads: int


@dataclass(slots=True)
class Generation:
    """One process from its first sample to its last."""

    name: str  # component and role, such as engine-0 core
    process: ProcessIdentity
    samples: list[Sample] = field(default_factory=list)

    def trend(self, quantity: str) -> Trend | None:
        return trend(second_half([(sample.seconds, float(getattr(sample, quantity))) for sample in self.samples]))

    def growths(self) -> list[str]:
        """Quantities that are not flat, in words."""
        found = []
        for quantity, allowance in ALLOWANCES.items():
            seen = self.trend(quantity)
            if seen is None:
                continue
            allowed = max(allowance, RELATIVE_ALLOWANCE * seen.median)
            if seen.grows(allowed):
                found.append(
                    f"{self.name}, pid {self.process.pid}: {quantity} grew by {seen.rise:,.0f} in {seen.seconds:.0f} s "
                    f"around {seen.median:,.0f}; {allowed:,.0f} are allowed"
                )
        return found


class Footprints:
    def __init__(self) -> None:
        self.generations: dict[tuple[str, ProcessIdentity], Generation] = {}

    def sample(self, seconds: float, components: Iterable[tuple[str, ProcessIdentity]]) -> None:
        """One sample of each process below the named components. Those that end meanwhile are passed over."""
        for component, parent in components:
            for pid in descendants(parent.pid):
                role = role_of(command_line(pid))
                process = ProcessIdentity.of(pid)
                sample = take_sample(pid, seconds)
                if role is None or process is None or sample is None:
                    continue
                name = component if role in component else f"{component} {role}"
                self.generations.setdefault((name, process), Generation(name, process)).samples.append(sample)


def role_of(command: str) -> str | None:
    """Name the role of a process; None for what is not looked at: short helpers and trackers."""
    return next((role for sign, role in _ROLES if sign in command), None)


def take_sample(pid: int, seconds: float) -> Sample | None:
    folder = PROC / str(pid)
    try:
        rollup = _kilobytes(folder / "smaps_rollup")
        descriptors = sum(not _is_chunk(entry) for entry in (folder / "fd").iterdir())
        threads = sum(1 for _ in (folder / "task").iterdir())
    except OSError:
        return None
    own = rollup.get("Pss_Anon", 0) + rollup.get("Pss_Shmem", 0)
    return Sample(seconds, rollup.get("Pss", 0) * 1024, own * 1024, descriptors, threads)


def _is_chunk(entry: Path) -> bool:
    """Whether a descriptor is of a chunk that is still there. Of a file that is gone, or lies on a file system that has
    been unmounted, the kernel gives a name that does not exist."""
    try:
        target = os.readlink(entry)
    except FileNotFoundError:
        return False  # closed meanwhile
    return parse_chunk_name(os.path.basename(target)) is not None and os.path.exists(target)


def _kilobytes(file: Path) -> dict[str, int]:
    found = {}
    for line in file.read_text().splitlines()[1:]:
        name, _, rest = line.partition(":")
        if rest.strip().endswith("kB"):
            found[name] = int(rest.split()[0])
    return found
