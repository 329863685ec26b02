"""Text to tokens and back, without a model: every three bytes of a segment are one token, so nothing has to be loaded.

Messages are separate segments behind a token for their role, and generated pieces are three bytes long, so an answer
that a client sends back in its next prompt gives the tokens that were generated: conversations hit as they do on a real
engine.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import xxhash

_PIECE_BYTES = 3
_LENGTH_SHIFT = 24
_ROLE = 4 << _LENGTH_SHIFT  # lengths are 1 to 3, so 4 marks tokens that stand for no text
_ROLES_MAX = 1 << 16
_LETTERS = b"abcdefghijklmnopqrstuvwxyz"


class Tokens(Protocol):
    def chat(self, body: Mapping[str, Any]) -> array[int]:
        """Tokens of a chat body's messages and tools. Raises ValueError for a body it cannot render."""

    def text(self, text: str) -> array[int]: ...
    def decode(self, tokens: Sequence[int]) -> str: ...
    def answer(self, prompt: array[int], count: int) -> array[int]:
        """The `count` tokens that follow this prompt, always the same: each depends on all before it, so a prompt that
        ends with the beginning of an answer is followed by the rest of it, as by a greedy model."""


class BuiltInTokens:
    """Three bytes per token."""

    def chat(self, body: Mapping[str, Any]) -> array[int]:
        tokens = array("I")
        if body.get("tools"):
            tokens.append(_role("tools"))
            tokens.extend(self.text(json.dumps(body["tools"], sort_keys=True, ensure_ascii=False)))
        for message in body["messages"]:
            tokens.append(_role(str(message.get("role"))))
            content = message.get("content")
            if content is not None:
                tokens.extend(self.text(content if isinstance(content, str) else _parts(content)))
            if message.get("tool_calls"):
                tokens.extend(self.text(json.dumps(message["tool_calls"], sort_keys=True, ensure_ascii=False)))
        tokens.append(_role("assistant"))
        return tokens

    def text(self, text: str) -> array[int]:
        data = text.encode("utf-8", "surrogatepass")
        pieces = (data[at : at + _PIECE_BYTES] for at in range(0, len(data), _PIECE_BYTES))
        return array("I", [len(piece) << _LENGTH_SHIFT | int.from_bytes(piece, "little") for piece in pieces])

    def decode(self, tokens: Sequence[int]) -> str:
        pieces = []
        for token in tokens:
            length = token >> _LENGTH_SHIFT
            if 1 <= length <= _PIECE_BYTES:
                pieces.append((token & 0xFFFFFF).to_bytes(3, "little")[:length])
        return b"".join(pieces).decode("utf-8", "replace")

    def answer(self, prompt: array[int], count: int) -> array[int]:
        return follow(prompt, count, _word)


def follow(prompt: array[int], count: int, token_of: Callable[[int], int]) -> array[int]:
    """`count` tokens, each made of a 64-bit hash of all before it."""
    before = xxhash.xxh3_64(prompt.tobytes())
    made = array("I")
    for _ in range(count):
        made.append(token_of(before.intdigest()))
        before.update(made[-1:].tobytes())
    return made


def _word(number: int) -> int:
    first, second = _LETTERS[number % 26], _LETTERS[number // 26 % 26]
    return 3 << _LENGTH_SHIFT | 0x20 | first << 8 | second << 16


def _role(name: str) -> int:
    return _ROLE | xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogatepass")) % _ROLES_MAX


def _parts(content: object) -> str:
    if not isinstance(content, list):
        raise ValueError("message content must be text or a list of parts")
    texts = [
        part.get("text", "") if isinstance(part, dict) and part.get("type") == "text" else repr(part)
        for part in content
    ]
    return "\n".join(texts)
