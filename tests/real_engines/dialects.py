"""One request in each of the four dialects, and what its client has at the end of the reply, plain or streamed."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from typing import Any

import httpx

CHAT, COMPLETIONS, MESSAGES, RESPONSES = "chat", "completions", "messages", "responses"
DIALECTS = (CHAT, COMPLETIONS, MESSAGES, RESPONSES)
PATHS = {
    CHAT: "/v1/chat/completions",
    COMPLETIONS: "/v1/completions",
    MESSAGES: "/v1/messages",
    RESPONSES: "/v1/responses",
}
REQUEST_SECONDS = 300.0  # without a part of any reply
_ENDS = {"message_stop", "response.completed", "response.incomplete"}


def body_of(dialect: str, model: str, text: str, tokens_max: int, *, stream: bool = False) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    asked: dict[str, Any] = {
        CHAT: {"messages": messages, "max_tokens": tokens_max, "ignore_eos": True},
        COMPLETIONS: {"prompt": text, "max_tokens": tokens_max, "ignore_eos": True},
        MESSAGES: {"messages": messages, "max_tokens": tokens_max},
        RESPONSES: {"input": messages, "max_output_tokens": tokens_max},
    }[dialect]
    return {"model": model, "temperature": 0, "stream": stream, **asked}


@dataclass
class Exchange:
    """One client's record; `text` grows while a stream runs."""

    name: str
    dialect: str
    stream: bool
    status: int | None = None
    engine: str | None = None
    text: str = ""
    parts: int = 0
    whole: bool = False  # the reply came to its dialect's own end
    error: dict[str, Any] | None = None
    broken: str | None = None  # the connection ended without an error
    left: bool = False  # its client needs no more of it
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def answered(self) -> bool:
        return self.status == 200 and self.whole and self.error is None and bool(self.text)

    @property
    def error_is_clear(self) -> bool:
        return self.error is not None and bool(self.error.get("message")) and not self.whole

    def __str__(self) -> str:
        return (
            f"{self.name}: status {self.status} from {self.engine}, {self.parts} parts, whole {self.whole}, "
            f"error {self.error}, broken {self.broken}"
        )


class Crowd:
    """Every request in a thread of its own, all at once."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.exchanges: list[Exchange] = []

    def send(self, name: str, dialect: str, body: dict[str, Any]) -> Exchange:
        exchange = Exchange(name, dialect, bool(body.get("stream")))
        self.exchanges.append(exchange)
        threading.Thread(target=self._run, args=(exchange, body), daemon=True).start()
        return exchange

    def join(self) -> list[Exchange]:
        seen = self._progress()
        for exchange in self.exchanges:
            while not exchange.ended.wait(REQUEST_SECONDS):
                before, seen = seen, self._progress()
                assert seen > before, f"still running: {exchange}"
        return self.exchanges

    def _progress(self) -> int:
        return sum(exchange.parts + exchange.ended.is_set() for exchange in self.exchanges)

    def _run(self, exchange: Exchange, body: dict[str, Any]) -> None:
        try:
            self._exchange(exchange, body)
        except httpx.HTTPError as error:
            exchange.broken = f"{type(error).__name__}: {error}"
        finally:
            exchange.ended.set()

    def _exchange(self, exchange: Exchange, body: dict[str, Any]) -> None:
        url, headers = f"{self._url}{PATHS[exchange.dialect]}", {"x-request-id": exchange.name}
        with httpx.stream("POST", url, json=body, headers=headers, timeout=REQUEST_SECONDS) as reply:
            exchange.status = reply.status_code
            exchange.engine = reply.headers.get("x-spillway-engine")
            if exchange.stream and reply.status_code == 200:
                for line in reply.iter_lines():
                    if line.startswith("data:"):
                        take_event(exchange, line[5:].strip())
                    if exchange.left:
                        return
            else:
                take_reply(exchange, json.loads(reply.read()))


def take_reply(exchange: Exchange, document: dict[str, Any]) -> None:
    exchange.error = document.get("error")
    if exchange.error is not None or exchange.status != 200:
        return
    exchange.whole = True
    if exchange.dialect == CHAT:
        exchange.text = document["choices"][0]["message"]["content"]
    elif exchange.dialect == COMPLETIONS:
        exchange.text = document["choices"][0]["text"]
    elif exchange.dialect == MESSAGES:
        exchange.text = "".join(block.get("text", "") for block in document["content"])
    else:
        content = [part for item in document["output"] for part in item.get("content") or ()]
        exchange.text = "".join(part.get("text", "") for part in content)


def take_event(exchange: Exchange, data: str) -> None:
    if data == "[DONE]":
        exchange.whole = exchange.error is None
        return
    event = json.loads(data)
    kind = event.get("type")
    if kind in ("error", "response.failed") or event.get("error"):
        failed = event.get("response") or event
        exchange.error = failed.get("error") or event
        return
    if kind in _ENDS:
        exchange.whole = True
    part = ""
    if exchange.dialect in (CHAT, COMPLETIONS):
        for choice in event.get("choices", []):
            part += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
    elif kind == "content_block_delta":
        part = event["delta"].get("text", "")
    elif kind == "response.output_text.delta":
        part = event["delta"]
    exchange.text += part
    exchange.parts += bool(part)
