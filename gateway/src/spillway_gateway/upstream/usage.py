"""Reads token counts out of a reply: for what routing expected to be cached, tenants' limits and the audit log.

Never changes a byte. Three shapes: OpenAI's `usage` with prompt_tokens and completion_tokens, the same object under
`response` in the Responses API, and Anthropic's input_tokens and output_tokens, in a stream also under `message`.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _PromptDetails | None = None
    cache_read_input_tokens: int | None = None


class _Holder(msgspec.Struct):
    usage: _Usage | None = None


class _Reply(msgspec.Struct):
    usage: _Usage | None = None
    response: _Holder | None = None
    message: _Holder | str | None = None


class Usage(NamedTuple):
    """None: the reply does not say."""

    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None


_decode = msgspec.json.Decoder(_Reply).decode
_MARK = b'"usage"'
_DATA = b"data:"
SCAN_BYTES_MAX = 64 * 1024
TAIL_BYTES = 2048


def read_usage(data: bytes) -> Usage | None:
    """From a plain reply, or from a chunk of events; None where nothing is said. Of several, the last counts.

    A reply above SCAN_BYTES_MAX (embeddings, mostly) is searched for its `usage` in the last TAIL_BYTES only.
    """
    if data.find(_MARK, -TAIL_BYTES if len(data) > SCAN_BYTES_MAX else 0) < 0:
        return None
    if not _is_events(data):
        return _tail_usage(data) if len(data) > SCAN_BYTES_MAX else _usage_in(data)
    found = None
    for line in data[-SCAN_BYTES_MAX:].split(b"\n"):
        if _MARK in line and line.startswith(_DATA):
            found = _usage_in(line[len(_DATA) :]) or found
    return found


def _is_events(data: bytes) -> bool:
    return data.startswith((_DATA, b"event:", b":", b"\n")) or b"\ndata:" in data[:256]


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
    return _told(usage) if usage is not None else None


def _tail_usage(data: bytes) -> Usage | None:
    """The object after the last `"usage":` of a long reply."""
    tail = data[-TAIL_BYTES:]
    start = tail.rfind(_MARK)
    begin = tail.find(b"{", start)
    end = begin
    while begin >= 0 and (end := tail.find(b"}", end + 1)) >= 0:
        try:
            return _told(_decode_usage(tail[begin : end + 1]))
        except (msgspec.ValidationError, UnicodeDecodeError):
            return None
        except msgspec.DecodeError:
            continue  # an object inside it ended here
    return None


_decode_usage = msgspec.json.Decoder(_Usage).decode


def _told(usage: _Usage) -> Usage:
    cached = None
    details = usage.prompt_tokens_details or usage.input_tokens_details
    if details is not None:
        cached = details.cached_tokens
    elif usage.cache_read_input_tokens is not None:
        cached = usage.cache_read_input_tokens
    return Usage(
        usage.prompt_tokens if usage.prompt_tokens is not None else usage.input_tokens,
        usage.completion_tokens if usage.completion_tokens is not None else usage.output_tokens,
        cached,
    )
