"""The routes of one engine: OpenAI's, vLLM's, and the engine pod's own."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import structs

from spillway_settings.wire import CONFIG_PATH, ENDING_ERROR
from spillway_simulator.errors import RequestTooLong
from spillway_simulator.server.engine_host import EngineHost
from spillway_simulator.server.faults import DRAINING
from spillway_simulator.server.generation import Asked, BadBody, Generation, read_asked, read_prompt
from spillway_simulator.server.http_connection import HttpConnection
from spillway_simulator.wire.metrics_text import CONTENT_TYPE, metrics_page
from spillway_simulator.wire.openai_documents import FINGERPRINT, Envelope, OpenAiEnvelope, encode, error, model_card
from spillway_simulator.wire.other_documents import MessagesEnvelope, ResponsesEnvelope
from spillway_simulator.wire.tokens import Tokens

_decode = msgspec.json.Decoder(dict[str, Any]).decode
_numbers = itertools.count(1)


class EngineRoutes:
    """Stateless but for its engine."""

    def __init__(self, host: EngineHost, tokens: Tokens) -> None:
        self._host = host
        self._tokens = tokens
        self._gets: dict[str, Callable[[], tuple[int, bytes]]] = {
            "/health": lambda: (200, b""),
            "/ping": lambda: (200, b""),
            "/ready": self._ready,
            "/v1/models": self._models,
            "/version": lambda: (200, encode({"version": f"0.23.0+{FINGERPRINT}"})),
            "/load": lambda: (200, encode({"server_load": host.model.running_requests + host.model.waiting_requests})),
            CONFIG_PATH: self._config,
        }
        self._posts: dict[str, Callable[[HttpConnection, dict[str, Any]], None]] = {
            "/v1/chat/completions": self._chat,
            "/v1/completions": self._completion,
            "/v1/responses": self._response,
            "/v1/messages": self._message,
            "/v1/messages/count_tokens": self._count_tokens,
            "/v1/chat/completions/render": lambda connection, body: self._render(connection, body, chat=True),
            "/v1/completions/render": lambda connection, body: self._render(connection, body, chat=False),
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
        }

    def handle(self, connection: HttpConnection, method: str, path: str, body: bytes) -> None:
        host = self._host
        if host.faults.hanging:
            return
        if path == "/metrics" and method == "GET":
            page = metrics_page(host.model, host.shared, host.settings.model, host.lag_seconds)
            connection.reply(200, page, CONTENT_TYPE)
            return
        answer = self._gets.get(path) if method == "GET" else None
        if answer is not None:
            connection.reply(*answer())
            return
        post = self._posts.get(path) if method == "POST" else None
        if post is None:
            known = path in self._gets or path in self._posts
            connection.reply(405 if known else 404, encode({"detail": "Method Not Allowed" if known else "Not Found"}))
            return
        try:
            post(connection, self._read(body))
        except (BadBody, RequestTooLong) as reason:
            connection.reply(400, error(str(reason), 400))

    def _read(self, body: bytes) -> dict[str, Any]:
        try:
            return _decode(body)
        except msgspec.DecodeError as reason:
            raise BadBody(f"the body is not a JSON object: {reason}") from reason

    # -- state -------------------------------------------------------------------------------------------------------

    def _ready(self) -> tuple[int, bytes]:
        reason = self._host.faults.not_ready
        return (200, b'{"ready":true}') if reason is None else (503, encode({"ready": False, "reason": reason}))

    def _models(self) -> tuple[int, bytes]:
        settings = self._host.settings
        return 200, encode({"object": "list", "data": [model_card(settings.model, settings.max_model_tokens)]})

    def _config(self) -> tuple[int, bytes]:
        settings = self._host.settings
        document = {
            "simulated": True,
            "name": self._host.name,
            "settings": structs.asdict(settings),
            "rates": dataclasses.asdict(settings.engine_rates),
        }
        return 200, encode(document)

    # -- tokens ------------------------------------------------------------------------------------------------------

    def _tokenize(self, connection: HttpConnection, body: dict[str, Any]) -> None:
        ids = read_prompt(body, self._tokens, chat="messages" in body).tolist()
        limit = self._host.settings.max_model_tokens
        connection.reply(200, encode({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": None}))

    def _detokenize(self, connection: HttpConnection, body: dict[str, Any]) -> None:
        ids = body.get("tokens")
        if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < 1 << 32 for token in ids):
            raise BadBody("'tokens': a list of token ids needed")
        connection.reply(200, encode({"prompt": self._tokens.decode(ids)}))

    def _render(self, connection: HttpConnection, body: dict[str, Any], *, chat: bool) -> None:
        asked = read_asked(body, self._tokens, self._host, chat=chat)
        document = {
            "request_id": connection.request_id or f"render-{next(_numbers)}",
            "token_ids": asked.prompt.tolist(),
            "sampling_params": {"max_tokens": asked.answer_tokens},
            "model": self._host.settings.model,
            "stream": asked.stream,
            "cache_salt": asked.salt,
            "priority": body.get("priority", 0),
        }
        connection.reply(200, encode(document if chat else [document]))

    # -- inference ---------------------------------------------------------------------------------------------------

    def _chat(self, connection: HttpConnection, body: dict[str, Any]) -> None:
        asked = self._asked(connection, body, chat=True)
        if asked is not None:
            name = f"chatcmpl-{self._name(connection)}"
            self._generate(connection, self._envelope(name, asked, chat=True), asked)

    def _completion(self, connection: HttpConnection, body: dict[str, Any]) -> None:
        asked = self._asked(connection, body, chat=False)
        if asked is not None:
            name = f"cmpl-{self._name(connection)}"
            self._generate(connection, self._envelope(name, asked, chat=False), asked)

    def _envelope(self, name: str, asked: Asked, *, chat: bool) -> OpenAiEnvelope:
        prompt = asked.prompt.tolist() if asked.token_ids else None
        return OpenAiEnvelope(name, self._model, chat, int(time.time()), prompt)

    def _response(self, connection: HttpConnection, body: dict[str, Any]) -> None:
        given = body.get("input")
        messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
        if isinstance(body.get("instructions"), str) and isinstance(messages, list):
            messages = [{"role": "system", "content": body["instructions"]}, *messages]
        asked = self._asked(connection, {**body, "messages": messages}, chat=True)
        if asked is not None:
            name = f"resp_{self._name(connection)}"
            self._generate(connection, ResponsesEnvelope(name, self._model, int(time.time())), asked)

    def _message(self, connection: HttpConnection, body: dict[str, Any]) -> None:
        # As vLLM 0.23: a cache_salt is not known here, and is ignored.
        asked = self._asked(connection, {**_anthropic_chat(body), "cache_salt": None}, chat=True)
        if asked is not None:
            name = f"msg_{self._name(connection)}"
            self._generate(connection, MessagesEnvelope(name, self._model, len(asked.prompt)), asked)

    def _count_tokens(self, connection: HttpConnection, body: dict[str, Any]) -> None:
        prompt = read_prompt(_anthropic_chat(body), self._tokens, chat=True)
        connection.reply(200, encode({"input_tokens": len(prompt)}))

    @property
    def _model(self) -> str:
        return self._host.settings.model

    def _name(self, connection: HttpConnection) -> str:
        return f"{connection.request_id or self._host.name}-{next(_numbers)}"

    def _asked(self, connection: HttpConnection, body: dict[str, Any], *, chat: bool) -> Asked | None:
        """Read the request; None: it was answered already, with an error."""
        host = self._host
        model = body.get("model")
        if model not in (None, host.settings.model):
            connection.reply(404, error(f"The model `{model}` does not exist.", 404))
            return None
        status = host.faults.refusal()
        if status is not None:
            kind = ENDING_ERROR if host.faults.not_ready == DRAINING else ""
            connection.reply(status, error(f"simulated fault: status {status}", status, kind))
            return None
        return read_asked(body, self._tokens, host, chat=chat)

    def _generate(self, connection: HttpConnection, envelope: Envelope, asked: Asked) -> None:
        Generation(self._host, connection, envelope, asked, self._tokens).start()


def _anthropic_chat(body: dict[str, Any]) -> dict[str, Any]:
    """Return the chat with the system text as its first message, the place that chats have for it."""
    system, messages = body.get("system"), body.get("messages")
    if not system or not isinstance(messages, list):
        return body
    return {**body, "messages": [{"role": "system", "content": system}, *messages]}
