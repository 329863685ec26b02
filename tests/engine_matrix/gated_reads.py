"""Reads of an NVMe tier that wait for a load to begin early, so that one certainly does where loads can.

The first prompt's are as fast as the tier, as loads begin early only if the tier's measured rate promises the rest
soon. Then they are made one at a time and with pauses, so that the engine takes steps in which a part of a load is
ready and the rest is not. The first part that is sent ends that.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_FAST_READS = 12  # chunks of a prompt
_PAUSE_SECONDS = 0.2


@contextmanager
def gated_reads() -> Iterator[Callable[[], int]]:
    """Gate the reads of this process's engines while the block lasts. Yields a count of the parts of loads that were
    sent before the rest of the load had been read."""
    from spillway_connector.engine.manager.early_loads import Due, EarlyLoad
    from spillway_connector.tiers.disk.files.tier import FileTier
    from spillway_connector.tiers.disk.slab.tier import SlabTier
    from spillway_connector.tiers.tier import BlockInMemory

    sent = threading.Event()
    turn = threading.Lock()
    reads = itertools.count()
    parts = 0
    due, file_load, slab_load, slab_in_memory = EarlyLoad.due, FileTier.load, SlabTier.load, SlabTier.in_memory

    def watched(load: EarlyLoad, ready: Any, resident: Any) -> Due | None:
        nonlocal parts
        found = due(load, ready, resident)
        if found is not None and found.ready and not found.last:
            parts += 1
            sent.set()
        return found

    def wait_for_turn() -> None:
        if next(reads) >= _FAST_READS and not sent.is_set():
            with turn:
                sent.wait(_PAUSE_SECONDS)

    def gated(read: Callable[..., None]) -> Callable[..., None]:
        def load(*arguments: Any) -> None:
            wait_for_turn()
            read(*arguments)

        return load

    def gated_in_memory(tier: SlabTier, key: bytes, deadline: float) -> BlockInMemory | None:
        block = slab_in_memory(tier, key, deadline)
        if block is not None:
            wait_for_turn()
        return block

    EarlyLoad.due = watched  # type: ignore[method-assign]
    FileTier.load, SlabTier.load = gated(file_load), gated(slab_load)  # type: ignore[method-assign]
    SlabTier.in_memory = gated_in_memory  # type: ignore[method-assign]
    try:
        yield lambda: parts
    finally:
        EarlyLoad.due, FileTier.load, SlabTier.load = due, file_load, slab_load  # type: ignore[method-assign]
        SlabTier.in_memory = slab_in_memory  # type: ignore[method-assign]
