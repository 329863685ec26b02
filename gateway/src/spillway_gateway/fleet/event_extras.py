"""What an engine hashed into a block besides its tokens.

0.23 sends untagged values in the order adapter name, [image hash, offset] pairs, salt, embeddings digest; newer engines
tag them. The salt and the adapter become part of the namespace, everything else part of the block's own key.
"""

from __future__ import annotations

from typing import NamedTuple


class Extras(NamedTuple):
    cache_salt: str | None
    others: list[object]


def split_extras(raw: object, lora_name: str | None) -> Extras:
    """raw: one block's entry of `extra_keys`: None or a list."""
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
