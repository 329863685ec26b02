"""The part of a streamed answer that the client has: tokens of its prompt and of the answer, the end of its text.

The gateway asks engines for token ids (`return_token_ids`) and takes them out again, so that the client gets the bytes
that it would get without: vLLM writes `null` there. Usual events are recognised by one regular expression; all others
are parsed.
"""

from __future__ import annotations

import re
from array import array
from collections import deque
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from spillway_gateway.upstream.answers import is_engines_fault, message_in

TEXTS_MAX = 48  # chunks with text that are kept, the last ones
GROWTH_TOKENS = 1024  # between two requests for room
_TOKEN_BYTES = 4
_TEXT = rb'"([^"\\]*+(?:\\.[^"\\]*+)*+)"'
# What vLLM 0.23 to 0.32 write for one more token of one choice.
_USUAL = {
    True: re.compile(
        rb'"delta":\{"content":' + _TEXT + rb'\},"logprobs":null,"finish_reason":null,"token_ids":(\[(\d{1,9})\])'
    ),
    False: re.compile(
        rb'"text":' + _TEXT + rb',"logprobs":null,"finish_reason":null,"stop_reason":null,'
        rb'"prompt_token_ids":null,"token_ids":(\[(\d{1,9})\])'
    ),
}
# Quotes inside a JSON string are escaped, so generated text is never taken for one of these.
_PROMPT_IDS = re.compile(rb'("prompt_token_ids":\s*)\[([^\]]*+)\]')
_IDS = re.compile(rb'("token_ids":\s*)\[([^\]]*+)\]')
_NOTHING = re.compile(rb'"delta":\s*\{\}').search  # with _UNFINISHED: a chunk that is sent only for its ids
_UNFINISHED = re.compile(rb'"finish_reason":\s*null').search
_DATA = b"data: "
_DONE = b"[DONE]"


class KeptBytes:
    """The bound on the memory of the token ids of all streams together, in bytes. bytes_max: reads the bound, which may
    change. On the event loop."""

    __slots__ = ("_bytes_max", "taken")

    def __init__(self, bytes_max: Callable[[], int]) -> None:
        self._bytes_max = bytes_max
        self.taken = 0

    def take(self, more: int) -> bool:
        """Take room. Returns False, and takes nothing, if that would exceed the bound."""
        if self.taken + more > self._bytes_max():
            return False
        self.taken += more
        return True

    def give(self, back: int) -> None:
        self.taken -= back


TokenId = Annotated[int, Meta(ge=0, lt=1 << 32)]  # what an array of unsigned numbers takes


class Choice(msgspec.Struct):
    """A choice of a chunk; text: of completions, delta: of chat."""

    index: int = 0
    delta: dict[str, Any] | None = None
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[TokenId] | None = None


class Chunk(msgspec.Struct):
    """One event of an engine."""

    id: str = ""
    object: str = ""
    created: int = 0
    model: str = ""
    choices: list[Choice] = []
    usage: dict[str, Any] | None = None
    system_fingerprint: str | None = None
    error: dict[str, Any] | None = None


decode_chunk = msgspec.json.Decoder(Chunk).decode
_decode_text = msgspec.json.Decoder(str).decode


class Text(msgspec.Struct, frozen=True, gc=False):
    """A chunk that had text. end: how many tokens of the answer there were with it. alone: it came with one token."""

    end: int
    json: bytes  # between the quotes
    alone: bool


