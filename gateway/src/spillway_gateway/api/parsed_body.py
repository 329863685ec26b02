"""What routing needs of a request body, whatever the API; the parsers beside this file make it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from spillway_gateway.tokens.prompt import Prompt
from spillway_gateway.tokens.text_blocks import BYTES_PER_TOKEN
from spillway_gateway.upstream.forward import Body


class ParsedBody(msgspec.Struct, frozen=True):
    """model: None when the body names none. names_salt: cache_salt is there, whatever its value. other_tokens: about
    how many tokens the other prompts of a batch have; they count as work and not as prefix. previous_response: the
    id of a stored response that this one continues."""

    model: str | None
    names_salt: bool
    stream: bool
    prompt: Prompt
    other_tokens: int = 0
    previous_response: str | None = None


ParseBody = Callable[[Body], ParsedBody]  # raises ClientBadRequest


def salt_text(value: object) -> str | None:
    """A cache_salt as the engine takes it; anything else it refuses."""
    return value if isinstance(value, str) else None


def first_of(value: object) -> tuple[str | array[int], int]:
    """The first prompt of what may be a text, token ids, or a list of either, and the tokens of the rest of it.

    What the engine would refuse routes as an empty prompt.
    """
    if isinstance(value, str):
        return value, 0
    if not isinstance(value, list) or not value:
        return "", 0
    first = value[0]
    if isinstance(first, str):
        return first, sum(_tokens_of(other) for other in value[1:])
    tokens: Sequence[Any] = first if isinstance(first, list) else value
    others = sum(_tokens_of(other) for other in value[1:]) if isinstance(first, list) else 0
    try:
        return array("I", tokens), others
    except (TypeError, OverflowError, ValueError):
        return "", 0


def _tokens_of(value: object) -> int:
    if isinstance(value, str):
        return len(value) // BYTES_PER_TOKEN
    return len(value) if isinstance(value, list) else 0
