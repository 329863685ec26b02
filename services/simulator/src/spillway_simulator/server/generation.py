"""One completion or chat request: from its JSON body to its tokens on the connection."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

import msgspec

from spillway_settings.wire import ENDING_ERROR
from spillway_simulator.model.request import EngineRequest, Progress
from spillway_simulator.server.engine_host import EngineHost
from spillway_simulator.server.faults import DieInStream
from spillway_simulator.server.http_connection import HttpConnection
from spillway_simulator.wire.openai_documents import Completed, Envelope, OpenAiEnvelope, error, usage
from spillway_simulator.wire.tokens import Tokens

_HOLE = "\x00"  # stands for a token's text in a prepared chunk; JSON escapes it
_encode = msgspec.json.Encoder().encode


class BadBody(ValueError):
    """A body this engine does not take; the message names the remedy."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The request that a body makes."""

    prompt: array[int]
    answer_tokens: int
    finish_reason: str
    stream: bool
    include_usage: bool
    salt: str | None
    token_ids: bool


def read_prompt(body: dict[str, Any], tokens: Tokens, *, chat: bool) -> array[int]:
    """Raises BadBody."""
    try:
        if chat:
            messages = body.get("messages")
            if not isinstance(messages, list) or not messages or not all(isinstance(item, dict) for item in messages):
                raise BadBody("'messages': a list of at least one message needed")
            return tokens.chat(body)
        prompt = body.get("prompt")
        if isinstance(prompt, str):
            return tokens.text(prompt)
        if isinstance(prompt, list) and all(type(token) is int and 0 <= token < 1 << 32 for token in prompt):
            return array("I", prompt)
    except (ValueError, TypeError, AttributeError) as reason:
        raise BadBody(str(reason)) from reason
    raise BadBody("'prompt': one text or one list of token ids needed; a simulated engine takes no batches")


def read_asked(body: dict[str, Any], tokens: Tokens, host: EngineHost, *, chat: bool) -> Asked:
    """Raises BadBody."""
    if body.get("n") not in (None, 1):
        raise BadBody(f"'n': {body['n']!r} given, 1 needed; a simulated engine gives one choice")
    prompt = read_prompt(body, tokens, chat=chat)
    if not prompt:
        raise BadBody("the prompt is empty; at least one token needed")
    limit = body.get("max_completion_tokens") or body.get("max_tokens") or body.get("max_output_tokens")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise BadBody(f"'max_tokens': {limit!r} given, a whole number from 1 needed")
    natural = host.settings.answer_tokens
    room = host.settings.max_model_tokens - len(prompt)
    if limit is not None and limit > room:
        raise BadBody(f"'max_tokens': {limit} given, at most {room} fit behind a prompt of {len(prompt)} tokens")
    least = body.get("min_tokens") or 0
    if limit is not None and (body.get("ignore_eos") or limit <= max(natural, least)):
        count, reason = limit, "length"
    else:
        count, reason = max(natural, least if type(least) is int else 0), "stop"
    if limit is None and count > room > 0:
        count, reason = room, "length"
    options = body.get("stream_options")
    include_usage = isinstance(options, dict) and bool(options.get("include_usage"))
    salt = body.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise BadBody("'cache_salt': a non-empty text needed")
    stream = bool(body.get("stream"))
    return Asked(prompt, count, reason, stream, include_usage, salt, stream and bool(body.get("return_token_ids")))


class Generation:
    """Bound to one connection until the last token or until the client goes."""

    def __init__(self, host: EngineHost, connection: HttpConnection, envelope: Envelope, asked: Asked, tokens: Tokens):
        self._host = host
        self._connection = connection
        self._envelope = envelope
        self._asked = asked
        self._tokens = tokens
        self._answer = tokens.answer(asked.prompt, asked.answer_tokens)
        self._sent = 0
        self._death: DieInStream | None = host.faults.death()
        if asked.stream:
            # A token's chunk is the same but for its text, so its JSON is made once.
            before, _, after = envelope.piece(_HOLE).partition(b"\\u0000")
            self._before, self._after = before, after

    def start(self) -> None:
        """Raises RequestTooLong."""
        asked = self._asked
        self._host.submit(EngineRequest(self._envelope.id, asked.prompt, self._answer, asked.salt), self)
        self._connection.on_gone = lambda: self._host.cancel(self._envelope.id)

    def progressed(self, progress: Progress) -> None:
        before = self._sent
        self._sent += progress.tokens
        if self._death is not None and self._sent > self._death.after_tokens:
            self._die(self._death)
            return
        if not self._asked.stream:
            if progress.finished:
                completed = self._completed(progress)
                self._connection.reply(200, self._envelope.whole(completed.answer, completed))
            return
        connection = self._connection
        if progress.first:
            connection.begin_stream()
            begin = self._envelope.begin()
            if begin:
                connection.stream(begin)
        tokens = self._answer[before : self._sent]
        text = self._tokens.decode(tokens)
        if progress.finished:
            connection.end_stream(self._envelope.end(text, tokens, self._completed(progress)))
        elif self._asked.token_ids and isinstance(self._envelope, OpenAiEnvelope):
            connection.stream(self._envelope.piece_with_ids(text, tokens, first=progress.first))
        else:
            connection.stream(self._before + _encode(text)[1:-1] + self._after)

    def drained(self) -> None:
        """End the answers for which a drain leaves no time, as the engine service does."""
        self._connection.on_gone = None
        reason = error("the engine is shutting down and had no time left to finish this request", 503, ENDING_ERROR)
        if self._asked.stream and self._sent:
            self._connection.end_stream(b"data: " + reason + b"\n\n")
        else:
            self._connection.reply(503, reason)

    def _completed(self, progress: Progress) -> Completed:
        asked = self._asked
        counted = usage(len(asked.prompt), asked.answer_tokens, progress.cached)
        return Completed(self._tokens.decode(self._answer), asked.finish_reason, counted, asked.include_usage)

    def _die(self, death: DieInStream) -> None:
        self._host.cancel(self._envelope.id)
        self._connection.on_gone = None
        if death.how == "abort":
            self._connection.kill()
        elif self._asked.stream:
            if death.after_tokens == 0:
                self._connection.begin_stream()
            reason = error("EngineCore encountered an issue (simulated fault)", 500)
            self._connection.end_stream(b"data: " + reason + b"\n\ndata: [DONE]\n\n")
        else:
            self._connection.reply(500, error("EngineCore encountered an issue (simulated fault)", 500))
