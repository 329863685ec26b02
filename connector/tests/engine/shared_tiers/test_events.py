"""Announcements as the gateway reads them: made with vLLM's own classes, encoded with its encoder."""

from __future__ import annotations

import msgspec
from vllm.distributed.kv_events import KVEventBatch
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from spillway_connector.engine.shared_tiers.events import shared_tier_events
from spillway_connector.transfer.announcements import Announcement

STORE = bytes(range(8))
HASHES = [bytes([number]) * 32 for number in range(4)]


def key(block_hash: bytes, group: int = 0, adapter: bytes = b"") -> bytes:
    return block_hash + adapter + group.to_bytes(4, "big")


def published(*announcements: Announcement, hash_bytes: int = 32) -> list[dict[str, object]]:
    events = list(shared_tier_events([("redis", each) for each in announcements], hash_bytes))
    raw = msgspec.msgpack.decode(msgspec.msgpack.encode(KVEventBatch(ts=1.0, events=events)))
    assert len(raw["events"] if isinstance(raw, dict) else raw[1]) == len(events)
    return [
        {
            "stored": type(event).__name__ == "BlockStored",
            "hashes": event.block_hashes,
            "medium": event.medium,
            "group": event.group_idx,
        }
        for event in events
    ]


def test_an_engine_without_a_request_yet_names_its_store() -> None:
    assert published(Announcement(STORE, False, ()), hash_bytes=0) == [
        {"stored": True, "hashes": [], "medium": "redis/0001020304050607", "group": None}
    ]
    assert published(Announcement(STORE, True, ())) == [
        {"stored": False, "hashes": [], "medium": "redis/0001020304050607", "group": None}
    ]


def test_hashes_are_those_of_the_device_by_group() -> None:
    as_device = [maybe_convert_block_hash(BlockHash(each)) for each in HASHES]
    keys = (key(HASHES[0]), key(HASHES[1], group=2), key(HASHES[2]))
    medium = "redis/" + STORE.hex()
    for removed in (False, True):
        assert published(Announcement(STORE, removed, keys)) == [
            {"stored": not removed, "hashes": [as_device[0], as_device[2]], "medium": medium, "group": 0},
            {"stored": not removed, "hashes": [as_device[1]], "medium": medium, "group": 2},
        ]


def test_blocks_of_adapters_are_left_out() -> None:
    keys = (key(HASHES[0], adapter=b"a" * 16), key(HASHES[1]))
    [event] = published(Announcement(STORE, False, keys))
    assert event["hashes"] == [maybe_convert_block_hash(BlockHash(HASHES[1]))]
    assert published(Announcement(STORE, False, keys[:1])) == []
