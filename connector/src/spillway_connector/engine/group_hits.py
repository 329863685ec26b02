"""Keeping what one KV group has on the device from being taken for what another group loads.

For a request that is partly on the device and partly loaded, vLLM 0.23 goes group by group: it takes hold of the
group's blocks on the device, then takes free blocks for its load. Blocks that a later group has on the device are still
free then, so they can be taken and overwritten; the engine ends in an assert, or one block serves two groups
(vllm#43884, mended later by vllm#44409). Here all groups' blocks are held until every group has its own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_utils import KVCacheBlock

_MARK = "_spillway_holds_hits"


def hold_hits_of_all_groups() -> None:
    """For every scheduler of this process, from now on. Twice is harmless."""
    original = KVCacheCoordinator.allocate_new_computed_blocks
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def allocate(
        self: Any,
        request_id: str,
        new_computed_blocks: tuple[Sequence[KVCacheBlock], ...],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        arguments = request_id, new_computed_blocks, num_local_computed_tokens, num_external_computed_tokens
        if len(self.single_type_managers) == 1 or not num_external_computed_tokens:
            original(self, *arguments)
            return
        total = num_local_computed_tokens + num_external_computed_tokens
        held: list[KVCacheBlock] = []
        for manager, blocks in zip(self.single_type_managers, new_computed_blocks, strict=True):
            # Those that a window has left behind are not kept, and not in the sum that admitted the request.
            held += blocks[manager.get_num_skipped_tokens(total) // manager.block_size :]
        self.block_pool.touch(held)
        try:
            original(self, *arguments)
        finally:
            self.block_pool.free_blocks(held)

    setattr(allocate, _MARK, True)
    KVCacheCoordinator.allocate_new_computed_blocks = allocate  # type: ignore[method-assign]
