"""OpenAI documents of a simulated engine; each says that it is simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from spillway_simulator.model.request import CachedTokens

FINGERPRINT = "spillway-simulator"
encode = msgspec.json.Encoder().encode


class Envelope(Protocol):
    """Writer of one API: how it says what an engine generates. Each method gives whole server-sent events, or a whole
    body."""

    @property
    def id(self) -> str: ...

    def begin(self) -> bytes:
        """Events before the first token; may be empty."""

    def piece(self, text: str) -> bytes:
        """The event of one token: the same bytes for every token but for its text."""

    def end(self, text: str, tokens: Sequence[int], completed: Completed) -> bytes:
        """The last token's event and all that follows it."""

    def whole(self, text: str, completed: Completed) -> bytes:
        """The body of a plain reply."""


@dataclass(frozen=True, slots=True)
class Completed:
    """The facts that a reply states after its last token. answer: the whole text."""

    answer: str
    finish_reason: str
    usage: dict[str, Any]
    include_usage: bool


@dataclass(frozen=True, slots=True)
class OpenAiEnvelope:
    """Documents of chat and completions. prompt: its token ids if the client asked for them (`return_token_ids`, in
    streams alone); events hold them as vLLM's do."""

    id: str
    model: str
    chat: bool
    created: int
    prompt: Sequence[int] | None = None

    def document(self, *, chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.chat else "text_completion"
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }

    def begin(self) -> bytes:
        return self.chunk("", None, role=True) if self.chat else b""

    def piece(self, text: str) -> bytes:
        return self.chunk(text, None)

    def piece_with_ids(self, text: str, tokens: Sequence[int], *, first: bool) -> bytes:
        """Return piece() for a client that asked for ids."""
        return self.chunk(text, None, tokens=tokens, first=first)

    def end(self, text: str, tokens: Sequence[int], completed: Completed) -> bytes:
        usage = self.usage_chunk(completed.usage) if completed.include_usage else b""
        return self.chunk(text, completed.finish_reason, tokens=tokens) + usage + b"data: [DONE]\n\n"

    def chunk(
        self,
        text: str,
        finish_reason: str | None,
        *,
        role: bool = False,
        tokens: Sequence[int] = (),
        first: bool = False,
    ) -> bytes:
        """One data line. role: the first chunk of a chat stream, which names the speaker. first: of a completion."""
        document = self.document(chunk=True)
        choice: dict[str, Any] = {"index": 0}
        if role:
            document["prompt_token_ids"] = self.prompt
            choice |= {"delta": {"role": "assistant", "content": text}, "logprobs": None, "finish_reason": None}
            return b"data: " + encode({**document, "choices": [choice]}) + b"\n\n"
        choice |= {"delta": {"content": text}} if self.chat else {"text": text}
        choice |= {"logprobs": None, "finish_reason": finish_reason}
        if not self.chat:
            choice |= {"stop_reason": None, "prompt_token_ids": self.prompt if first else None}
        choice["token_ids"] = None if self.prompt is None else list(tokens)
        return b"data: " + encode({**document, "choices": [choice]}) + b"\n\n"

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        return b"data: " + encode({**self.document(chunk=True), "choices": [], "usage": usage}) + b"\n\n"

    def whole(self, text: str, completed: Completed) -> bytes:
        choice: dict[str, Any] = {"index": 0}
        if self.chat:
            choice["message"] = {"role": "assistant", "content": text, "tool_calls": []}
        else:
            choice["text"] = text
        choice |= {"logprobs": None, "finish_reason": completed.finish_reason}
        return encode({**self.document(chunk=False), "choices": [choice], "usage": completed.usage})


def usage(prompt_tokens: int, answer_tokens: int, cached: CachedTokens) -> dict[str, Any]:
    """cached_tokens is null when nothing was cached, as in vLLM."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": answer_tokens,
        "total_tokens": prompt_tokens + answer_tokens,
        "prompt_tokens_details": {"cached_tokens": cached.total} if cached.total else None,
    }


def error(message: str, status: int, kind: str = "") -> bytes:
    kind = kind or {400: "BadRequestError", 404: "NotFoundError", 503: "ServiceUnavailableError"}.get(
        status, "InternalServerError"
    )
    return encode({"error": {"message": message, "type": kind, "param": None, "code": status}})


def model_card(model: str, max_model_tokens: int) -> dict[str, Any]:
    return {
        "id": model,
        "object": "model",
        "created": 0,
        "owned_by": FINGERPRINT,
        "root": model,
        "parent": None,
        "max_model_len": max_model_tokens,
    }
