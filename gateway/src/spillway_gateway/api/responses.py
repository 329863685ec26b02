"""POST /v1/responses: the fields that routing reads. All others pass to the engine unread.

A string or a list of messages becomes the chat that the engine makes of it. Tool calls, stored conversations and other
items are matched by text.
"""

from __future__ import annotations

from typing import Any

import msgspec

from spillway_gateway.api.body_errors import decoder_of, read_body
from spillway_gateway.api.engine_fields import EngineFields
from spillway_gateway.api.parsed_body import ParsedBody, keyed_session, reply_length, salt_text
from spillway_gateway.api.retention import openai_marks
from spillway_gateway.tokens.prompt import ChatPrompt
from spillway_gateway.upstream.forward import Body


class ResponsesBody(EngineFields):
    input: str | list[Any]
    model: str | None = None
    stream: bool | None = None
    instructions: Any = None
    tools: Any = None
    reasoning: Any = None
    previous_response_id: str | None = None
    cache_salt: Any = msgspec.UNSET
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    truncation: Any = None
    max_output_tokens: Any = None
    background: Any = None


_decoder = decoder_of(ResponsesBody)


def parse_responses(body: Body) -> ParsedBody:
    """Parse a request. Raises ClientBadRequest if it is not JSON or a field has the wrong type."""
    fields = read_body(_decoder, body)
    messages: list[Any] = []
    if isinstance(fields.instructions, str) and fields.instructions:
        messages.append({"role": "system", "content": fields.instructions})
    items = [{"role": "user", "content": fields.input}] if isinstance(fields.input, str) else fields.input
    plain = all(_is_message(item) for item in items)
    messages += [_chat_message(item) for item in items]
    variables = fields.chat_template_kwargs if isinstance(fields.chat_template_kwargs, dict) else {}
    exact = (
        plain
        and not fields.tools
        and not fields.reasoning
        and fields.previous_response_id is None
        and fields.chat_template is None
        and fields.truncation in (None, "disabled")
    )
    return ParsedBody(
        model=fields.model,
        names_salt=fields.cache_salt is not msgspec.UNSET,
        stream=bool(fields.stream),
        prompt=ChatPrompt(
            messages=messages,
            tools=fields.tools if isinstance(fields.tools, list) else None,
            variables=variables,
            cache_salt=salt_text(fields.cache_salt),
            exact=exact,
        ),
        previous_response=fields.previous_response_id,
        session_names=keyed_session(fields.prompt_cache_key),
        reply_tokens_max=reply_length(1, fields.max_output_tokens),
        background=fields.background not in (None, False),
        server_tools=_calls_tools_itself(fields.tools),
        retention=openai_marks(fields.prompt_cache_retention, fields.prompt_cache_options),
        engine_fields=fields,
    )


def _calls_tools_itself(tools: object) -> bool:
    """Whether a tool is one of the engine's own, not a function that the client calls."""
    return bool(tools) and not (
        isinstance(tools, list) and all(isinstance(tool, dict) and tool.get("type") == "function" for tool in tools)
    )


def _is_message(item: object) -> bool:
    """A message with a role and text, which the engine passes to its chat template unchanged."""
    if not isinstance(item, dict) or item.get("type", "message") != "message" or "status" in item:
        return False
    content = item.get("content")
    return isinstance(content, str) or (
        isinstance(content, list) and all(isinstance(part, dict) and "text" in part for part in content)
    )


def _chat_message(item: object) -> dict[str, Any]:
    if not isinstance(item, dict):
        return {"role": "", "content": item}
    if not _is_message(item):
        return {"role": str(item.get("role") or item.get("type")), "content": item}
    content = item["content"]
    if isinstance(content, list):
        content = [{"type": "text", "text": part["text"]} for part in content]
    return {"role": item.get("role"), "content": content}
