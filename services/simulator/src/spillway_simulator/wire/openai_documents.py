"""OpenAI documents of a simulated engine; each says that it is simulated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from spillway_simulator.model.request import CachedTokens

FINGERPRINT = "spillway-simulator"
encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Envelope:
    """What all documents of one reply share."""

    id: str
    model: str
    chat: bool
    created: int

    def document(self, *, chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.chat else "text_completion"
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }

    def chunk(self, text: str, finish_reason: str | None, *, role: bool = False) -> bytes:
        """One data line. role: the first chunk of a chat stream, which names the speaker."""
        choice: dict[str, Any] = {"index": 0}
        if self.chat:
            choice["delta"] = {"role": "assistant", "content": text} if role else {"content": text}
        else:
            choice["text"] = text
        choice["logprobs"] = None
        choice["finish_reason"] = finish_reason
        return b"data: " + encode({**self.document(chunk=True), "choices": [choice]}) + b"\n\n"

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        return b"data: " + encode({**self.document(chunk=True), "choices": [], "usage": usage}) + b"\n\n"

    def whole(self, text: str, finish_reason: str, usage: dict[str, Any]) -> bytes:
        choice: dict[str, Any] = {"index": 0}
        if self.chat:
            choice["message"] = {"role": "assistant", "content": text, "tool_calls": []}
        else:
            choice["text"] = text
        choice |= {"logprobs": None, "finish_reason": finish_reason}
        return encode({**self.document(chunk=False), "choices": [choice], "usage": usage})


def usage(prompt_tokens: int, answer_tokens: int, cached: CachedTokens) -> dict[str, Any]:
    """cached_tokens is null when nothing was cached, as in vLLM."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": answer_tokens,
        "total_tokens": prompt_tokens + answer_tokens,
        "prompt_tokens_details": {"cached_tokens": cached.total} if cached.total else None,
    }


def error(message: str, status: int) -> bytes:
    kind = {400: "BadRequestError", 404: "NotFoundError", 503: "ServiceUnavailableError"}.get(
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
