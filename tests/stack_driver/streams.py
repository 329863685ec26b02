"""Concurrent streams through the gateway, each in its own thread, each with a record of its events."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from typing import Any

import httpx

from .prompts import Prompt

JOIN_SECONDS = 240.0  # without a token of any stream, however long all of them take on a busy machine


@dataclass
class Stream:
    """One client's record. `tokens` grows while the stream runs; the rest is set at its end."""

    prompt: Prompt
    status: int | None = None
    engine: str | None = None
    tokens: int = 0
    done: bool = False  # the terminal [DONE] was seen
    finish_reason: str | None = None
    error: dict[str, Any] | None = None  # an error event inside the stream, or an error body
    broken: str | None = None  # the connection ended without an error event
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def complete(self) -> bool:
        return self.status == 200 and self.done and self.error is None and self.finish_reason == "length"

    @property
    def error_is_clear(self) -> bool:
        """OpenAI's shape, with a sentence for people."""
        return self.error is not None and bool(self.error.get("message")) and "type" in self.error

    def __str__(self) -> str:
        return (
            f"{self.prompt.name} on {self.engine}: status {self.status}, {self.tokens} tokens, done {self.done}, "
            f"finish {self.finish_reason}, error {self.error}, broken {self.broken}"
        )


class StreamCrowd:
    """Starts every stream at once; `join` collects them, for as long as any of them goes on."""

    def __init__(self, url: str, model: str, prompts: list[Prompt], answer_tokens: int) -> None:
        self.streams = [Stream(prompt) for prompt in prompts]
        self._url, self._model, self._answer_tokens = url, model, answer_tokens
        self._let_go = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(stream,), daemon=True) for stream in self.streams]
        for thread in self._threads:
            thread.start()

    def let_go(self) -> None:
        """Close the streams, each when it next gets something."""
        self._let_go.set()

    def join(self) -> list[Stream]:
        seen = self._progress()
        for stream in self.streams:
            while not stream.ended.wait(JOIN_SECONDS):
                before, seen = seen, self._progress()
                assert seen > before, f"still running: {stream}"
        return self.streams

    def _progress(self) -> int:
        return sum(stream.tokens + stream.ended.is_set() for stream in self.streams)

    def _run(self, stream: Stream) -> None:
        try:
            self._follow(stream)
        except httpx.HTTPError as error:
            stream.broken = f"{type(error).__name__}: {error}"
        finally:
            stream.ended.set()

    def _follow(self, stream: Stream) -> None:
        body = {
            "model": self._model,
            "prompt": list(stream.prompt.tokens),
            "max_tokens": self._answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=JOIN_SECONDS) as response:
            stream.status = response.status_code
            stream.engine = response.headers.get("x-spillway-engine")
            if response.status_code != 200:
                stream.error = json.loads(response.read()).get("error")
                return
            for line in response.iter_lines():
                if self._let_go.is_set():
                    return
                if line.startswith("data:"):
                    self._take(stream, line[5:].strip())

    def _take(self, stream: Stream, data: str) -> None:
        if data == "[DONE]":
            stream.done = True
            return
        event = json.loads(data)
        if "error" in event:
            stream.error = event["error"]
        for choice in event.get("choices", []):
            stream.tokens += 1
            stream.finish_reason = choice.get("finish_reason") or stream.finish_reason
