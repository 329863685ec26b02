"""vLLM's ARC policy, by which what clients asked to retain leaves last."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from itertools import chain
from typing import Any

from typing_extensions import override
from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.kv_offload.cpu.policies.arc import ARCCachePolicy


class HoldingArc(ARCCachePolicy):
    """vLLM's ARC, by which what clients asked to retain leaves last.

    Args:
        rows: How many rows the tier has.
        held: The chunks that are held now.
    """

    def __init__(self, rows: int, held: Callable[[], AbstractSet[OffloadKey]]) -> None:
        super().__init__(cache_capacity=rows)
        self._held = held

    @override
    def evict(self, n: int, protected: set[OffloadKey]) -> Any:  # this generation's class of entries
        """Evict as ARC does without the held chunks; if that is not enough, all others of both of its lists first."""
        held = self._held()
        if not held:
            return super().evict(n, protected)
        others = protected.union(held)
        found = super().evict(n, others)
        if found is not None:
            return found
        free = [key for key, chunk in chain(self.t1.items(), self.t2.items()) if not chunk.ref_cnt]
        if sum(key not in protected for key in free) < n:
            return None
        target, self.target_t1_size = self.target_t1_size, 0.0  # or what was used once would stay
        try:
            first = super().evict(min(n, sum(key not in others for key in free)), others) or []
            return [*first, *(super().evict(n - len(first), protected) or ())]
        finally:
            self.target_t1_size = target
