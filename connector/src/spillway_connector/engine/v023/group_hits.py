"""Keeps device blocks that one KV group hits from being allocated for what another group loads.

For a request that is partly on the device and partly loaded, vLLM 0.23 goes group by group: it touches the
group's cached blocks, then allocates free blocks for its load. Cached blocks of a later group are still in the free
queue then, so they can be allocated and overwritten; the engine ends in an assert, or one block serves two groups
(vllm#43884, fixed later by vllm#44409). Here the cached blocks of all groups are touched before any is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock


def holding_allocate(original: Any) -> Callable[..., None]:
    """Wrap KVCacheCoordinator.allocate_new_computed_blocks."""

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
            # Blocks outside the window are not kept, and not in the count that admitted the request.
            held += blocks[manager.get_num_skipped_tokens(total) // manager.block_size :]
        self.block_pool.touch(held)
        try:
            original(self, *arguments)
        finally:
            self.block_pool.free_blocks(held)

    return allocate
