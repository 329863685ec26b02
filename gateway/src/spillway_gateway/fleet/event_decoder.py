"""Decodes KV events of vLLM: bytes in, typed values out. Pure; raises nothing but Undecodable on any input.

Two shapes are in use: arrays with the tag first (0.23) and maps with a "type" key (from 0.26 on); hashes are
64-bit integers or raw bytes, and one engine can send both (0.23 sends device events as integers and CPU-tier events as
bytes). Replay frames carry a topic in newer engines and none in older ones, so the number of frames decides.
Unknown tags and fields are counted and skipped, so an engine upgrade does not stop the index.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import msgspec

from spillway_settings.wire import names_a_node, names_a_store

_decode = msgspec.msgpack.Decoder().decode
BLOCK_TOKENS_MAX = 32_768  # more than the largest attention blocks of hybrid models
_END_OF_REPLAY = b"\xff" * 8
_HASH_MASK = (1 << 64) - 1


class Undecodable(Exception):
    """A frame or payload that is not a KV event batch."""


class Tier(IntEnum):
    """Place of a block, from the engine's device outwards. Values are bit positions of the index."""

    DEVICE = 0
    CPU = 1
    SHARED = 2


@dataclass(frozen=True, slots=True)
class BlockStored:
    """block_hashes: The engine's keys, in the order of positions. token_ids: all tokens of all listed blocks, or
    empty."""

    block_hashes: list[int]
    parent_hash: int | None
    token_ids: list[int]
    block_tokens: int
    tier: Tier
    lora_name: str | None
    extra_keys: list[object]  # per block: None or a list; empty when absent
    group: int
    spec_kind: str | None
    store: str | None = None  # the shared tier's or the node's, if the medium names it


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """block_hashes: The engine's keys of blocks that left the tier. store: as in BlockStored."""

    block_hashes: list[int]
    tier: Tier
    group: int
    store: str | None = None


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The device prefix cache was reset; other tiers may still hold their blocks."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class EventBatch:
    """One decoded payload."""

    timestamp_seconds: float  # the engine's clock when it published
    events: list[KvEvent]
    undecodable: int  # events of unknown tag or shape in this batch


@dataclass(frozen=True, slots=True)
class ReplayEnd:
    """The publisher has sent all it had."""


@dataclass(frozen=True, slots=True)
class BatchFrame:
    """One message: its sequence number and the undecoded batch."""

    sequence: int
    payload: bytes


def parse_live_frames(frames: Sequence[bytes]) -> BatchFrame:
    """`[topic, sequence, payload]` as a SUB socket reads it."""
    if len(frames) != 3 or len(frames[1]) != 8:
        raise Undecodable(f"live message of {len(frames)} frames; 3 with an 8-byte sequence needed")
    return BatchFrame(int.from_bytes(frames[1], "big"), frames[2])


def parse_replay_frames(frames: Sequence[bytes]) -> BatchFrame | ReplayEnd:
    """`[b"", sequence, payload]` or `[b"", topic, sequence, payload]` as a DEALER reads it."""
    if len(frames) not in (3, 4) or frames[0] != b"" or len(frames[-2]) != 8:
        raise Undecodable(f"replay message of {len(frames)} frames; 3 or 4 with an 8-byte sequence needed")
    sequence, payload = frames[-2], frames[-1]
    if sequence == _END_OF_REPLAY and payload == b"":
        return ReplayEnd()
    return BatchFrame(int.from_bytes(sequence, "big"), payload)


def replay_request(start_sequence: int) -> list[bytes]:
    """Frames that ask a publisher for every batch from this sequence number on."""
    return [b"", start_sequence.to_bytes(8, "big")]


def decode_batch(payload: bytes) -> EventBatch:
    """Decode one payload. Raises Undecodable when the outer shape is not a batch."""
    try:
        document = _decode(payload)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError, TypeError, OverflowError) as error:
        raise Undecodable(f"payload of {len(payload)} bytes is not msgpack") from error
    if isinstance(document, dict):
        timestamp, raw_events = document.get("ts"), document.get("events")
    elif isinstance(document, list) and len(document) >= 2:
        timestamp, raw_events = document[0], document[1]
    else:
        timestamp, raw_events = None, None
    if not isinstance(raw_events, list):
        raise Undecodable("payload holds no list of events")
    events = [event for event in map(event_of, raw_events) if event is not None]
    return batch_of(timestamp, events, len(raw_events) - len(events))


def batch_of(timestamp: object, events: list[KvEvent], undecodable: int) -> EventBatch:
    """A batch of decoded events. timestamp: as the batch has it."""
    try:
        seconds = float(timestamp) if isinstance(timestamp, (int, float)) else 0.0
    except OverflowError:
        seconds = 0.0
    # Not-a-number and infinities would compare wrongly with every later time.
    return EventBatch(seconds if math.isfinite(seconds) else 0.0, events, undecodable)


STORED_FIELDS = (
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
)
REMOVED_FIELDS = ("block_hashes", "medium", "group_idx")


