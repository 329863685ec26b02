"""Normalised prompt text, for models without a usable tokenizer and for prompts with media.

It contains roles, contents and tools in the order of chat templates: two prompts share a text prefix only if they
would share a token prefix. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

BYTES_PER_TOKEN = 4  # of English text; costs depend on it, matches do not
TEXT_NAMESPACE_MARK = 0x74657874  # keeps text keys apart from token keys of the same model

_encode = msgspec.json.encode


def chat_text(messages: Sequence[Mapping[str, Any]], tools: object, chars_max: int) -> bytes:
    """UTF-8 text of a chat, cut after `chars_max` bytes."""
    parts: list[bytes] = []
    size = 0
    if tools:
        parts.append(_encode(tools))
        size += len(parts[-1])
    for message in messages:
        if size >= chars_max:
            break
        content = message.get("content")
        part = b"\x1e" + str(message.get("role")).encode() + b"\x1f"
        part += content[:chars_max].encode() if isinstance(content, str) else _encode(content)
        calls = message.get("tool_calls")
        if calls:
            part += b"\x1f" + _encode(calls)
        parts.append(part)
        size += len(part)
    return b"".join(parts)[:chars_max]


def completion_text(prompt: str, chars_max: int) -> bytes:
    """UTF-8 text of a prompt, cut after `chars_max` bytes."""
    return prompt[:chars_max].encode()[:chars_max]
