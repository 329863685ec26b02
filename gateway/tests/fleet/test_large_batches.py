from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.fleet import large_batches
from spillway_gateway.fleet.event_decoder import (
    BlockRemoved,
    BlockStored,
    EventBatch,
    KvEvent,
    Undecodable,
    decode_batch,
)
from spillway_gateway.fleet.large_batches import PIECE_BLOCKS, PIECE_TOKENS, decode_in_steps
from spillway_gateway.fleet.msgpack_walk import STEP_VALUES
from spillway_gateway.fleet.prefix_index import PrefixIndex

MANY_MEMBERS = {f"member {number}": number for number in range(10_000)}


def decode(payload: bytes) -> tuple[EventBatch, int]:
    steps, taken = decode_in_steps(payload), 0
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            return ended.value, taken
        taken += 1


def stored_fields(blocks: int, size: int, *, shape: str = "array", **other: Any) -> Any:
    fields = {
        "block_hashes": [1000 + number for number in range(blocks)],
        "parent_block_hash": 7,
        "token_ids": [number % 50_000 for number in range(blocks * size)],
        "block_size": size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": "adapter",
        "extra_keys": [["salt"] if not number else None for number in range(blocks)],
        "group_idx": 1,
        "kv_cache_spec_kind": "full_attention",
        **other,
    }
    return {"type": "BlockStored", **fields} if shape == "map" else ["BlockStored", *fields.values()]


def whole(events: list[KvEvent]) -> list[KvEvent]:
    """Pieces joined where each begins behind the one before."""
    joined: list[KvEvent] = []
    for event in events:
        last = joined[-1] if joined else None
        if (
            isinstance(event, BlockStored)
            and isinstance(last, BlockStored)
            and event.parent_hash == last.block_hashes[-1]
        ):
            joined[-1] = BlockStored(
                last.block_hashes + event.block_hashes,
                last.parent_hash,
                last.token_ids + event.token_ids,
                event.block_tokens,
                event.tier,
                event.lora_name,
                last.extra_keys + event.extra_keys,
                event.group,
                event.spec_kind,
                event.store,
            )
        elif isinstance(event, BlockRemoved) and isinstance(last, BlockRemoved):
            joined[-1] = BlockRemoved(last.block_hashes + event.block_hashes, last.tier, last.group, last.store)
        else:
            joined.append(event)
    return joined