def event_of(raw: object) -> KvEvent | None:
    """A decoded event of either shape; None: unknown."""
    if isinstance(raw, list) and raw:
        names = STORED_FIELDS if raw[0] == "BlockStored" else REMOVED_FIELDS
        return event_of_fields(raw[0], dict(zip(names, raw[1:], strict=False)))
    return event_of_fields(raw.get("type"), raw) if isinstance(raw, dict) else None


def event_of_fields(tag: object, fields: dict[str, object]) -> KvEvent | None:
    """An event by its fields; None: unknown."""
    if tag == "BlockStored":
        return _stored(fields)
    if tag == "BlockRemoved":
        return _removed(fields)
    return AllBlocksCleared() if tag == "AllBlocksCleared" else None


def _stored(fields: dict[str, object]) -> BlockStored | None:
    hashes = _hash_list(fields.get("block_hashes"))
    parent_raw = fields.get("parent_block_hash")
    parent = None if parent_raw is None else normalise_hash(parent_raw)
    tokens = fields.get("token_ids") or []
    block_tokens = fields.get("block_size") or 0
    if hashes is None or (parent is None and parent_raw is not None):
        return None
    if not isinstance(tokens, list) or not isinstance(block_tokens, int) or not 0 <= block_tokens <= BLOCK_TOKENS_MAX:
        return None
    if tokens and (block_tokens == 0 or len(tokens) != block_tokens * len(hashes) or not _are_token_ids(tokens)):
        return None
    lora_name = fields.get("lora_name")
    extra_keys = fields.get("extra_keys")
    spec_kind = fields.get("kv_cache_spec_kind")
    return BlockStored(
        block_hashes=hashes,
        parent_hash=parent,
        token_ids=tokens,
        block_tokens=block_tokens,
        tier=tier_of(fields.get("medium"), fields.get("ownership")),
        lora_name=lora_name if isinstance(lora_name, str) else None,
        extra_keys=extra_keys if isinstance(extra_keys, list) else [],
        group=_group(fields.get("group_idx")),
        spec_kind=spec_kind if isinstance(spec_kind, str) else None,
        store=store_of(fields.get("medium")),
    )


def _removed(fields: dict[str, object]) -> BlockRemoved | None:
    hashes = _hash_list(fields.get("block_hashes"))
    if hashes is None:
        return None
    medium = fields.get("medium")
    tier = tier_of(medium, fields.get("ownership"))
    return BlockRemoved(hashes, tier, _group(fields.get("group_idx")), store_of(medium))


def _are_token_ids(tokens: list[object]) -> bool:
    return all(type(token) is int and 0 <= token < 1 << 32 for token in tokens)


def _hash_list(raw: object) -> list[int] | None:
    if not isinstance(raw, list):
        return None
    hashes = []
    for item in raw:
        value = normalise_hash(item)
        if value is None:
            return None
        hashes.append(value)
    return hashes


def normalise_hash(raw: object) -> int | None:
    """An engine key as an unsigned 64-bit integer; raw bytes count by their last eight, as the engine itself does."""
    if type(raw) is int:
        return raw & _HASH_MASK
    if isinstance(raw, bytes) and raw:
        return int.from_bytes(raw[-8:], "big")
    return None


def tier_of(medium: object, ownership: object = None) -> Tier:
    """Device media are named after the platform (GPU, NPU); anything that is neither device nor CPU is shared."""
    name = ownership if isinstance(ownership, str) and ownership else medium
    if not isinstance(name, str):
        return Tier.DEVICE
    upper = name.upper()
    if upper in ("GPU", "NPU", "CUDA", "XPU", "TPU", "HBM", "DEVICE"):
        return Tier.DEVICE
    return Tier.CPU if upper in ("CPU", "HOST", "DRAM") or names_a_node(name) else Tier.SHARED


def store_of(medium: object) -> str | None:
    """The store that a medium of Spillway's connector names (engine/shared_tiers/events.py); others name none."""
    return medium if isinstance(medium, str) and names_a_store(medium) else None


def _group(raw: object) -> int:
    return raw if type(raw) is int and raw >= 0 else 0


class Extras(NamedTuple):
    """The extra keys that an engine hashed into a block. cache_salt: part of the namespace. others: part of the
    block's key."""

    cache_salt: str | None
    others: list[object]


def split_extras(raw: object, lora_name: str | None) -> Extras:
    """Split one block's entry of `extra_keys`, which is None or a list. Pure.

    0.23 sends untagged values in the order adapter name, [image hash, offset] pairs, salt, embeddings digest; newer
    engines tag them. The adapter is left out: the event names it.
    """
    if not isinstance(raw, list):
        return Extras(None, [])
    cache_salt: str | None = None
    others: list[object] = []
    for value in raw:
        if isinstance(value, str):
            if value == lora_name:
                continue
            cache_salt = value
        elif isinstance(value, list) and len(value) == 2 and value[0] == "cache_salt" and isinstance(value[1], str):
            cache_salt = value[1]
        elif isinstance(value, list) and value and value[0] == "lora":
            continue
        else:
            others.append(value)
    return Extras(cache_salt, others)