class SentAnswer:
    """The answer sent on one stream. On the event loop.

    prompt: the prompt's token ids as JSON without brackets; empty before the first event. tokens: of the answer.
    envelope: the first event, for its id, model and time. lost: why the answer cannot be continued, None while it can.
    failure: the engine's message or end that `take` found; the event that holds it and all after it are in `held`.
    finished: the client has the last token and its finish reason. usage_sent: and the usage after it. continuous_usage:
    chunks report usage.
    """

    __slots__ = (
        "_grow_at",
        "_kept",
        "_kept_bytes",
        "_tokens_max",
        "_usual",
        "chat",
        "continuous_usage",
        "envelope",
        "failure",
        "finished",
        "held",
        "lost",
        "prompt",
        "texts",
        "tokens",
        "usage_sent",
    )

    def __init__(self, kept: KeptBytes, *, chat: bool, tokens_max: int) -> None:
        """kept: The room for tokens, which all streams share. tokens_max: The bound of prompt and answer together."""
        self.chat = chat
        self._usual = _USUAL[chat].search
        self._kept = kept
        self._kept_bytes = 0
        self._tokens_max = tokens_max
        self._grow_at = 0
        self.prompt = b""
        self.tokens = array("I")
        self.texts: deque[Text] = deque(maxlen=TEXTS_MAX)
        self.envelope: Chunk | None = None
        self.lost: str | None = None
        self.failure: str | None = None
        self.held = b""
        self.finished = False
        self.usage_sent = False
        self.continuous_usage = False

    @property
    def prompt_tokens(self) -> int:
        return self.prompt.count(b",") + 1 if self.prompt else 0

    def take(self, events: bytes) -> bytes:
        """Whole events of the engine that began the answer; returns them as the client gets them, up to a failure."""
        if events.count(b"\n\n") == 1 and (found := self._usual(events)) is not None and self.lost is None:
            start, end = found.span(2)
            tokens = self.tokens
            tokens.append(int(found[3]))
            if found.end(1) > found.start(1):
                self.texts.append(Text(len(tokens), found[1], True))
            if len(tokens) >= self._grow_at:
                self._grow()
            return events[:start] + b"null" + events[end:]
        if self.lost is not None:
            return self._stripped(events)
        parts = []
        at = 0
        while at < len(events):
            end = events.find(b"\n\n", at)
            end = len(events) if end < 0 else end + 2
            event = events[at:end]
            passed = self._take_one(event)
            if self.failure is not None:
                self.held = events[at:]
                break
            parts.append(passed)
            at = end
        return b"".join(parts)

    def take_failure(self) -> tuple[str, bytes]:
        """The failure that `take` found, and the events from the one that holds it on."""
        assert self.failure is not None
        failure, self.failure = self.failure, None
        return failure, self.held

    def note(self, ids: list[int], text: str) -> None:
        """Tokens and text that the client has from an engine that continues the answer."""
        self.tokens.extend(ids)
        if text:
            self.texts.append(Text(len(self.tokens), msgspec.json.encode(text)[1:-1], len(ids) == 1))
        if len(self.tokens) >= self._grow_at:
            self._grow()

    def cut(self, tokens: int) -> None:
        """Forget the tokens from this one on: the client has no text of them, and another engine makes them again."""
        del self.tokens[tokens:]
        if self.texts:
            last = self.texts.pop()
            self.texts.append(Text(min(last.end, tokens), last.json, True))

    def sent_text(self) -> str:
        """The end of the client's text: all chunks that are kept."""
        return "".join(_decode_text(b'"' + text.json + b'"') for text in self.texts)

    def lose(self, why: str) -> None:
        """The answer cannot be continued. Ids are still taken out of its events."""
        if self.lost is None:
            self.lost = why
        self.close()

    def close(self) -> None:
        """Give the room back."""
        self._kept.give(self._kept_bytes)
        self._kept_bytes = 0
        self.prompt = b""
        self.tokens = array("I")
        self.texts.clear()

    # -- parsing -----------------------------------------------------------------------------------------------------

    def _stripped(self, events: bytes) -> bytes:
        """Events of an answer that cannot be continued."""
        kept = [event for event in events.split(b"\n\n") if not (_NOTHING(event) and _UNFINISHED(event))]
        return _without_ids(_without_prompt(b"\n\n".join(kept)))

    def _take_one(self, event: bytes) -> bytes:
        if self.lost is not None:
            return self._stripped(event)
        if not event.startswith(_DATA):
            return event  # a comment
        if self.envelope is None and (found := _PROMPT_IDS.search(event)) is not None:
            self._began(found[2])
        event = _without_prompt(event)
        shown = _without_ids(event)
        data = event[len(_DATA) :].rstrip()
        if data == _DONE:
            return shown
        try:
            chunk = decode_chunk(data)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
            self.lose("shape")
            return shown
        if (failure := failure_of(chunk)) is not None:
            self.failure = failure
            return b""
        if self.envelope is None:
            self.envelope = chunk
            self.continuous_usage = chunk.usage is not None
            if not self.prompt:
                self.lose("no_token_ids")
        return self._record(chunk, shown)

    def _began(self, prompt: bytes) -> None:
        self.prompt = prompt
        if self.prompt_tokens >= self._tokens_max or not self._reserve(len(prompt)):
            self.lose("tokens")
            return
        self._grow()

    def _record(self, chunk: Chunk, shown: bytes) -> bytes:
        """The event for the client; empty if the engine sends it only because it was asked for ids."""
        if not chunk.choices and chunk.usage is not None:
            self.usage_sent = True
        for choice in chunk.choices:
            ids = choice.token_ids
            if choice.index or (choice.delta is None) is self.chat:
                self.lose("shape")
            elif choice.delta is not None and not choice.delta.keys() <= {"role", "content"}:
                self.lose("parser")  # reasoning or tool calls: what follows is the parser's work
            elif choice.delta == {} and choice.finish_reason is None:
                self.lose("parser")  # which takes tokens without showing them
                return b""
            elif self.lost is None:
                text = choice.text if choice.delta is None else choice.delta.get("content")
                self.note(ids or [], text or "")
            if choice.finish_reason is not None:
                self.finished = True
        return shown

    # -- room --------------------------------------------------------------------------------------------------------

    def _grow(self) -> None:
        """Room for the next tokens."""
        if self.lost is not None:
            return
        tokens = len(self.tokens)
        if self.prompt_tokens + tokens >= self._tokens_max or not self._reserve(GROWTH_TOKENS * _TOKEN_BYTES):
            self.lose("tokens")
            return
        self._grow_at = min(tokens + GROWTH_TOKENS, self._tokens_max - self.prompt_tokens)

    def _reserve(self, bytes_more: int) -> bool:
        if not self._kept.take(bytes_more):
            return False
        self._kept_bytes += bytes_more
        return True


def failure_of(chunk: Chunk) -> str | None:
    """Return why the engine ends an answer that it has not finished: the message of its error event, or an abort."""
    if chunk.error is not None:
        return message_in(chunk.error) if is_engines_fault(chunk.error) else None
    if any(choice.finish_reason == "abort" for choice in chunk.choices):
        return "it aborted the request"
    return None


def _without_prompt(events: bytes) -> bytes:
    return _PROMPT_IDS.sub(rb"\1null", events)


def _without_ids(events: bytes) -> bytes:
    return _IDS.sub(rb"\1null", events)
