"""Whether memory is nearer to some processors than to others (NUMA)."""

from __future__ import annotations

from pathlib import Path

_NODES_WITH_MEMORY = Path("/sys/devices/system/node/has_memory")


def has_several_memory_nodes(listing: Path = _NODES_WITH_MEMORY) -> bool:
    """False if the kernel does not say: `0` is one node, `0-3` and `0,2` are several."""
    try:
        text = listing.read_text().strip()
    except OSError:
        return False
    return "-" in text or "," in text
