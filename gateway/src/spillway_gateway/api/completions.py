"""POST /v1/completions: the fields that routing reads. All others pass to the engine unread."""

from __future__ import annotations

from typing import Any

import msgspec

from spillway_gateway.api.body_errors import decoder_of, read_body
from spillway_gateway.api.parsed_body import (
    ParsedBody,
    StreamFields,
    choices_of,
    cut_length,
    first_of,
    is_plain_stream,
    keyed_session,
    reply_length,
    salt_text,
    stream_reports_usage,
)
from spillway_gateway.tokens.prompt import CompletionPrompt
from spillway_gateway.upstream.forward import Body
from spillway_gateway.upstream.usage import UNSAID_REPLY_TOKENS


class CompletionBody(StreamFields, kw_only=True):
    model: str | None = None
    prompt: str | list[Any] | None = None
    stream: bool | None = None
    stream_options: Any = None
    cache_salt: Any = msgspec.UNSET
    prompt_cache_key: Any = None
    add_special_tokens: Any = True
    prompt_embeds: Any = None


_decoder = decoder_of(CompletionBody)


def parse_completion(body: Body) -> ParsedBody:
    """Parse a completion. A batch is routed by its first prompt. Raises ClientBadRequest if it is not JSON or a field
    has the wrong type."""
    fields = read_body(_decoder, body)
    prompt, other_tokens = first_of(fields.prompt)
    given = fields.prompt
    ids_alone = isinstance(given, list) and bool(given) and isinstance(given[0], int)
    choices = choices_of(fields.n, len(given) if isinstance(given, list) and given and not ids_alone else 1)
    reports_usage = stream_reports_usage(fields.stream, fields.stream_options)
    return ParsedBody(
        model=fields.model,
        names_salt=fields.cache_salt is not msgspec.UNSET,
        stream=bool(fields.stream),
        prompt=CompletionPrompt(prompt, bool(fields.add_special_tokens), salt_text(fields.cache_salt)),
        other_tokens=other_tokens,
        prompt_tokens_max=cut_length(fields.truncate_prompt_tokens),
        reports_usage=reports_usage,
        counts_prompt=reports_usage or fields.prompt_embeds is None,
        plain_stream=is_plain_stream(fields.stream, fields) and not other_tokens and fields.prompt_embeds is None,
        session_names=keyed_session(fields.prompt_cache_key),
        choices=choices,
        reply_tokens_max=reply_length(choices, fields.max_tokens, UNSAID_REPLY_TOKENS),
        engine_fields=fields,
    )
