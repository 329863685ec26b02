"""Answers made of given tokens, streamed as vLLM streams them: text is held back inside a character and where a stop
string may begin, several tokens may come at once, and an engine decodes nothing of its prompt.

A token is a piece of UTF-8, whole characters or not, so that any cut of a text into tokens can be tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import msgspec

from spillway_gateway.testing.fake_engine import Scripted, byte_tokens

FIRST_ID = 1000  # byte_tokens() gives smaller ones
_REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class SpelledAnswer:
    """The one answer to one prompt. pieces: the tokens' bytes. group_sizes: tokens of each event, in turn; an engine
    that lags behind its core sends several."""

    pieces: Sequence[bytes]
    group_sizes: Sequence[int] = (1,)
    prompt: Sequence[int] = ()
    stop: Sequence[str] = ()
    include_stop: bool = False
    tokens_max: int | None = None
    request_id: str = "one"
    options: dict[str, Any] = field(default_factory=dict)

    def detokenize(self, tokens: Sequence[int]) -> str:
        return b"".join(self.pieces[token - FIRST_ID] for token in tokens).decode("utf-8", "replace")

    def events(self, *, chat: bool, asked_ids: bool, done_tokens: int = 0, prompt: Sequence[int] = ()) -> list[bytes]:
        """Return the events up to [DONE]. done_tokens: of the answer, which the prompt already holds."""
        chunks = self._chunks(done_tokens)
        envelope: dict[str, Any] = {
            "id": ("chatcmpl-" if chat else "cmpl-") + self.request_id,
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": 7,
            "model": "fake",
        }
        documents: list[dict[str, Any]] = []
        ids = list(prompt or self.prompt)
        if chat:
            role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            documents.append({**envelope, "choices": [role], "prompt_token_ids": ids if asked_ids else None})
            documents[0]["prompt_text"] = None
        for at, (tokens, text, finish, stop_reason) in enumerate(chunks):
            choice: dict[str, Any] = {"index": 0}
            choice |= {"delta": {"content": text}} if chat else {"text": text}
            choice |= {"logprobs": None, "finish_reason": finish}
            if not chat or finish is not None:
                choice["stop_reason"] = stop_reason
            if not chat:
                choice["prompt_token_ids"] = ids if asked_ids and at == 0 else None
            choice["token_ids"] = tokens if asked_ids else None
            documents.append({**envelope, "choices": [choice]})
        made = sum(len(chunk[0]) for chunk in chunks)
        usage = {"prompt_tokens": len(ids), "total_tokens": len(ids) + made, "completion_tokens": made}
        if self.options.get("include_usage"):
            documents.append({**envelope, "choices": [], "usage": usage})
        return [b"data: " + msgspec.json.encode(document) + b"\n\n" for document in documents]

    def _chunks(self, done_tokens: int) -> list[tuple[list[int], str, str | None, str | None]]:
        """(ids, text, finish reason, stop reason) of each event, as vLLM's output processor makes them."""
        count = len(self.pieces) if self.tokens_max is None else min(self.tokens_max, len(self.pieces))
        held_back = max(map(len, self.stop)) - 1 if self.stop and not self.include_stop else 0
        data, text, emitted = b"", "", 0
        group: list[int] = []
        chunks: list[tuple[list[int], str, str | None, str | None]] = []
        sizes = cycle(self.group_sizes)
        size = next(sizes)
        for at in range(done_tokens, count):
            group.append(FIRST_ID + at)
            data += self.pieces[at]
            before, decoded = len(text), data.decode("utf-8", "replace")
            if not decoded.endswith(_REPLACEMENT):
                text = decoded
            stopped = self._stopped(text, before)
            finish = "stop" if stopped is not None else None
            if stopped is not None:
                text = text[: stopped[1]]
            elif at == count - 1:
                finish = "stop" if count == len(self.pieces) else "length"
            if finish is None and len(group) < size:
                continue
            upto = len(text) if finish is not None else max(emitted, len(text) - held_back)
            chunks.append((group, text[emitted:upto], finish, stopped[0] if stopped is not None else None))
            if finish is not None:
                break
            emitted, group, size = upto, [], next(sizes)
        return chunks

    def _stopped(self, text: str, before: int) -> tuple[str, int] | None:
        """(the stop string, where the text ends then): the one that ends first, of several the first in the list."""
        found: tuple[int, str, int] | None = None
        for stop in self.stop:
            at = text.find(stop, max(0, before - len(stop) + 1))
            if at >= 0 and (found is None or at + len(stop) < found[0]):
                found = at + len(stop), stop, at + len(stop) if self.include_stop else at
        return None if found is None else (found[1], found[2])

    def script(self, path: str, body: dict[str, Any]) -> Scripted | None:
        """Return a FakeEngine's script: the answer from its start, or from the prompt's end. Fails if the prompt
        is no beginning of the answer."""
        chat = path.endswith("/chat/completions")
        given = byte_tokens(body)
        done = 0 if chat or isinstance(body["prompt"], str) else len(given) - len(self.prompt)
        assert done >= 0
        assert given[len(given) - done :] == list(range(FIRST_ID, FIRST_ID + done)), "not this answer"
        events = self.events(chat=chat, asked_ids=bool(body.get("return_token_ids")), done_tokens=done, prompt=given)
        return Scripted(events=[msgspec.json.decode(event[6:]) for event in events])
