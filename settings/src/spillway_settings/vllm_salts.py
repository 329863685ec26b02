"""Versions of vLLM that hash a request's cache salt, and the setting of older ones that drops it."""

from __future__ import annotations

import re
from typing import Any

Version = tuple[int, int]  # 0.23.0 and 0.23.0rc1+cpu are (0, 23)
OLDEST: Version = (0, 0)  # a vLLM that does not say is taken for older than any
SALTS_ALL: Version = (0, 32)  # before it vLLM drops the salt on some routes whose schema has it
_beginning = re.compile(r"([0-9]{1,4})\.([0-9]{1,4})(?![0-9])").match


def version_of(text: str) -> Version:
    """OLDEST if the text begins with no version."""
    found = _beginning(text)
    return (int(found[1]), int(found[2])) if found is not None else OLDEST


def why_salts_are_dropped(vllm_config: Any, vllm_version: str) -> str | None:
    """Return what an engine with this VllmConfig would do to tenants; None if it keeps the salts of embeddings.

    vLLM before 0.32 makes the pieces of an input without its salt, and computes every input in pieces, short or long,
    once they are enabled. Read here is what vLLM made of its arguments, however they were written.
    """
    pooler = getattr(getattr(vllm_config, "model_config", None), "pooler_config", None)
    if not getattr(pooler, "enable_chunked_processing", False) or version_of(vllm_version) >= SALTS_ALL:
        return None
    return (
        f"vLLM {vllm_version} drops the cache_salt of every embedding if --pooler-config sets "
        "enable_chunked_processing, so tenants would share cached blocks; remove it, or run vLLM "
        f"{'.'.join(map(str, SALTS_ALL))} or newer"
    )
