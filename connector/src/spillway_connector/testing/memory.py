"""This process's memory as the kernel reports it."""

from __future__ import annotations

from pathlib import Path


def mapped_bytes(address: int) -> int:
    """Resident bytes (RSS) of the mapping that starts at ``address``.

    Raises ValueError when no mapping starts there.
    """
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    if not any(line.startswith(f"{address:x}-") for line in lines):
        raise ValueError(f"no mapping starts at {address:#x}")
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Rss:"))
