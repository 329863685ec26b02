"""Documents of the APIs beside OpenAI's chat and completions: Responses, Anthropic's Messages, embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spillway_simulator.wire.openai_documents import FINGERPRINT, Completed, encode


def typed_event(document: dict[str, Any]) -> bytes:
    return b"event: " + str(document["type"]).encode() + b"\ndata: " + encode(document) + b"\n\n"


def typed_usage(usage: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's usage under the names of the two newer APIs."""
    return {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}


@dataclass(frozen=True, slots=True)
class ResponsesEnvelope:
    """`/v1/responses`. Deltas carry no sequence number, so that every token's event is the same but for its text."""

    id: str
    model: str
    created: int

    def begin(self) -> bytes:
        return typed_event({"type": "response.created", "sequence_number": 0, "response": self._document(None)})

    def piece(self, text: str) -> bytes:
        document = {"type": "response.output_text.delta", "item_id": "msg", "output_index": 0, "content_index": 0}
        return typed_event({**document, "delta": text})

    def end(self, text: str, tokens: Sequence[int], completed: Completed) -> bytes:
        done = self._document(completed)
        return self.piece(text) + typed_event({"type": "response.completed", "sequence_number": 1, "response": done})

    def whole(self, text: str, completed: Completed) -> bytes:
        return encode(self._document(completed))

    def _document(self, completed: Completed | None) -> dict[str, Any]:
        document: dict[str, Any] = {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "model": self.model,
            "metadata": {"simulated": FINGERPRINT},
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "status": "in_progress",
            "output": [],
            "usage": None,
        }
        if completed is None:
            return document
        part = {"type": "output_text", "text": completed.answer, "annotations": []}
        message = {"id": "msg", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
        usage = typed_usage(completed.usage)
        details = completed.usage["prompt_tokens_details"] or {"cached_tokens": 0}
        usage |= {"total_tokens": completed.usage["total_tokens"], "input_tokens_details": details}
        return {**document, "status": "completed", "output": [message], "usage": usage}


@dataclass(frozen=True, slots=True)
class MessagesEnvelope:
    """`/v1/messages`. prompt_tokens: sent in the first event."""

    id: str
    model: str
    prompt_tokens: int

    def begin(self) -> bytes:
        usage = {"input_tokens": self.prompt_tokens, "output_tokens": 0}
        message = {**self._document("", None, usage), "content": []}
        block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        return typed_event({"type": "message_start", "message": message}) + typed_event(block)

    def piece(self, text: str) -> bytes:
        delta = {"type": "text_delta", "text": text}
        return typed_event({"type": "content_block_delta", "index": 0, "delta": delta})

    def end(self, text: str, tokens: Sequence[int], completed: Completed) -> bytes:
        delta = {"stop_reason": _stop_reason(completed), "stop_sequence": None}
        return (
            self.piece(text)
            + typed_event({"type": "content_block_stop", "index": 0})
            + typed_event({"type": "message_delta", "delta": delta, "usage": typed_usage(completed.usage)})
            + typed_event({"type": "message_stop"})
        )

    def whole(self, text: str, completed: Completed) -> bytes:
        return encode(self._document(text, _stop_reason(completed), typed_usage(completed.usage)))

    def _document(self, text: str, stop_reason: str | None, usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "content": [{"type": "text", "text": text}],
            "model": self.model,
            "stop_reason": stop_reason,
            "stop_sequence": None,
            "usage": usage,
            "simulated": FINGERPRINT,
        }


def _stop_reason(completed: Completed) -> str:
    return "max_tokens" if completed.finish_reason == "length" else "end_turn"
