"""Request keys: one chained 64-bit hash per block of tokens or text.

A key covers its block and everything before it, so equal keys mean equal prefixes within one namespace, and the longest
shared prefix of two requests is the longest common start of their key lists. They do not
depend on the engine's hash algorithm, seed or version (fleet/prefix_index.py maps an engine's keys to them).

XXH3 is not collision-resistant. A collision here sends one request to the wrong engine and never mixes up content,
because engines match blocks by their own hashes.
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import msgspec
import xxhash

_encode = msgspec.json.encode
_hash = xxhash.xxh3_64_intdigest
_UINT32 = "I"
# Keys of one prompt at one block size; the rest of a longer prompt counts as not held. With 128 tokens each these are
# 2 Mi tokens. Hashing, matching and counting this number takes about 10 ms of the event loop.
KEYS_MAX = 16_384
RUN_BLOCKS = 64  # whose keys are remembered together
TOKEN_BYTES = 4  # of a token id in the form that is hashed
assert array(_UINT32).itemsize == TOKEN_BYTES


class PromptTokens(msgspec.Struct, frozen=True, gc=False):
    """The facts that an engine needs of a prompt to find its blocks. ids: as token_bytes() gives them."""

    ids: bytes
    cache_salt: str | None = None


class PromptBlocks(msgspec.Struct, frozen=True, gc=False):
    """A prompt as routing sees it: keys of its full blocks, in order, and its size in tokens.

    spread_key: for rendezvous hashing. other_keys: by tokens per block, keys for engines with another block size.
    tokens: kept if an engine may be sent them (upstream/promotion_hints.py). text_tokens: None if the keys are of
    token ids. If the prompt is matched by its text, the tokens that this text counts as; 0 if its size says nothing
    about the prompt's because it was cut, holds media, or is one of several.
    """

    keys: Sequence[int]
    tokens_per_block: int
    prompt_tokens: int
    spread_key: int
    other_keys: Mapping[int, Sequence[int]] = msgspec.field(default_factory=dict)
    tokens: PromptTokens | None = None
    text_tokens: int | None = None

    def keys_for(self, tokens_per_block: int) -> Sequence[int]:
        """The keys for an engine with blocks of that size."""
        return self.other_keys.get(tokens_per_block, self.keys)


def namespace_key(model: str, lora: str | None = None, cache_salt: str | None = None) -> int:
    """Seed of the chain: blocks of another model, adapter or salt never share a key."""
    return _hash(_encode([model, lora, cache_salt]))


def token_bytes(tokens: Sequence[int] | array[int]) -> bytes:
    """Token ids as little-endian uint32, the form that is hashed. Raises OverflowError for ids outside 0..2**32-1."""
    ids = tokens if isinstance(tokens, array) and tokens.typecode == _UINT32 else array(_UINT32, tokens)
    if sys.byteorder == "big":
        ids = array(_UINT32, ids)
        ids.byteswap()
    return ids.tobytes()


def chain_key(parent_key: int, block: bytes, extra: bytes = b"") -> int:
    """Key of one block after its parent's key. extra: what else the engine hashed into this block (image ids)."""
    return _hash(block + extra if extra else block, parent_key)


def token_block_keys(namespace: int, tokens: Sequence[int] | array[int], block_tokens: int) -> list[int]:
    """Keys of all full blocks of `tokens`, in order; the last partial block has none, as in the engine."""
    return chain_blocks(namespace, token_bytes(tokens), block_tokens * TOKEN_BYTES)


def chain_blocks(namespace: int, data: bytes | memoryview, block_bytes: int) -> list[int]:
    """Keys of all full blocks of `block_bytes`, of token ids or of normalised text (tokens/text_blocks.py), in order,
    KEYS_MAX at most."""
    keys: list[int] = []
    key = namespace
    for start in range(0, min(len(data) - block_bytes + 1, KEYS_MAX * block_bytes), block_bytes):
        key = _hash(data[start : start + block_bytes], key)
        keys.append(key)
    return keys


class KeyChains:
    """Keys of blocks that were hashed before, a run of blocks at a time: a turn of a conversation begins as the one
    before it. A run is known by the key before it, which holds the namespace, and by its bytes. On one thread.

    runs_max: the most that are kept, of about 1 KB each; the least recently used ones leave.
    """

    def __init__(self, runs_max: int = 4096) -> None:
        self._runs_max = runs_max
        self._runs: OrderedDict[tuple[int, int, bytes], array[int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._runs)

    def keys(self, namespace: int, data: bytes, block_bytes: int) -> list[int]:
        """Return the keys that chain_blocks() returns."""
        run_bytes = RUN_BLOCKS * block_bytes
        if len(data) < run_bytes:
            return chain_blocks(namespace, data, block_bytes)
        runs, view = self._runs, memoryview(data)
        end = min(len(data) // block_bytes, KEYS_MAX) * block_bytes
        keys: list[int] = []
        key, at = namespace, 0
        while at + run_bytes <= end:
            run = view[at : at + run_bytes]
            name = (key, block_bytes, xxhash.xxh3_128_digest(run))
            found = runs.get(name)
            if found is None:
                found = runs[name] = array("Q", chain_blocks(key, run, block_bytes))
                if len(runs) > self._runs_max:
                    runs.popitem(last=False)
            else:
                runs.move_to_end(name)
            keys.extend(found)
            key = keys[-1]
            at += run_bytes
        return keys + chain_blocks(key, view[at:end], block_bytes)


def short_prompt_key(namespace: int, data: bytes) -> int:
    """Spread key of a prompt shorter than one block; never a key of the index."""
    return _hash(data, namespace ^ len(data))


def extra_bytes(extra: object) -> bytes:
    """Stable bytes of a block's extra keys other than adapter and salt; empty when there are none."""
    return msgspec.msgpack.encode(extra) if extra else b""
