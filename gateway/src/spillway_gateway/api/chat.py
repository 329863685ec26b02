"""POST /v1/chat/completions and its batch: the fields that routing reads. All others pass to the engine unread."""

from __future__ import annotations

from typing import Any

import msgspec

from spillway_gateway.api.body_errors import decoder_of, read_body
from spillway_gateway.api.parsed_body import (
    ParsedBody,
    StreamFields,
    choices_of,
    cut_length,
    is_plain_stream,
    keyed_session,
    reply_length,
    salt_text,
    stream_reports_usage,
)
from spillway_gateway.api.retention import openai_marks
from spillway_gateway.tokens.estimates import value_tokens
from spillway_gateway.tokens.prompt import ChatPrompt
from spillway_gateway.upstream.forward import Body


class _ChatFields(StreamFields, kw_only=True):
    model: str | None = None
    stream: bool | None = None
    stream_options: Any = None
    tools: Any = None
    tool_choice: Any = None
    cache_salt: Any = msgspec.UNSET
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    add_generation_prompt: Any = True
    add_special_tokens: Any = False
    continue_final_message: Any = False
    chat_template: Any = None
    chat_template_kwargs: Any = None
    documents: Any = None
    reasoning_effort: Any = None


class ChatBody(_ChatFields, kw_only=True):
    messages: list[dict[str, Any]]


class ChatBatchBody(_ChatFields, kw_only=True):
    messages: list[list[dict[str, Any]]]


_decoder = decoder_of(ChatBody)
_batch_decoder = decoder_of(ChatBatchBody)


def parse_chat(body: Body) -> ParsedBody:
    """Parse a chat. Raises ClientBadRequest if it is not JSON or a field has the wrong type."""
    fields = read_body(_decoder, body)
    plain = is_plain_stream(fields.stream, fields) and (not fields.tools or fields.tool_choice == "none")
    return _parsed(fields, fields.messages, plain_stream=plain)


def parse_chat_batch(body: Body) -> ParsedBody:
    """Parse several conversations, which are routed together by the first. Raises ClientBadRequest."""
    fields = read_body(_batch_decoder, body)
    others = value_tokens(fields.messages[1:])
    return _parsed(fields, fields.messages[0] if fields.messages else [], others, chats=len(fields.messages))


def _parsed(
    fields: _ChatFields,
    messages: list[dict[str, Any]],
    other_tokens: int = 0,
    *,
    chats: int = 1,
    plain_stream: bool = False,
) -> ParsedBody:
    tools = fields.tools
    variables = dict(fields.chat_template_kwargs) if isinstance(fields.chat_template_kwargs, dict) else {}
    if fields.reasoning_effort is not None:
        variables.setdefault("enable_thinking", fields.reasoning_effort != "none")
        variables.setdefault("reasoning_effort", fields.reasoning_effort)
    tools_usable = tools is None or (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools))
    exact = (
        tools_usable
        and fields.add_generation_prompt in (True, False)
        and fields.add_special_tokens in (True, False)
        and not fields.continue_final_message
        and fields.chat_template is None
        and fields.documents is None
        and fields.truncate_prompt_tokens is None
        and all(isinstance(name, str) and name not in _TEMPLATE_INPUTS for name in variables)
    )
    choices = choices_of(fields.n, chats)
    return ParsedBody(
        model=fields.model,
        names_salt=fields.cache_salt is not msgspec.UNSET,
        stream=bool(fields.stream),
        prompt=ChatPrompt(
            messages=messages,
            tools=tools,
            add_generation_prompt=bool(fields.add_generation_prompt),
            add_special_tokens=bool(fields.add_special_tokens),
            variables=variables,
            cache_salt=salt_text(fields.cache_salt),
            exact=exact,
        ),
        other_tokens=other_tokens,
        prompt_tokens_max=cut_length(fields.truncate_prompt_tokens),
        reports_usage=stream_reports_usage(fields.stream, fields.stream_options),
        plain_stream=plain_stream,
        session_names=keyed_session(fields.prompt_cache_key),
        choices=choices,
        reply_tokens_max=reply_length(choices, fields.max_completion_tokens, fields.max_tokens),
        retention=openai_marks(fields.prompt_cache_retention, fields.prompt_cache_options),
        engine_fields=fields,
    )


_TEMPLATE_INPUTS = frozenset({"messages", "tools", "documents", "add_generation_prompt", "tokenize"})
