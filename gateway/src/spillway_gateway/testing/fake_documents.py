"""Replies as vLLM 0.23 shapes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

POOLING_PATHS = frozenset(
    {"/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank"}
    | {"/v2/rerank", "/generative_scoring"}
)


def completion_usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens} if cached_tokens else None,
    }


def completion_reply(path: str, text: str, model: str, usage: dict[str, Any]) -> dict[str, Any]:
    """A reply of chat or of completions, by the path."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
    if path.endswith("/chat/completions"):
        choice["message"] = {"role": "assistant", "content": text}
    else:
        choice["text"] = text
    return {**_envelope(path, model, chunk=False), "choices": [choice], "usage": usage}


def completion_events(
    path: str, words: Sequence[str], model: str, usage: dict[str, Any], *, with_usage: bool
) -> list[bytes]:
    """Return the events up to [DONE], which is not among them."""
    envelope = _envelope(path, model, chunk=True)
    chat = path.endswith("/chat/completions")
    choices: list[dict[str, Any]] = []
    if chat:
        choices.append({"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})
    for word in words:
        content: dict[str, Any] = {"delta": {"content": word}} if chat else {"text": word}
        choices.append({"index": 0, **content, "finish_reason": None})
    choices[-1]["finish_reason"] = "stop"
    documents: list[dict[str, Any]] = [{**envelope, "choices": [choice]} for choice in choices]
    if with_usage:
        documents.append({**envelope, "choices": [], "usage": usage})
    return [untyped_event(document) for document in documents]


def error_document(message: str, code: int, kind: str = "BadRequestError") -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _envelope(path: str, model: str, *, chunk: bool) -> dict[str, Any]:
    chat = path.endswith("/chat/completions")
    kind = ("chat.completion.chunk" if chunk else "chat.completion") if chat else "text_completion"
    return {"id": "cmpl-fake", "object": kind, "created": 1, "model": model}


def pooling_reply(path: str, body: dict[str, Any], model: str, prompt_tokens: int) -> dict[str, Any]:
    usage = {"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens}
    if path.endswith("rerank"):
        results = [
            {"index": at, "document": {"text": document}, "relevance_score": 1.0 / (1 + at)}
            for at, document in enumerate(body["documents"])
        ]
        return {"id": "rerank-fake", "model": model, "usage": usage, "results": results}
    given = body.get("input", body.get("documents", body.get("text_2", "")))
    count = len(given) if isinstance(given, list) and given and not isinstance(given[0], int) else 1
    if path.endswith("score"):
        data: list[dict[str, Any]] = [{"index": at, "object": "score", "score": 0.5} for at in range(count)]
    else:
        data = [{"index": at, "object": "embedding", "embedding": [float(prompt_tokens), 1.0]} for at in range(count)]
    return {"id": "pool-fake", "object": "list", "created": 1, "model": model, "data": data, "usage": usage}


def messages_reply(text: str, model: str, usage: dict[str, int]) -> dict[str, Any]:
    return {
        "id": "msg_fake",
        "type": "message",
        "role": "assistant",
        "content": [{"type": "text", "text": text}],
        "model": model,
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": usage,
    }


def messages_events(words: Sequence[str], model: str, usage: dict[str, int]) -> list[bytes]:
    start = {**messages_reply("", model, {**usage, "output_tokens": 0}), "content": [], "stop_reason": None}
    documents: list[dict[str, Any]] = [{"type": "message_start", "message": start}]
    documents.append({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}})
    documents += [
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": word}} for word in words
    ]
    documents.append({"type": "content_block_stop", "index": 0})
    documents.append(
        {"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None}, "usage": usage}
    )
    documents.append({"type": "message_stop"})
    return [typed_event(document) for document in documents]


def response_document(response_id: str, text: str | None, model: str, usage: dict[str, int]) -> dict[str, Any]:
    """text: None while it is in progress."""
    part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": []}
    message = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
    return {
        "id": response_id,
        "object": "response",
        "created_at": 1,
        "status": "in_progress" if text is None else "completed",
        "model": model,
        "output": [] if text is None else [message],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": None if text is None else usage,
    }


def response_events(response_id: str, words: Sequence[str], model: str, usage: dict[str, int]) -> list[bytes]:
    started = response_document(response_id, None, model, usage)
    done = response_document(response_id, "".join(words), model, usage)
    documents: list[dict[str, Any]] = [{"type": "response.created", "response": started}]
    documents += [
        {"type": "response.output_text.delta", "item_id": "msg_1", "output_index": 0, "content_index": 0, "delta": word}
        for word in words
    ]
    documents.append({"type": "response.completed", "response": done})
    return [typed_event({**document, "sequence_number": at}) for at, document in enumerate(documents)]


def typed_event(document: dict[str, Any]) -> bytes:
    return f"event: {document['type']}\ndata: {json.dumps(document)}\n\n".encode()


def untyped_event(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"
