"""Routes of tokens: /tokenize, /detokenize, /inference/v1/generate."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

from spillway_gateway.api.body_errors import decoder_of, read_body
from spillway_gateway.api.engine_fields import EngineFields
from spillway_gateway.api.parsed_body import ParsedBody, choices_of, first_of, reply_length, salt_text
from spillway_gateway.tokens.prompt import CompletionPrompt
from spillway_gateway.tokens.text_blocks import BYTES_PER_TOKEN
from spillway_gateway.upstream.forward import Body
from spillway_gateway.upstream.usage import UNSAID_REPLY_TOKENS


class AnyBody(EngineFields):
    model: str | None = None


class GenerateBody(EngineFields):
    token_ids: list[Any]
    model: str | None = None
    stream: bool | None = None
    cache_salt: Any = msgspec.UNSET


_any = decoder_of(AnyBody)
_generate = decoder_of(GenerateBody)


def parse_unrouted(body: Body) -> ParsedBody:
    """Parse a body for which no KV is computed, so that any engine of the model will do. The tenant is charged for the
    tokens by the body's length. Raises ClientBadRequest."""
    fields = read_body(_any, body)
    charge = len(body) // BYTES_PER_TOKEN
    return ParsedBody(
        fields.model,
        names_salt=False,
        stream=False,
        prompt=CompletionPrompt(""),
        charged_tokens=charge,
        engine_fields=fields,
    )


def parse_generate(body: Body) -> ParsedBody:
    """Parse a body of token ids, whose reply has token ids. Raises ClientBadRequest."""
    fields = read_body(_generate, body)
    prompt, other_tokens = first_of(fields.token_ids)
    sampling = fields.sampling_params if isinstance(fields.sampling_params, dict) else {}
    choices = choices_of(sampling.get("n"))
    return ParsedBody(
        model=fields.model,
        names_salt=fields.cache_salt is not msgspec.UNSET,
        stream=bool(fields.stream),
        prompt=CompletionPrompt(prompt if isinstance(prompt, array) else "", False, salt_text(fields.cache_salt)),
        other_tokens=other_tokens,
        counts_reply=bool(fields.stream),  # a stream is counted by its events; a plain reply reports no usage
        choices=choices,
        reply_tokens_max=reply_length(choices, sampling.get("max_tokens"), UNSAID_REPLY_TOKENS),
        engine_fields=fields,
    )
