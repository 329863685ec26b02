"""POST /v1/completions: what of the body routing reads. Everything else passes to the engine unread."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

from spillway_gateway.api.body_errors import bad_body
from spillway_gateway.api.inference import ParsedBody
from spillway_gateway.tokens.prompt import CompletionPrompt

PATH = "/v1/completions"


class _CompletionBody(msgspec.Struct):
    model: str | None = None
    prompt: str | list[Any] | None = None
    stream: bool | None = None
    cache_salt: Any = msgspec.UNSET
    add_special_tokens: Any = True


_decoder = msgspec.json.Decoder(_CompletionBody)


def parse_completion(body: bytes) -> ParsedBody:
    """Raises ClientBadRequest for what is not JSON or has a field of the wrong type."""
    try:
        fields = _decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise bad_body(error) from error
    return ParsedBody(
        model=fields.model,
        names_salt=fields.cache_salt is not msgspec.UNSET,
        stream=bool(fields.stream),
        prompt=CompletionPrompt(
            prompt=_first_prompt(fields.prompt),
            add_special_tokens=bool(fields.add_special_tokens),
            cache_salt=fields.cache_salt if isinstance(fields.cache_salt, str) else None,
        ),
    )


def _first_prompt(prompt: str | list[Any] | None) -> str | array[int]:
    """Of a batch, the first prompt decides where all of it goes. What the engine would refuse routes as empty."""
    if isinstance(prompt, str):
        return prompt
    if not prompt:
        return ""
    first = prompt[0]
    if isinstance(first, str):
        return first
    tokens = first if isinstance(first, list) else prompt
    try:
        return array("I", tokens)
    except (TypeError, OverflowError, ValueError):
        return ""
