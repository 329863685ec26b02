from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.fleet.event_decoder import (
    AllBlocksCleared,
    BatchFrame,
    BlockRemoved,
    BlockStored,
    ReplayEnd,
    Tier,
    Undecodable,
    decode_batch,
    normalise_hash,
    parse_live_frames,
    parse_replay_frames,
    tier_of,
)

# The engine's own hash of [1, 2, 3, 4], sha256_cbor, PYTHONHASHSEED=0: as an integer, and as the last bytes of 32.
VECTOR = 2164874634404590027


def packed(*events: object) -> bytes:
    return msgspec.msgpack.encode([12.5, list(events), None])


def test_array_form() -> None:
    batch = decode_batch(
        packed(
            ["BlockStored", [VECTOR], None, [1, 2, 3, 4], 4, None, "GPU", None, [["tenantA"]], None, None, None],
            ["BlockRemoved", [VECTOR], "CPU", None],
            ["AllBlocksCleared"],
        )
    )

    stored, removed, cleared = batch.events
    assert isinstance(stored, BlockStored)
    assert (stored.block_hashes, stored.token_ids, stored.block_tokens) == ([VECTOR], [1, 2, 3, 4], 4)
    assert (stored.tier, stored.extra_keys, stored.group) == (Tier.DEVICE, [["tenantA"]], 0)
    assert removed == BlockRemoved([VECTOR], Tier.CPU, 0)
    assert isinstance(cleared, AllBlocksCleared)
    assert (batch.timestamp_seconds, batch.undecodable) == (12.5, 0)


def test_map_form_means_the_same() -> None:
    array = packed(["BlockStored", [VECTOR], 7, [1, 2], 2, None, "GPU", "adapter", None, 1, "mla_attention", None])
    mapping = packed(
        {
            "type": "BlockStored",
            "block_hashes": [VECTOR],
            "parent_block_hash": 7,
            "token_ids": [1, 2],
            "block_size": 2,
            "medium": "GPU",
            "lora_name": "adapter",
            "group_idx": 1,
            "kv_cache_spec_kind": "mla_attention",
            "a_field_of_tomorrow": {"x": 1},
        }
    )

    assert decode_batch(array).events == decode_batch(mapping).events


def test_short_arrays_of_older_engines() -> None:
    (event,) = decode_batch(packed(["BlockStored", [1], None, [9, 9], 2])).events

    assert isinstance(event, BlockStored)
    assert event.tier is Tier.DEVICE


def test_cpu_events_carry_raw_bytes_and_no_tokens() -> None:
    raw = b"\x00" * 24 + VECTOR.to_bytes(8, "big")
    (event,) = decode_batch(packed(["BlockStored", [raw], None, [], 0, None, "CPU"])).events

    assert isinstance(event, BlockStored)
    assert event.block_hashes == [VECTOR]
    assert event.tier is Tier.CPU


def test_ownership_names_the_tier() -> None:
    assert tier_of("CPU", "REDIS") is Tier.SHARED
    assert tier_of("STORAGE") is Tier.SHARED
    assert tier_of("NPU") is Tier.DEVICE
    assert tier_of(None) is Tier.DEVICE


@pytest.mark.parametrize(
    "event",
    [
        ["SomethingNew", 1],
        ["BlockStored", [1], None, [1, 2, 3], 2],
        ["BlockStored", [1], None, [-1, 2], 2],
        ["BlockStored", ["x"], None, [1, 2], 2],
        ["BlockStored", [1], 1.5, [1, 2], 2],
        ["BlockRemoved", None],
        {"no": "type"},
        7,
        [],
    ],
)
def test_strange_events_are_counted_and_the_others_kept(event: object) -> None:
    batch = decode_batch(packed(event, ["AllBlocksCleared"]))

    assert batch.undecodable == 1
    assert batch.events == [AllBlocksCleared()]


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text()
    | st.binary()
    | st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "type", "block_hashes", "events"]),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text() | st.just("type"), inner, max_size=4),
    max_leaves=25,
)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_never_raise_otherwise(payload: bytes) -> None:
    try:
        decode_batch(payload)
    except Undecodable:
        pass


@given(anything, st.lists(anything, max_size=4))
def test_arbitrary_msgpack_never_raises_otherwise(document: object, events: list[object]) -> None:
    for payload in (msgspec.msgpack.encode(document), msgspec.msgpack.encode([0.0, events])):
        try:
            decode_batch(payload)
        except Undecodable:
            pass


def test_deep_nesting_is_undecodable() -> None:
    with pytest.raises(Undecodable):
        decode_batch(b"\x91" * 100_000 + b"\x00")


@given(st.lists(st.binary(max_size=10), max_size=6))
def test_arbitrary_frames_never_raise_otherwise(frames: list[bytes]) -> None:
    for parse in (parse_live_frames, parse_replay_frames):
        try:
            parse(frames)
        except Undecodable:
            pass


def test_both_replay_framings() -> None:
    sequence = (5).to_bytes(8, "big")

    assert parse_replay_frames([b"", sequence, b"p"]) == BatchFrame(5, b"p")
    assert parse_replay_frames([b"", b"topic", sequence, b"p"]) == BatchFrame(5, b"p")
    assert parse_replay_frames([b"", b"\xff" * 8, b""]) == ReplayEnd()
    assert parse_replay_frames([b"", b"", b"\xff" * 8, b""]) == ReplayEnd()


def test_hashes_normalise_alike() -> None:
    assert normalise_hash(VECTOR) == normalise_hash(b"prefix" * 4 + VECTOR.to_bytes(8, "big")) == VECTOR
    assert normalise_hash("text") is None
    assert normalise_hash(True) is None


@pytest.mark.parametrize(
    ("medium", "store"),
    [
        ("redis/00112233445566aa", "redis/00112233445566aa"),
        ("nvme/00112233445566aa", "nvme/00112233445566aa"),
        ("s3/00112233445566aa", "s3/00112233445566aa"),
        ("node/00112233445566aa", "node/00112233445566aa"),
        ("redis/00112233445566AA", None),
        ("redis/00112233445566aa0", None),
        ("redis/", None),
        ("STORAGE", None),
        ("GPU", None),
        (None, None),
        (7, None),
    ],
)
def test_a_medium_names_a_store_in_spillways_form_alone(medium: object, store: str | None) -> None:
    stored = ["BlockStored", [1], None, [], 0, None, medium, None]
    removed = ["BlockRemoved", [1], medium]
    batch = decode_batch(msgspec.msgpack.encode([1.0, [stored, removed], None]))
    assert [event.store for event in batch.events if not isinstance(event, AllBlocksCleared)] == [store, store]
    if store is not None:
        assert tier_of(medium) is (Tier.CPU if store.startswith("node/") else Tier.SHARED)
