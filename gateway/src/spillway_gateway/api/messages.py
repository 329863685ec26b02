"""POST /v1/messages, Anthropic's API as vLLM serves it: a message list with typed blocks, converted to a chat as the
engine does, so that routing sees the tokens that the engine hashes.

The rules are those of vLLM 0.23's conversion to chat completions. A block that is not text stays as it is; no template
renders it, and the prompt is then matched by text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from spillway_gateway.api.body_errors import decoder_of, read_body
from spillway_gateway.api.engine_fields import EngineFields
from spillway_gateway.api.parsed_body import ParsedBody, reply_length, salt_text
from spillway_gateway.api.retention import anthropic_marks
from spillway_gateway.tokens.prompt import ChatPrompt
from spillway_gateway.upstream.forward import Body
from spillway_settings.session_sources import METADATA_USER_ID

# Claude Code's user ids name a session: user_HASH_account_UUID_session_UUID, or JSON with a session_id. The id of other
# clients names a user, who has many sessions at a time.
_SESSION_OF_USER = re.compile(r"user_.*_account_.*_session_([0-9A-Fa-f-]{8,64})", re.DOTALL)
_USER_ID_CHARS_MAX = 4096
_PER_REQUEST_NOTE = "x-anthropic-billing-header"  # vLLM drops such system blocks, since they differ by request


class MessagesBody(EngineFields):
    messages: list[dict[str, Any]]
    model: str | None = None
    stream: bool | None = None
    system: Any = None
    tools: Any = None
    tool_choice: Any = None
    output_config: Any = None
    chat_template_kwargs: Any = None
    max_tokens: Any = None
    metadata: Any = None
    cache_control: Any = None
    cache_salt: Any = msgspec.UNSET


class _AgentUser(msgspec.Struct):
    session_id: str


_decoder = decoder_of(MessagesBody)
_agent_user = msgspec.json.Decoder(_AgentUser)


def parse_messages(body: Body) -> ParsedBody:
    """Parse a request. Raises ClientBadRequest if it is not JSON or a field has the wrong type."""
    fields = read_body(_decoder, body)
    variables = dict(fields.chat_template_kwargs) if isinstance(fields.chat_template_kwargs, dict) else {}
    effort = fields.output_config.get("effort") if isinstance(fields.output_config, dict) else None
    if effort is not None:
        variables.setdefault("enable_thinking", effort != "none")
        variables.setdefault("reasoning_effort", effort)
    tools = _tools(fields.tools)
    return ParsedBody(
        model=fields.model,
        names_salt=fields.cache_salt is not msgspec.UNSET,
        stream=bool(fields.stream),
        prompt=ChatPrompt(
            messages=chat_messages(fields.system, fields.messages),
            tools=tools,
            variables=variables,
            cache_salt=salt_text(fields.cache_salt),
            exact=(tools is not None or not fields.tools) and fields.tool_choice in (None, {"type": "auto"}),
        ),
        session_names=_session_names(fields.metadata),
        reply_tokens_max=reply_length(1, fields.max_tokens),
        retention=anthropic_marks(fields.cache_control, fields.tools, fields.system, fields.messages),
        engine_fields=fields,
    )


def _session_names(metadata: object) -> dict[str, str]:
    """The session in `metadata.user_id`; a user id alone names none."""
    user = metadata.get("user_id") if isinstance(metadata, dict) else None
    if not isinstance(user, str) or len(user) > _USER_ID_CHARS_MAX:
        return {}
    found = _SESSION_OF_USER.fullmatch(user)
    if found is not None:
        return {METADATA_USER_ID: found[1]}
    try:
        session = _agent_user.decode(user).session_id if user.startswith("{") else ""
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return {}
    return {METADATA_USER_ID: session} if session else {}


def chat_messages(system: object, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The chat of an Anthropic request. Never raises: an unknown shape is kept as it is."""
    system_texts = _system_texts(system)
    chat: list[dict[str, Any]] = []
    for message in messages:
        content = message.get("content")
        if message.get("role") == "system":
            system_texts += _system_texts(content)
        elif isinstance(content, list):
            chat += _blocks(message.get("role"), content)
        else:
            chat.append({"role": message.get("role"), "content": content})
    if system_texts:
        chat.insert(0, {"role": "system", "content": "".join(system_texts)})
    return chat


def _system_texts(content: object) -> list[str]:
    if isinstance(content, str):
        return [content] if content else []
    blocks = content if isinstance(content, list) else []
    texts = [block.get("text") for block in blocks if isinstance(block, dict) and block.get("type") == "text"]
    return [text for text in texts if isinstance(text, str) and text and not text.startswith(_PER_REQUEST_NOTE)]


def _blocks(role: object, blocks: Sequence[Any]) -> list[dict[str, Any]]:
    """The messages that one message becomes: tool results first, one message each."""
    results: list[dict[str, Any]] = []
    parts: list[Any] = []
    calls: list[dict[str, Any]] = []
    reasoning: list[str] = []
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            if block.get("text"):
                parts.append({"type": "text", "text": block["text"]})
        elif kind == "thinking":
            reasoning.append(str(block.get("thinking", "")))
        elif kind == "tool_use":
            function = {"name": block.get("name") or "", "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            results.append(_tool_result(block))
        elif kind not in ("redacted_thinking", "tool_reference"):
            parts.append(block)  # an image, for example
    message: dict[str, Any] = {"role": role}
    if reasoning:
        message["reasoning"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    if parts:
        single = len(parts) == 1 and isinstance(parts[0], dict) and parts[0].get("type") == "text"
        message["content"] = parts[0]["text"] if single else parts
    elif role == "user":
        return results
    return [*results, message]


def _tool_result(block: Mapping[str, Any]) -> dict[str, Any]:
    content = block.get("content")
    if isinstance(content, list):
        texts = [item.get("text", "") for item in content if isinstance(item, dict) and item.get("type") == "text"]
        only_text = len(texts) == len(content) and all(isinstance(text, str) for text in texts)
        content = "\n".join(texts) if only_text else content
    return {"role": "tool", "tool_call_id": block.get("tool_use_id") or "", "content": content or ""}


def _tools(raw: object) -> list[dict[str, Any]] | None:
    """Return the tools as functions; None without tools, and for tools of a shape that is not converted here."""
    if not isinstance(raw, list) or not raw:
        return None
    tools = []
    for tool in raw:
        if not isinstance(tool, dict) or not isinstance(tool.get("input_schema"), dict) or "name" not in tool:
            return None
        schema = tool["input_schema"]
        function = {
            "name": tool["name"],
            "description": tool.get("description"),
            "parameters": schema if "type" in schema else {**schema, "type": "object"},
        }
        tools.append({"type": "function", "function": function})
    return tools
