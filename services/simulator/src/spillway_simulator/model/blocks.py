"""Block keys of a simulated engine: one chained 64-bit hash per full block of tokens, salt on the first block.

They are the engine's own, like vLLM's block hashes: other seed and other input than the gateway's request keys, so that
a gateway which confuses the two finds nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import xxhash

_ROOT = 0x5350494C4C574159
_hash = xxhash.xxh3_64_intdigest


def token_array(tokens: Sequence[int]) -> array[int]:
    """Token ids as unsigned 32-bit integers. Raises OverflowError for ids outside 0..2**32-1."""
    return tokens if isinstance(tokens, array) and tokens.typecode == "I" else array("I", tokens)


def block_keys(
    tokens: Sequence[int], block_tokens: int, salt: str | None = None, parent: int | None = None
) -> list[int]:
    """Keys of all full blocks of `tokens`. parent: key of the block before them; None at the start of a prompt."""
    data = token_array(tokens).tobytes()
    size = block_tokens * 4
    keys: list[int] = []
    key = parent if parent is not None else _hash(salt.encode(), _ROOT) if salt is not None else _ROOT
    for start in range(0, len(data) - size + 1, size):
        key = _hash(data[start : start + size], key)
        keys.append(key)
    return keys
