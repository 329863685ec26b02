"""Request bodies: chats of a few shared system prompts with questions of their own. Deterministic."""

from __future__ import annotations

import json
import random

MODEL = "m"
GROUPS = 32
NUMBER = "00000000"
SYSTEM_CHARS = 1_800
QUESTION_CHARS = 300
_TEXT = """
block cache engine prefix token route memory device load store shared tier batch stream answer question model
layer head value key chunk page frame queue worker time rate cost price share copy write read first last next
"""
WORDS = tuple(_TEXT.split())


def chat_bodies(count: int, *, stream: bool, seed: int = 0) -> list[bytes]:
    """`count` bodies of about 2.3 KB, in GROUPS groups of a common start. Each question holds NUMBER once, where the
    sender writes one that was never used, so no router sees a question twice."""
    words = random.Random(1)
    systems = [_text(words, SYSTEM_CHARS) for _ in range(GROUPS)]
    return [chat_body(systems[at % GROUPS], f"{NUMBER} {seed}-{at}", stream=stream) for at in range(count)]


def unique_body(at: int) -> bytes:
    """A prompt that shares no block with any other."""
    return chat_body(f"{at} " + _FILL, str(at), stream=False)


def chat_body(system: str, name: str, *, stream: bool) -> bytes:
    question = f"{name}: " + _text(random.Random(name), QUESTION_CHARS)
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 32, "stream": stream}
    return json.dumps(body).encode()


def _text(words: random.Random, chars: int) -> str:
    parts: list[str] = []
    length = 0
    while length < chars:
        parts.append(words.choice(WORDS))
        length += len(parts[-1]) + 1
    return " ".join(parts)


_FILL = _text(random.Random(2), SYSTEM_CHARS)
