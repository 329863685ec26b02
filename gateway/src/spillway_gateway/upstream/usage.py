"""Reads token counts out of a reply: for the check of what routing expected to be cached, for tenants' limits and for
the audit log.

Reads whole events (sse.py) and plain replies of any length. Three shapes: OpenAI's `usage` with prompt_tokens and
completion_tokens, the same object under `response` in the Responses API, and Anthropic's input_tokens and
output_tokens, in a stream also under `message`.

What an engine says is bounded: a tenant's limits, metrics and the audit log go by it. A value that is no count (a
negative number, a fraction, text), or more than the engine can have computed, is treated as not reported.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from spillway_gateway.upstream.answers import data_at

COUNT_MAX = 1 << 31  # tokens; more than any request has


class _Usage(msgspec.Struct):
    """Fields take any value: one that is no count leaves the others readable."""

    prompt_tokens: Any = None
    completion_tokens: Any = None
    prompt_tokens_details: Any = None
    input_tokens: Any = None
    output_tokens: Any = None
    input_tokens_details: Any = None
    cache_read_input_tokens: Any = None
    cache_creation_input_tokens: Any = None


class _Holder(msgspec.Struct):
    usage: _Usage | None = None


class _Reply(msgspec.Struct):
    usage: _Usage | None = None
    response: _Holder | None = None
    message: _Holder | str | None = None


class Usage(NamedTuple):
    """The token counts of a reply; None: it does not report them."""

    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None


NO_USAGE = Usage(None, None, None)
UNSAID_REPLY_TOKENS = 16  # vLLM's max_tokens if a completion, or sampling_params, name none


_decode = msgspec.json.Decoder(_Reply).decode
_MARK = b'"usage"'
_DATA = b"data:"
WHOLE_BYTES_MAX = 64 * 1024  # a plain reply up to this is parsed; of a longer one, the object at its last `usage`
OBJECT_BYTES_MAX = 4096  # of a usage object


def usage_in_events(events: bytes) -> Usage | None:
    """The usage that whole events report; None if they report none. Each number's last report counts."""
    found: Usage | None = None
    at = events.find(_MARK)
    while at >= 0:
        start = events.rfind(b"\n", 0, at) + 1
        end = events.find(b"\n", at)
        line = events[start : end if end >= 0 else len(events)]
        usage = _usage_in(line[len(_DATA) :]) if line.startswith(_DATA) else None
        if usage is None and (events.count(_DATA) > 1 or b"\r" in events):  # perhaps one line of several of an event
            usage = _usage_in(data_at(events, at))
        if usage is not None:
            found = merged(found, usage)
        at = events.find(_MARK, end) if end >= 0 else -1
    return found


def usage_in_reply(body: bytes) -> Usage | None:
    """Read the usage of a plain reply; None if it reports none."""
    if len(body) <= WHOLE_BYTES_MAX:
        return _usage_in(body) if _MARK in body else None
    reader = ReplyUsage()
    reader.feed(body)
    return reader.usage


class ReplyUsage:
    """Reads a plain reply that passes in parts: the object after the last `"usage":`, wherever it stands and however
    the parts are cut. Generated text is never taken for it: quotes inside a JSON string are escaped."""

    def __init__(self) -> None:
        self.usage: Usage | None = None
        self._tail = b""

    def feed(self, part: bytes) -> None:
        """Read the next part; `usage` is then the last one found so far."""
        data = self._tail + part if self._tail else part
        at = data.rfind(_MARK)
        while at >= 0:
            usage, whole = _object_at(data, at)
            if usage is not None:
                self.usage = usage
            if usage is not None or not whole:
                break
            at = data.rfind(_MARK, 0, at)  # a key of that name which holds no counts
        if at >= 0 and usage is None and len(data) - at < OBJECT_BYTES_MAX:
            self._tail = data[at:]  # the rest of the object comes with the next part
        else:
            self._tail = data[-len(_MARK) + 1 :]


def merged(before: Usage | None, usage: Usage) -> Usage:
    """Anthropic reports the prompt's tokens first and the others last."""
    if before is None:
        return usage
    return Usage(*(new if new is not None else old for new, old in zip(usage, before, strict=True)))


def within(usage: Usage, prompt_tokens_max: int, reply_tokens_max: int) -> Usage:
    """The counts that a prompt and a reply of up to these lengths can have."""
    prompt, completion, cached = usage
    if prompt is not None and prompt > prompt_tokens_max:
        prompt = None
    if completion is not None and completion > reply_tokens_max:
        completion = None
    if cached is not None and cached > (prompt_tokens_max if prompt is None else prompt):
        cached = None
    return Usage(prompt, completion, cached)


def _usage_in(document: bytes) -> Usage | None:
    try:
        reply = _decode(document)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    usage = reply.usage
    if usage is None and reply.response is not None:
        usage = reply.response.usage
    if usage is None and isinstance(reply.message, _Holder):
        usage = reply.message.usage
    return _counts(usage) if usage is not None else None


def _object_at(data: bytes, mark: int) -> tuple[Usage | None, bool]:
    """(the usage in the object after a mark, whether the whole object is there)."""
    window = data[mark + len(_MARK) : mark + OBJECT_BYTES_MAX]
    opening = window.lstrip(b" \t\r\n:")
    if not opening:
        return None, False
    if not opening.startswith(b"{"):
        return None, True
    end = 0
    while (end := opening.find(b"}", end) + 1) > 0:
        try:
            usage = _counts(_decode_usage(opening[:end]))
        except (msgspec.ValidationError, UnicodeDecodeError):
            return None, True
        except msgspec.DecodeError:
            continue  # an object inside it ended here
        return (usage if usage.prompt_tokens is not None else None), True
    return None, False


_decode_usage = msgspec.json.Decoder(_Usage).decode


def count(value: object) -> int | None:
    """A number of tokens that an engine gave; None if it is none."""
    return value if type(value) is int and 0 <= value <= COUNT_MAX else None


def _counts(usage: _Usage) -> Usage:
    prompt, completion = count(usage.prompt_tokens), count(usage.completion_tokens)
    if prompt is None:
        prompt = count(usage.input_tokens)
    if completion is None:
        completion = count(usage.output_tokens)
    details = usage.prompt_tokens_details or usage.input_tokens_details
    if isinstance(details, dict):
        return Usage(prompt, completion, count(details.get("cached_tokens")))
    cached = count(usage.cache_read_input_tokens)
    if prompt is not None:  # Anthropic's input_tokens are those that no cache served
        prompt += (cached or 0) + (count(usage.cache_creation_input_tokens) or 0)
    return Usage(prompt, completion, cached)
