"""Memory in tests: regions that one process alone opens, and what the kernel reports of a mapping."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path

from spillway_connector.device.host_region import HostRegion, region_path

_numbers = count()


def unnamed_region(num_rows: int, row_bytes: int) -> HostRegion:
    """Open a region whose name is gone already, so that a killed test or bench leaves nothing in /dev/shm."""
    region = HostRegion(region_path(f"unnamed-{os.getpid()}-{next(_numbers)}"), num_rows, row_bytes)
    region.unlink_name()
    return region


def mapped_bytes(address: int) -> int:
    """Return the resident bytes (RSS) of the mapping that starts at ``address``.

    Raises:
        ValueError: No mapping starts there.
    """
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    if not any(line.startswith(f"{address:x}-") for line in lines):
        raise ValueError(f"no mapping starts at {address:#x}")
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Rss:"))
