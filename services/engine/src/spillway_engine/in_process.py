"""Requests to the server's own application, without a socket: the port need not be open yet."""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spillway_engine.in_flight import AsgiApp, Message, Scope
from spillway_settings.wire import RANK_HEADER


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    text: str

    def json(self) -> dict[str, Any]:
        """Raises ValueError when the body is no JSON object."""
        body = json.loads(self.text)
        if not isinstance(body, dict):
            raise ValueError(f"the body is no JSON object: {self.text[:100]}")
        return body


Ask = Callable[[str, Mapping[str, Any]], Awaitable[Reply]]  # (path, request body) -> reply


def ask_through(app: AsgiApp, lifespan_scope: Mapping[str, Any], rank: int | None = None) -> Ask:
    """An `Ask` that calls the ASGI application, with the API key that this server demands.

    rank: of the data parallel rank that is asked; None: whichever vLLM chooses.
    """
    own_headers = [] if rank is None else [(RANK_HEADER.encode(), str(rank).encode())]

    async def ask(path: str, body: Mapping[str, Any]) -> Reply:
        payload = json.dumps(body).encode()
        inbox: list[Message] = [{"type": "http.request", "body": payload, "more_body": False}]
        never = asyncio.Event()
        status = 0
        parts: list[bytes] = []

        async def receive() -> Message:
            if inbox:
                return inbox.pop()
            await never.wait()  # the caller never disconnects
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = int(message["status"])
            elif message["type"] == "http.response.body":
                parts.append(bytes(message.get("body", b"")))

        await app(_request_scope(path, len(payload), lifespan_scope, own_headers), receive, send)
        return Reply(status, b"".join(parts).decode(errors="replace"))

    return ask


def _request_scope(
    path: str, length: int, lifespan_scope: Mapping[str, Any], more: Sequence[tuple[bytes, bytes]]
) -> Scope:
    headers = [
        *more,
        (b"host", b"localhost"),
        (b"content-type", b"application/json"),
        (b"content-length", str(length).encode()),
    ]
    api_key = own_api_key(sys.argv, os.environ)
    if api_key:
        headers.append((b"authorization", f"Bearer {api_key}".encode()))
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": headers,
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 0),
        **{key: lifespan_scope[key] for key in ("app", "state") if key in lifespan_scope},
    }


def own_api_key(arguments: list[str], environment: Mapping[str, str]) -> str | None:
    """The key that this server demands of its callers."""
    for index, argument in enumerate(arguments):
        if argument == "--api-key" and index + 1 < len(arguments):
            return arguments[index + 1]
        if argument.startswith("--api-key="):
            return argument.partition("=")[2]
    return environment.get("VLLM_API_KEY")


KEY_NEEDED = "the engine's API key is needed"


class KeyCheck:
    """Whether a caller sends the key that this server demands, if it demands one. For what vLLM's own check, which
    lies behind the middleware, does not see."""

    def __init__(self) -> None:
        key = own_api_key(sys.argv, os.environ)
        self._authorization = f"Bearer {key}".encode() if key else None

    def accepts(self, scope: Scope) -> bool:
        if self._authorization is None:
            return True
        return hmac.compare_digest(dict(scope["headers"]).get(b"authorization", b""), self._authorization)
