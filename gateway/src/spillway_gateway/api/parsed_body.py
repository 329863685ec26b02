"""The parts of a request body that routing needs, whatever the API. The parsers in this folder make it."""

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
    """The parts of one request body.

    Attributes:
        model: None if the body names no model.
        names_salt: The body has a cache_salt, whatever its value.
        other_tokens: Estimated tokens of a batch's other prompts, which count as work and not as prefix.
        prompt_tokens_max: The length to which the engine cuts the prompt; None: it does not.
        charged_tokens: Tokens charged to the tenant although no engine computes them.
        reports_usage: The reply will report its usage.
        counts_prompt, counts_reply: False if the engine never reports their tokens.
        previous_response: The id of a stored response that this request continues.
        plain_stream: Another engine may be able to continue the stream, see upstream/continuation/.
        session_names: Names of the session, by the member of the body (spillway_settings.session_sources).
        choices: The number of answers that the body asks for.
        reply_tokens_max: The most tokens of all answers; None: as many as the model allows; 0: none are generated.
        background: The engine continues after its reply.
        longest_tokens: Estimated tokens of the longest input for embeddings.
        server_tools: The engine may call tools itself and continue with a second prompt.
        retention: The time for which the client asks to keep the prompt.
        engine_fields: The members for engines, as the client sent them.
    """

    model: str | None
    names_salt: bool
    stream: bool
    prompt: Prompt
    other_tokens: int = 0
    prompt_tokens_max: int | None = None
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

    def tokens_of(self, prompt_tokens: int) -> int:
        """Return the tokens that an engine computes of the body, whose prompt has this number."""
        cut = prompt_tokens if self.prompt_tokens_max is None else min(prompt_tokens, self.prompt_tokens_max)
        return cut + self.other_tokens


NUMBER_CHARS_MAX = 32  # of a number in a text

ParseBody = Callable[[Body], ParsedBody]  # raises ClientBadRequest


def keyed_session(prompt_cache_key: object) -> dict[str, str]:
    """The session of an OpenAI body, if it names one."""
    return {PROMPT_CACHE_KEY: prompt_cache_key} if isinstance(prompt_cache_key, str) and prompt_cache_key else {}


def choices_of(n: object, prompts: int = 1) -> int:
    """The number of answers to this number of prompts, n to each. Raises ClientBadRequest for a text that engines might
    read as more."""
    if n is None:
        return prompts
    if isinstance(n, str) and len(n) > NUMBER_CHARS_MAX:
        raise ClientBadRequest(f"n: a text of {len(n)} characters given, a whole number needed")
    return prompts * max(1, _whole_number(n) or 1)


def reply_length(choices: int, *given: object) -> int | None:
    """Tokens that all choices may have, by the first length that is given; None if none is, or it cannot be read."""
    for each in given:
        if each is None:
            continue
        length = _whole_number(each)
        if length is None:
            return None
        if length > 0:
            return choices * length
    return None


def cut_length(truncate_prompt_tokens: object) -> int | None:
    """Return the length to which the engine cuts a prompt; None: it does not. -1 is the longest that it takes."""
    length = _whole_number(truncate_prompt_tokens)
    return None if length is None or length < 0 else max(1, length)


def _whole_number(value: object) -> int | None:
    """Return an integer as engines read it, also from a text or a fraction; None if the value is not an integer."""
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
    """Return the first prompt of a text, token ids, or a list of either, and the tokens of the rest.

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
    """Whether a chat or completions reply reports its usage: a plain one always, a stream with include_usage."""
    return not stream or (isinstance(options, dict) and options.get("include_usage") is True)


class StreamFields(EngineFields, kw_only=True):
    """Members of chat and completions that decide whether a stream is plain, besides those that a failure shows, and
    the length to which the prompt is cut."""

    n: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    echo: Any = None
    logprobs: Any = None
    seed: Any = None
    return_token_ids: Any = None
    truncate_prompt_tokens: Any = None


def is_plain_stream(stream: object, fields: StreamFields) -> bool:
    """Whether the stream has one answer and nothing that only its first engine could go on counting. It is cheap, for
    every request: the whole body is read only when an engine has failed."""
    return (
        stream is True
        and fields.n in (None, 1)
        and not fields.echo
        and fields.logprobs in (None, False)
        and fields.seed is None
        and fields.return_token_ids is None
    )