@pytest.mark.parametrize("shape", ["array", "map"])
@pytest.mark.parametrize("size", [1, 16, 128, 5000])
def test_a_long_stored_event_is_several_of_consecutive_blocks(shape: str, size: int) -> None:
    payload = msgspec.msgpack.encode([3.5, [stored_fields(200_000 // size, size, shape=shape)], None])

    batch, steps = decode(payload)

    assert whole(batch.events) == decode_batch(payload).events
    assert (batch.timestamp_seconds, batch.undecodable) == (3.5, 0)
    for event in batch.events:
        assert isinstance(event, BlockStored)
        assert len(event.block_hashes) <= PIECE_BLOCKS
        assert len(event.token_ids) <= max(PIECE_TOKENS, size)
    assert steps >= 200_000 // STEP_VALUES


@pytest.mark.parametrize("medium", ["GPU", "CPU", "nvme/00000000000000bb"])
def test_a_long_removed_event_is_several(medium: str) -> None:
    removed = ["BlockRemoved", [number << 40 for number in range(100_000)], medium, None]
    payload = msgspec.msgpack.encode([3.5, [["AllBlocksCleared"], removed, ["AllBlocksCleared"]]])

    batch, _ = decode(payload)

    assert whole(batch.events) == decode_batch(payload).events
    assert max(len(event.block_hashes) for event in batch.events if isinstance(event, BlockRemoved)) <= PIECE_BLOCKS


def test_many_short_events_are_decoded_in_steps() -> None:
    payload = msgspec.msgpack.encode({"events": [["BlockRemoved", [at], "GPU", 0] for at in range(20_000)], "ts": 2})

    batch, steps = decode(payload)

    assert batch.events == decode_batch(payload).events
    assert steps >= 20_000 // large_batches.EVENTS_STEP


@pytest.mark.parametrize("blocks", [4, 64, 500])
def test_a_step_decodes_few_bytes_of_events_that_are_short_each(blocks: int) -> None:
    event = stored_fields(blocks, 16)
    event_bytes = len(msgspec.msgpack.encode(event))
    assert event_bytes < large_batches.SHORT_BYTES_MAX
    payload = msgspec.msgpack.encode({"events": [event] * (500_000 // event_bytes), "ts": 2})

    batch, steps = decode(payload)

    assert batch.events == decode_batch(payload).events
    assert steps >= len(payload) // (large_batches.STEP_BYTES + event_bytes)


@pytest.mark.parametrize(
    "event",
    [
        stored_fields(20_000, 16, token_ids=[1] * 70_000),  # not the tokens of so many blocks
        stored_fields(20_000, 16, block_size=0),
        stored_fields(20_000, 16, block_size="16"),
        stored_fields(20_000, 16, lora_name="x" * 100_000),
        stored_fields(20_000, 16, token_ids=["x" * 10] * 320_000),
        stored_fields(20_000, 16, parent_block_hash=1.5),
        ["BlockStored", "no hashes", None, [1] * 100_000, 1],
        ["BlockStored", [[1] * 100_000], None, [], 0],
        ["BlockRemoved", [None] * 100_000, "GPU", 0],
        ["Unknown", [1] * 100_000],
        {"block_hashes": [1] * 100_000},
        {**stored_fields(20_000, 16, shape="map"), **MANY_MEMBERS},
    ],
)
def test_a_long_event_of_no_known_form_is_counted_and_the_others_apply(event: Any) -> None:
    removed = ["BlockRemoved", [5], "GPU", 0]

    batch, _ = decode(msgspec.msgpack.encode([1.0, [removed, event, removed]]))

    assert batch.undecodable == 1
    assert batch.events[0] == batch.events[-1] == decode_batch(msgspec.msgpack.encode([1.0, [removed]])).events[0]


@pytest.mark.parametrize("batch", [{"ts": 1.0, "events": [], **MANY_MEMBERS}, [1.0, [], *MANY_MEMBERS]])
def test_a_batch_of_many_members_is_not_walked(batch: Any) -> None:
    with pytest.raises(Undecodable, match="members"):
        decode(msgspec.msgpack.encode(batch))


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=40)
    | st.binary(max_size=300),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=40,
)
events = (
    st.tuples(st.integers(1, 30), st.integers(1, 4), st.sampled_from(["array", "map"])).map(
        lambda given: stored_fields(given[0], given[1], shape=given[2])
    )
    | st.lists(st.integers(0, 2**64 - 1), max_size=40).map(lambda hashes: ["BlockRemoved", hashes, "CPU", 0])
    | st.sampled_from([["AllBlocksCleared"], ["Unknown", 5], 7, None, {"type": "Unknown"}, []])
)


@given(st.lists(events, max_size=5))
def test_in_steps_as_at_once(given_events: list[Any]) -> None:
    payload = msgspec.msgpack.encode([1.5, given_events, None])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_batches, "SHORT_BYTES_MAX", 64)
        patch.setattr(large_batches, "PIECE_BLOCKS", 3)
        patch.setattr(large_batches, "PIECE_TOKENS", 4)
        batch, _ = decode(payload)
    expected = decode_batch(payload)

    assert whole(batch.events) == whole(expected.events)
    assert (batch.timestamp_seconds, batch.undecodable) == (expected.timestamp_seconds, expected.undecodable)


@given(st.binary(max_size=400) | values.map(msgspec.msgpack.encode))
def test_no_bytes_raise_anything_else(payload: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_batches, "SHORT_BYTES_MAX", 0)
        try:
            decode(payload)
        except Undecodable:
            pass


@pytest.mark.parametrize("block_tokens", [16, "16", None])
def test_a_long_removed_event_that_has_tokens_is_a_removed_event(block_tokens: object) -> None:
    removed = {**stored_fields(5_000, 16, shape="map"), "type": "BlockRemoved", "block_size": block_tokens}
    payload = msgspec.msgpack.encode([1.0, [removed]])
    assert len(payload) > large_batches.SHORT_BYTES_MAX

    batch, _ = decode(payload)
    assert whole(batch.events) == decode_batch(payload).events
    assert isinstance(batch.events[0], BlockRemoved)


FIELDS = [
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "medium",
    "extra_keys",
    "group_idx",
    "ownership",
]


@given(
    tag=st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared"]) | values,
    changed=st.dictionaries(st.sampled_from(FIELDS), values, max_size=3),
    short_bytes=st.sampled_from([1, 16, 256]),
)
def test_whatever_the_fields_hold_is_an_event_or_undecodable(
    tag: object, changed: dict[str, object], short_bytes: int
) -> None:
    """Any other exception would end the task that follows the engine's events, and again at each replay."""
    payload = msgspec.msgpack.encode([1.0, [{**stored_fields(3, 2, shape="map"), **changed, "type": tag}]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_batches, "SHORT_BYTES_MAX", short_bytes)
        try:
            batch, _ = decode(payload)
        except Undecodable:
            return
    index = PrefixIndex("m", bytes_max=100_000, orphans_max=3, default_block_tokens=2, clock=lambda: 0.0)
    index.add_engine("e")
    for event in batch.events:
        index.apply("e", event)
