"""Reads the cached-token count out of a reply, to compare it with what routing expected. Never changes a byte."""

from __future__ import annotations

import msgspec


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Reply(msgspec.Struct):
    usage: _Usage | None = None


_decode = msgspec.json.Decoder(_Reply).decode
_MARK = b'"cached_tokens"'
SCAN_BYTES_MAX = 64 * 1024


def cached_tokens(data: bytes) -> int | None:
    """From a plain reply, or from a chunk of events; None where nothing is said."""
    if len(data) > SCAN_BYTES_MAX or _MARK not in data:
        return None
    for line in data.split(b"\n") if data.startswith(b"data:") else (data,):
        if _MARK not in line:
            continue
        try:
            usage = _decode(line.removeprefix(b"data:")).usage
        except msgspec.DecodeError:
            continue
        if usage is not None and usage.prompt_tokens_details is not None:
            return usage.prompt_tokens_details.cached_tokens
    return None
