"""Routes of pooling models: /v1/embeddings, /v2/embed, /pooling, /classify, score and rerank.

One body type reads them all: a chat, or `input`, or Cohere's `texts`, or pairs of a query and documents. The query
comes first in the engine's prompt, so it is the prefix that requests share.
"""

from __future__ import annotations

from typing import Any

import msgspec

from spillway_gateway.api.body_errors import decoder_of, read_body
from spillway_gateway.api.engine_fields import EngineFields
from spillway_gateway.api.parsed_body import ParsedBody, first_of, salt_text
from spillway_gateway.tokens.estimates import value_tokens
from spillway_gateway.tokens.prompt import ChatPrompt, CompletionPrompt
from spillway_gateway.upstream.forward import Body


class PoolingBody(EngineFields):
    model: str | None = None
    cache_salt: Any = msgspec.UNSET
    add_special_tokens: Any = True
    messages: list[dict[str, Any]] | None = None
    input: Any = None
    texts: Any = None
    query: Any = None
    queries: Any = None
    text_1: Any = None
    data_1: Any = None
    documents: Any = None
    items: Any = None
    text_2: Any = None
    data_2: Any = None


_decoder = decoder_of(PoolingBody)


def parse_pooling(body: Body) -> ParsedBody:
    """Parse a request. Raises ClientBadRequest if it is not JSON or a field has the wrong type."""
    fields = read_body(_decoder, body)
    salt = salt_text(fields.cache_salt)
    prompt: ChatPrompt | CompletionPrompt
    if fields.messages is not None:
        # Pooling models use another chat template, or none, so the prompt is matched by its text.
        prompt, other_tokens = ChatPrompt(fields.messages, cache_salt=salt, exact=False), 0
        longest = value_tokens(fields.messages)
    else:
        one = _first_given(fields.input, fields.texts, fields.query, fields.queries, fields.text_1, fields.data_1)
        first, other_tokens = first_of(one)
        longest = _longest(one)
        pairs = _first_given(fields.documents, fields.items, fields.text_2, fields.data_2)
        second, more_tokens = first_of(pairs)
        other_tokens += more_tokens
        if isinstance(first, str) and isinstance(second, str) and second:
            first = f"{first}\x1f{second}"
        prompt = CompletionPrompt(first, bool(fields.add_special_tokens), salt)
    names_salt = fields.cache_salt is not msgspec.UNSET
    return ParsedBody(
        fields.model, names_salt, False, prompt, other_tokens, longest_tokens=longest, engine_fields=fields
    )


def _first_given(*values: object) -> object:
    return next((value for value in values if value is not None), None)


def _longest(given: object) -> int:
    """Return the tokens of the longest input: a text, token ids, or a list of either."""
    if not isinstance(given, list):
        return value_tokens(given)
    if all(isinstance(each, int) for each in given):
        return len(given)
    return max(len(each) if isinstance(each, list) else value_tokens(each) for each in given)
