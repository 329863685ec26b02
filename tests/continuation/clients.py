"""Streams of clients, read at once, and what each of them should say."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from chaos.machines import SECONDS_MAX

from spillway_simulator.wire.tokens import BuiltInTokens

from .machines import MODEL

ANSWER_TOKENS = 120  # over two seconds: a fault meets all streams in their middle
_TOKENS = BuiltInTokens()


@dataclass
class Stream:
    """One request and all that its client got. error: of an error event."""

    chat: bool
    body: dict[str, Any]
    engine: str = ""
    text: str = ""
    pieces: int = 0
    ids: set[str] = field(default_factory=set)
    roles: int = 0
    finishes: list[str] = field(default_factory=list)
    usages: list[dict[str, Any]] = field(default_factory=list)
    ends: int = 0
    error: str = ""
    token_ids: int = 0  # of events that show some, which the client did not ask for

    @property
    def prompt_tokens(self) -> int:
        return len(_TOKENS.chat(self.body) if self.chat else _TOKENS.text(self.body["prompt"]))

    @property
    def expected_text(self) -> str:
        """The answer of an engine that nothing happens to."""
        prompt = _TOKENS.chat(self.body) if self.chat else _TOKENS.text(self.body["prompt"])
        return _TOKENS.decode(_TOKENS.answer(prompt, ANSWER_TOKENS))

    def take(self, data: str) -> None:
        if data == "[DONE]":
            self.ends += 1
            return
        document = json.loads(data)
        if "error" in document:
            self.error = document["error"]["message"]
            return
        self.ids.add(document["id"])
        self.usages += [document["usage"]] if document.get("usage") else []
        self.token_ids += bool(document.get("prompt_token_ids"))
        for choice in document["choices"]:
            self.token_ids += bool(choice.get("token_ids") or choice.get("prompt_token_ids"))
            delta = choice.get("delta", choice)
            self.roles += "role" in delta
            text = delta.get("content" if self.chat else "text") or ""
            self.text += text
            self.pieces += bool(text)
            self.finishes += [choice["finish_reason"]] if choice["finish_reason"] else []


def make_stream(number: int, **fields: Any) -> Stream:
    """Chats and completions in turn, each with a prompt of its own."""
    question = f"Question {number}: " + f"what of tide and moon number {number}? " * 4
    body = {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": ANSWER_TOKENS}
    body |= {"ignore_eos": True, **fields}
    if number % 2:
        return Stream(False, {**body, "prompt": question})
    return Stream(True, {**body, "messages": [{"role": "user", "content": question}]})


async def follow(url: str, streams: Iterable[Stream]) -> None:
    """Follow the streams until every reply has ended."""
    timeout = aiohttp.ClientTimeout(total=None, sock_read=SECONDS_MAX)
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        aiohttp.ClientSession(timeout=timeout, connector=connector) as session,
        asyncio.TaskGroup() as group,
    ):
        for stream in streams:
            group.create_task(_follow(session, url, stream))


async def _follow(session: aiohttp.ClientSession, url: str, stream: Stream) -> None:
    path = "/v1/chat/completions" if stream.chat else "/v1/completions"
    async with session.post(url + path, json=stream.body) as reply:
        assert reply.status == 200, await reply.text()
        stream.engine = reply.headers["x-spillway-engine"]
        async for line in reply.content:
            if line.startswith(b"data: "):
                stream.take(line[6:].decode().strip())
