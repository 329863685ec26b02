"""Reads of an NVMe tier that wait for a load to begin early, so that one certainly does where loads can.

The first reads pass, enough for a load to begin; the others wait until a part of that load has been sent.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_PASSING = 6  # of the twelve chunks of a prompt; a load begins with a quarter of them
_GATE_SECONDS = 20.0  # where no load begins early the reads then pass, and nothing is counted


@contextmanager
def gated_reads() -> Iterator[Callable[[], int]]:
    """For engines of this process, while the block lasts. Yields what counts the parts of loads that were sent before
    the rest of the load had been read."""
    from spillway_connector.engine.early_loads import Due, EarlyLoad
    from spillway_connector.tiers.disk.files.tier import FileTier
    from spillway_connector.tiers.disk.slab.tier import SlabTier

    gate = threading.Event()
    reads = itertools.count()
    parts = 0
    due, file_load, slab_load = EarlyLoad.due, FileTier.load, SlabTier.load

    def watched(load: EarlyLoad, ready: Any, resident: Any) -> Due | None:
        nonlocal parts
        found = due(load, ready, resident)
        if found is not None and found.ready and not found.last:
            parts += 1
            gate.set()
        return found

    def gated(read: Callable[..., None]) -> Callable[..., None]:
        def load(*arguments: Any) -> None:
            if next(reads) >= _PASSING:
                gate.wait(_GATE_SECONDS)
            read(*arguments)

        return load

    EarlyLoad.due = watched  # type: ignore[method-assign]
    FileTier.load, SlabTier.load = gated(file_load), gated(slab_load)  # type: ignore[method-assign]
    try:
        yield lambda: parts
    finally:
        EarlyLoad.due, FileTier.load, SlabTier.load = due, file_load, slab_load  # type: ignore[method-assign]
