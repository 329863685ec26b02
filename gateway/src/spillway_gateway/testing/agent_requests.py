"""The path, headers and body of one request as coding agents send it, in our own words.

Each function takes the session that the agent works in and returns a request of the agent, or of a sub-agent that it
has started. Only what says whose request it is follows the agents; prompts and tools are ours.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

READ_SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
RULES = "You work in a repository. Read a file before you change it, and run its tests after."


class AgentRequest(NamedTuple):
    """path: of the route. headers: as the agent spells them. body: a JSON object."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]


def claude_code(
    session: str, text: str, *, subagent: str | None = None, header: bool = True, user_id: str = "json"
) -> AgentRequest:
    """Messages, as Claude Code sends them.

    Args:
        session: a UUID; its sub-agents work in the same one.
        text: what the user says.
        subagent: the id of the sub-agent that asks; None: the agent itself.
        header: whether the header is sent: older versions have the session in the body alone.
        user_id: `json` or `legacy`, its two forms.
    """
    headers = {"User-Agent": "claude-cli/2.1.228 (external, cli)", "X-App": "cli", "Anthropic-Version": "2023-06-01"}
    if header:
        headers["X-Claude-Code-Session-Id"] = session
    if subagent is not None:
        headers["X-Claude-Code-Agent-Id"] = subagent
    device = "5d" * 32
    user = json.dumps({"device_id": device, "account_uuid": "", "session_id": session})
    if user_id == "legacy":
        user = f"user_{device}_account__session_{session}"
    body = {
        "model": "fake",
        "max_tokens": 8,
        "system": [{"type": "text", "text": RULES, "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": text}]}],
        "tools": [{"name": "Read", "description": "Reads a file.", "input_schema": READ_SCHEMA}],
        "metadata": {"user_id": user},
    }
    return AgentRequest("/v1/messages", headers, body)


def codex(
    session: str, text: str, *, thread: str | None = None, parent: str | None = None, old: bool = False
) -> AgentRequest:
    """Responses, as Codex CLI sends them.

    Args:
        session: a UUID. In old versions each thread has one of its own.
        text: what the user says.
        thread: the session's thread; None: its first one.
        parent: the thread that has started this one, if this one is a sub-agent's.
        old: whether it is a version whose header is spelt with an underscore.
    """
    thread = thread or session
    headers = {"User-Agent": "codex_cli_rs/0.150.0", "Originator": "codex_cli_rs"}
    headers |= {"session_id": thread} if old else {"Session-Id": session, "Thread-Id": thread}
    if parent is not None:
        headers |= {"X-OpenAI-Subagent": "collab_spawn", "X-Codex-Parent-Thread-Id": parent}
    body = {
        "model": "fake",
        "instructions": RULES,
        "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}],
        "tools": [{"type": "function", "name": "read", "parameters": READ_SCHEMA, "strict": False}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "store": False,
        "stream": False,
        "include": [],
        "prompt_cache_key": thread,
    }
    return AgentRequest("/v1/responses", headers, body)


def opencode(session: str, text: str, *, parent: str | None = None) -> AgentRequest:
    """Chat completions, as OpenCode sends them to a provider of one's own.

    Args:
        session: `ses_...`; a sub-agent has one of its own.
        text: what the user says.
        parent: the session that has started this one.
    """
    headers = {"User-Agent": "opencode/1.15.0", "x-session-affinity": session, "X-Session-Id": session}
    if parent is not None:
        headers["x-parent-session-id"] = parent
    tool = {"name": "read", "description": "Reads a file.", "parameters": READ_SCHEMA}
    body = {
        "model": "fake",
        "max_tokens": 8,
        "messages": [{"role": "system", "content": RULES}, {"role": "user", "content": text}],
        "tools": [{"type": "function", "function": tool}],
        "tool_choice": "auto",
    }
    return AgentRequest("/v1/chat/completions", headers, body)
