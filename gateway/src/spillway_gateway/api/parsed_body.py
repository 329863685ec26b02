"""What routing needs of a request body, whatever the API. The parsers in this folder make it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from spillway_gateway.api.engine_fields import EngineFields
from spillway_gateway.api.retention import Marks
from spillway_gateway.errors import ClientBadRequest
from spillway_gateway.tokens.estimates import value_tokens
from spillway_gateway.tokens.prompt import Prompt
from spillway_gateway.upstream.forward import Body
from spillway_settings.session_sources import PROMPT_CACHE_KEY


class ParsedBody(msgspec.Struct, frozen=True):
    """model: None when the body names none. names_salt: cache_salt is present, whatever its value. other_tokens: an
    estimate for the other prompts of a batch, which count as work and not as prefix. charged_tokens: charged to the
    tenant, though no engine computes them. reports_usage: the reply will report its usage. counts_prompt, counts_reply:
    False if their tokens are never reported. previous_response: the id of a stored response that this one
    continues. plain_stream: a stream that another engine may be able to continue, see upstream/continuation/.
    session_names: by the member of the body that names it (spillway_settings.session_sources). choices: answers that it
    asks for. reply_tokens_max: of all of them, as it asks; None: as many as the model allows; 0: nothing is generated.
    background: the engine goes on after its reply.
    longest_tokens: an estimate, of the longest input for embeddings. server_tools: the engine may call tools itself and
    go on with a second prompt. retention: how long the prompt is to be kept. engine_fields: as the client sent them."""

    model: str | None
    names_salt: bool
    stream: bool
    prompt: Prompt
    other_tokens: int = 0
    charged_tokens: int = 0
    reports_usage: bool = True
    counts_prompt: bool = True
    counts_reply: bool = True
    previous_response: str | None = None
    plain_stream: bool = False
    session_names: dict[str, str] = {}
    choices: int = 1
    reply_tokens_max: int | None = 0
    background: bool = False
    longest_tokens: int = 0
    server_tools: bool = False
    retention: Marks = ()
    engine_fields: EngineFields = msgspec.field(default_factory=EngineFields)


NUMBER_CHARS_MAX = 32  # of a number in a text

ParseBody = Callable[[Body], ParsedBody]  # raises ClientBadRequest


def keyed_session(prompt_cache_key: object) -> dict[str, str]:
    """The session of an OpenAI body, if it names one."""
    return {PROMPT_CACHE_KEY: prompt_cache_key} if isinstance(prompt_cache_key, str) and prompt_cache_key else {}


def choices_of(n: object, prompts: int = 1) -> int:
    """The number of answers to this number of prompts, n to each. Raises ClientBadRequest for a text that engines might
    read as more."""
    if isinstance(n, str) and len(n) > NUMBER_CHARS_MAX:
        raise ClientBadRequest(f"n: a text of {len(n)} characters given, a whole number needed")
    return prompts * max(1, _whole_number(n) or 1)


def reply_length(choices: int, *given: object) -> int | None:
    """Tokens that all choices may have, by the first length that is given; None if none is, or it cannot be read."""
    for each in given:
        length = _whole_number(each)
        if length is None and each is not None:
            return None
        if length is not None and length > 0:
            return choices * length
    return None


def _whole_number(value: object) -> int | None:
    """An integer as engines read it, who take it as a text or a fraction too; None if it is none."""
    if isinstance(value, int):
        return int(value)
    if not isinstance(value, float) and not (isinstance(value, str) and len(value) <= NUMBER_CHARS_MAX):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return int(number) if number.is_integer() else None


def salt_text(value: object) -> str | None:
    """A cache_salt that the engine accepts; it refuses anything but text."""
    return value if isinstance(value, str) else None


def first_of(value: object) -> tuple[str | array[int], int]:
    """The first prompt of what may be a text, token ids, or a list of either, and the tokens of the rest of it.

    Anything else routes as an empty prompt, and all of its tokens count.
    """
    if isinstance(value, str):
        return value, 0
    if not isinstance(value, list) or not value:
        return "", value_tokens(value)
    first = value[0]
    if isinstance(first, str):
        return first, value_tokens(value[1:])
    tokens: Sequence[Any] = first if isinstance(first, list) else value
    try:
        return array("I", tokens), value_tokens(value[1:]) if isinstance(first, list) else 0
    except (TypeError, OverflowError, ValueError):
        return "", value_tokens(value)


def stream_reports_usage(stream: object, options: object) -> bool:
    """Whether a chat or completions reply does: a plain one always does, a stream with include_usage."""
    return not stream or (isinstance(options, dict) and options.get("include_usage") is True)


class StreamFields(EngineFields, kw_only=True):
    """Members of chat and completions that decide whether a stream is plain, besides those that a failure shows."""

    n: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    echo: Any = None
    logprobs: Any = None
    seed: Any = None
    return_token_ids: Any = None


def is_plain_stream(stream: object, fields: StreamFields) -> bool:
    """One answer without what only its first engine could go on counting. Cheap, for every request: the whole body is
    read when an engine has failed."""
    return (
        stream is True
        and fields.n in (None, 1)
        and not fields.echo
        and fields.logprobs in (None, False)
        and fields.seed is None
        and fields.return_token_ids is None
    )
