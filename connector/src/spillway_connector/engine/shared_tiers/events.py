"""Announcements about shared tiers as vLLM's KV events, in any generation.

The medium names the store (`spillway_settings.wire.store_medium`). Events hold no tokens: those came
with the device's events of the same blocks, under the same hashes. An event without blocks is about the engine itself:
stored, it loads from this store; removed, it no longer does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import BlockHash, ExternalBlockHash, maybe_convert_block_hash

from spillway_connector.transfer.announcements import Announcement
from spillway_settings.wire import store_medium

_GROUP_BYTES = 4  # at the end of a key


def shared_tier_events(
    announcements: Iterable[tuple[str, Announcement]], hash_bytes: int
) -> Iterator[BlockStored | BlockRemoved]:
    """hash_bytes: the length of vLLM's block hashes. Chunks of adapters are left out: their hash has the adapter's
    name alone, under which another engine may have other weights, and the store tells these apart by more than the
    hash."""
    for tier_type, (store_id, removed, keys) in announcements:
        medium = store_medium(tier_type, store_id)
        if not keys:
            yield _event([], removed, medium, None)
            continue
        groups: dict[int, list[ExternalBlockHash]] = {}
        for key in keys:
            if len(key) == hash_bytes + _GROUP_BYTES:
                group = int.from_bytes(key[hash_bytes:], "big")
                groups.setdefault(group, []).append(maybe_convert_block_hash(BlockHash(key[:hash_bytes])))
        for group, hashes in groups.items():
            yield _event(hashes, removed, medium, group)


def _event(
    hashes: list[ExternalBlockHash], removed: bool, medium: str, group: int | None
) -> BlockStored | BlockRemoved:
    if removed:
        return BlockRemoved(block_hashes=hashes, medium=medium, group_idx=group)
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=None,
        token_ids=[],
        block_size=0,
        lora_id=None,
        medium=medium,
        lora_name=None,
        group_idx=group,
    )
