"""A slab tier whose loads come from the page cache where they can, as an engine's do."""

from __future__ import annotations

from typing_extensions import override

from spillway_connector.tiers.disk.slab.tier import SlabTier


class CacheFirst(SlabTier):
    """``from_memory``: how many loads were served from the page cache."""

    from_memory = 0

    @override
    def load(self, key: bytes, target: memoryview, deadline: float) -> None:
        block = self.in_memory(key, deadline)
        if block is not None and block.copy_to(target):
            self.from_memory += 1
            return
        super().load(key, target, deadline)
