"""Events as bytes: msgpack batches in the form of vLLM 0.23 (arrays) or of 0.26 and later (maps).

Device blocks carry integer hashes and their tokens. Blocks of lower tiers carry raw 32-byte hashes, no tokens and block
size 0, as 0.23's offloading sends them; the last eight bytes are the device hash.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from spillway_simulator.model.events import BlocksRemoved, BlocksStored, KvEvent, Medium

EventForm = Literal["array", "map"]
_encode = msgspec.msgpack.Encoder().encode


def encode_batch(seconds: float, events: Sequence[KvEvent], block_tokens: int, form: EventForm) -> bytes:
    """seconds: The engine's wall clock, which `ts` carries."""
    shape = _array if form == "array" else _map
    return _encode([seconds, [shape(event, block_tokens) for event in events], None])


def _hashes(keys: Sequence[int], medium: Medium) -> list[int] | list[bytes]:
    if medium is Medium.DEVICE:
        return list(keys)
    return [key.to_bytes(32, "big") for key in keys]


def _extra_keys(event: BlocksStored) -> list[list[str] | None] | None:
    return [[event.salt], *[None] * (len(event.keys) - 1)] if event.salt is not None else None


def _array(event: KvEvent, block_tokens: int) -> list[Any]:
    if isinstance(event, BlocksStored):
        hashes = _hashes(event.keys, event.medium)
        if event.tokens is None:
            return ["BlockStored", hashes, None, [], 0, None, event.medium.value, None, None, None, None, None]
        tokens = event.tokens.tolist()
        extra = _extra_keys(event)
        group, kind = 0, "full_attention"
        return ["BlockStored", hashes, event.parent, tokens, block_tokens, None, "GPU", None, extra, group, kind, None]
    if isinstance(event, BlocksRemoved):
        group_or_none = 0 if event.medium is Medium.DEVICE else None
        return ["BlockRemoved", _hashes(event.keys, event.medium), event.medium.value, group_or_none]
    return ["AllBlocksCleared"]


def _map(event: KvEvent, block_tokens: int) -> dict[str, Any]:
    if isinstance(event, BlocksStored):
        device = event.tokens is not None
        document: dict[str, Any] = {
            "type": "BlockStored",
            "block_hashes": _hashes(event.keys, event.medium),
            "parent_block_hash": event.parent,
            "token_ids": event.tokens.tolist() if event.tokens is not None else [],
            "block_size": block_tokens if device else 0,
            "lora_id": None,
            "medium": event.medium.value,
            "lora_name": None,
        }
        if device:
            document |= {"group_idx": 0, "kv_cache_spec_kind": "full_attention"}
            if event.salt is not None:
                document["extra_keys"] = _extra_keys(event)
        return document
    if isinstance(event, BlocksRemoved):
        return {"type": "BlockRemoved", "block_hashes": _hashes(event.keys, event.medium), "medium": event.medium.value}
    return {"type": "AllBlocksCleared"}
