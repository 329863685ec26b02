"""Whether memory is nearer to some processors than to others (NUMA)."""

from __future__ import annotations

import os
from collections.abc import Set as AbstractSet
from pathlib import Path

_NODES = Path("/sys/devices/system/node")
_NODES_WITH_MEMORY = _NODES / "has_memory"


def has_several_memory_nodes(listing: Path = _NODES_WITH_MEMORY) -> bool:
    """Whether the machine has several memory nodes (`0` is one, `0-3` and `0,2` are several); False if the kernel does
    not say."""
    try:
        text = listing.read_text().strip()
    except OSError:
        return False
    return "-" in text or "," in text


def cores_of_memory_nodes(folder: Path = _NODES, allowed: AbstractSet[int] | None = None) -> list[frozenset[int]]:
    """The cores of each memory node on which this process may run; a node without one is left out.

    allowed: the cores that this process may use; None: as the kernel says.
    """
    allowed = os.sched_getaffinity(0) if allowed is None else allowed
    found = []
    for listing in sorted(folder.glob("node[0-9]*/cpulist")):
        try:
            cores = frozenset(allowed & numbers_in(listing.read_text()))
        except (OSError, ValueError):
            continue
        if cores:
            found.append(cores)
    return found


def numbers_in(listing: str) -> set[int]:
    """`0-2,7` -> 0, 1, 2 and 7. Raises ValueError."""
    found: set[int] = set()
    for part in filter(None, listing.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
