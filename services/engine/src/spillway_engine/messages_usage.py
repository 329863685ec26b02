"""Adds to vLLM 0.23's replies in the Messages API how many tokens of the prompt were cached.

There `input_tokens` is the whole prompt. In the API's own words it is what no cache served, beside
`cache_read_input_tokens`. Later versions of vLLM report both so, and are left alone.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

# vLLM's server writes the chat completion's chunks and these events itself, always in this form.
_DATA = "data: "
_MARK = "_spillway"  # on what takes the place of vLLM's method
_END = "event: message_delta\n"  # the event whose usage is complete


def report_cached_tokens(serving: Any) -> None:
    """Make the replies of this server tell the cached tokens, unless they do so already.

    Args:
        serving: vLLM's module of the Messages API.
    """
    handler = serving.AnthropicServingMessages
    if hasattr(serving, "_build_anthropic_usage") or getattr(handler.messages_full_converter, _MARK, False):
        return
    handler.messages_full_converter = _plain(handler.messages_full_converter)
    handler.message_stream_converter = _streaming(handler.message_stream_converter)


def _plain(original: Callable[..., Any]) -> Callable[..., Any]:
    def messages_full_converter(self: Any, generator: Any) -> Any:
        reply = original(self, generator)
        details = generator.usage.prompt_tokens_details
        if details is not None and details.cached_tokens:
            reply.usage.cache_read_input_tokens = details.cached_tokens
            reply.usage.input_tokens -= details.cached_tokens
        return reply

    setattr(messages_full_converter, _MARK, True)
    return messages_full_converter


def _streaming(original: Callable[..., AsyncIterator[str]]) -> Callable[..., AsyncIterator[str]]:
    async def message_stream_converter(self: Any, generator: AsyncIterator[str]) -> AsyncIterator[str]:
        cached = 0

        async def watched() -> AsyncIterator[str]:
            nonlocal cached
            async for chunk in generator:
                if '"cached_tokens"' in chunk:  # or a text, or a tool's name, is this word alone
                    cached = _cached_in(chunk) or cached
                yield chunk

        async for event in original(self, watched()):
            yield _with_cached(event, cached) if cached and event.startswith(_END) else event

    return message_stream_converter


def _cached_in(chunk: str) -> int:
    usage = json.loads(chunk.partition(_DATA)[2]).get("usage") or {}
    return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def _with_cached(event: str, cached: int) -> str:
    before, _, data = event.partition(_DATA)
    message = json.loads(data)
    message["usage"]["input_tokens"] -= cached
    message["usage"]["cache_read_input_tokens"] = cached
    return f"{before}{_DATA}{json.dumps(message, separators=(',', ':'))}\n\n"
