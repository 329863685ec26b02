"""The request that continues an answer on another engine, and its events as the client's own. Pure.

An engine continues by /v1/completions, with the prompt and the answer so far as token ids. Reasoning and tool parsers
do not run there, and what vLLM counts from a request's start (penalties, min_tokens, a seed, a grammar's state) starts
again, so requests with any of it are not continued. Members of the body that are not known here exclude it too.
"""

from __future__ import annotations

from typing import Any

import msgspec

from spillway_gateway.upstream.continuation.junction import Junction, StopsAcross, held_back
from spillway_gateway.upstream.continuation.sent_answer import Chunk, SentAnswer, decode_chunk, failure_of
from spillway_gateway.upstream.forward import Body
from spillway_gateway.upstream.usage import UNSAID_REPLY_TOKENS, count
from spillway_settings.wire import SESSION_MEMBER

PATH = b"/v1/completions"
BODY_BYTES_MAX = 4 * 1024 * 1024  # decoded at once when an engine has failed
STOP_CHARS_MAX = 1024
# With the same meaning in both routes, and counted from no request's start. repetition_penalty counts the prompt's
# tokens as it does the answer's.
_PASSED = frozenset(
    {
        "model",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
        "ignore_eos",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "logit_bias",
        "allowed_token_ids",
        "priority",
        "cache_salt",
        "user",
    }
)
# Members that made the prompt (which is known by its ids), and members that no engine reads.
_SPENT = frozenset(
    {
        "messages",
        "prompt",
        "stream",
        "stream_options",
        "max_tokens",
        "max_completion_tokens",
        "add_generation_prompt",
        "add_special_tokens",
        "continue_final_message",
        "chat_template",
        "chat_template_kwargs",
        "documents",
        "reasoning_effort",
        "include_reasoning",
        "parallel_tool_calls",
        "tool_choice",
        "length_penalty",
        "request_id",
        "return_token_ids",
        "truncation_side",
        "store",
        "metadata",
        "service_tier",
        "prompt_cache_key",
        "safety_identifier",
        "verbosity",
    }
)
# Values that change nothing, besides null, false and what is empty.
_HARMLESS: dict[str, object] = {
    "n": 1,
    "best_of": 1,
    "response_format": {"type": "text"},
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "min_tokens": 0,
    "top_logprobs": 0,
}


class NotContinuable(Exception):
    """The request cannot be continued; the message names what of it excludes that."""


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Plan(msgspec.Struct, frozen=True):
    """The members of a request's body that its continuations need. members: passed unchanged. tokens_max: of the
    answer; None: all that the model's length leaves."""

    members: dict[str, msgspec.Raw]
    stop: tuple[str, ...]
    include_stop: bool
    tokens_max: int | None
    options: StreamOptions

    @property
    def held_back(self) -> int:
        return held_back(self.stop, self.include_stop)


_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_value = msgspec.json.decode


def plan_of(body: Body, *, chat: bool) -> Plan:
    """body: The body that the first engine got. Raises NotContinuable."""
    if len(body) > BODY_BYTES_MAX:
        raise NotContinuable("its length")
    try:
        members = _members(body)
        for name, raw in members.items():
            if name not in _PASSED and name not in _SPENT:
                value = _value(raw)
                if name == "kv_transfer_params" and _is_session_alone(value):
                    continue
                harmless = value in (None, "", [], {}) or value is False or value == _HARMLESS.get(name)
                if not harmless and not (name == "tools" and _value(members.get("tool_choice", b"null")) == "none"):
                    raise NotContinuable(name)
        prompt = _value(members["messages" if chat else "prompt"])
        if not (all(map(_is_text, prompt)) if chat else _is_one_prompt(prompt)):
            raise NotContinuable("messages" if chat else "prompt")
        stop = _optional(members, "stop", str | list[str]) or []
        tokens_max = _optional(members, "max_tokens", int)
        if chat:
            tokens_max = _optional(members, "max_completion_tokens", int) or tokens_max
        elif "max_tokens" not in members:
            tokens_max = UNSAID_REPLY_TOKENS
        elif tokens_max is None:  # which one version reads as the default and another as no bound
            raise NotContinuable("max_tokens")
        plan = Plan(
            {name: raw for name, raw in members.items() if name in _PASSED or name == "kv_transfer_params"},
            (stop,) if isinstance(stop, str) else tuple(stop),
            bool(_optional(members, "include_stop_str_in_output", bool)),
            tokens_max,
            _optional(members, "stream_options", StreamOptions) or StreamOptions(),
        )
    except (msgspec.MsgspecError, RecursionError, KeyError, AttributeError, TypeError) as error:
        raise NotContinuable("its shape") from error
    if any(len(text) > STOP_CHARS_MAX or not text for text in plan.stop):
        raise NotContinuable("stop")
    return plan


def _optional(members: dict[str, msgspec.Raw], name: str, kind: Any) -> Any:
    raw = members.get(name)
    return None if raw is None else msgspec.json.decode(raw, type=kind | None)


def _is_session_alone(params: object) -> bool:
    """Whether the member holds only what the gateway itself puts there; a client's part may steer one engine's
    transfers."""
    return isinstance(params, dict) and params.keys() == {SESSION_MEMBER}


def _is_one_prompt(prompt: object) -> bool:
    return isinstance(prompt, str) or (isinstance(prompt, list) and all(isinstance(token, int) for token in prompt))


def _is_text(message: dict[str, Any]) -> bool:
    content = message.get("content")
    return not isinstance(content, list) or all(
        isinstance(part, str) or (isinstance(part, dict) and part.get("type") in ("text", "refusal"))
        for part in content
    )


def body_of(plan: Plan, sent: SentAnswer, kept_tokens: int, tokens_left: int) -> bytes:
    """The body for the engine that continues. kept_tokens: of the answer, which the prompt then ends with. tokens_left:
    that may follow them; vLLM 0.30 and newer read null as 16."""
    prompt = sent.prompt
    if kept_tokens:
        prompt += b"," + ",".join(map(str, sent.tokens[:kept_tokens])).encode()
    members = b"".join(msgspec.json.encode(name) + b":" + bytes(raw) + b"," for name, raw in plan.members.items())
    return (
        b'{"prompt":['
        + prompt
        + b"],"
        + members
        + b'"max_tokens":%s,"stream":true,"stream_options":{"include_usage":true},"return_token_ids":true}'
        % (b"%d" % tokens_left)
    )


class Shape:
    """Events of one answer in the form in which its first engine sent them."""

    def __init__(self, sent: SentAnswer, options: StreamOptions) -> None:
        assert sent.envelope is not None
        self._sent = sent
        first = sent.envelope
        self._document = {"id": first.id, "object": first.object, "created": first.created, "model": first.model}
        self._continuous = sent.continuous_usage
        self._usage_at_end = (bool(options.include_usage) or sent.continuous_usage) and not sent.usage_sent
        self._prompt_tokens = sent.prompt_tokens

    def chunk(
        self, text: str, tokens: int, finish_reason: str | None, stop_reason: int | str | None, fingerprint: str | None
    ) -> bytes:
        """tokens: the number of tokens of the answer so far."""
        end: dict[str, Any] = {"logprobs": None, "finish_reason": finish_reason}
        if not self._sent.chat:
            choice = {"index": 0, "text": text, **end, "stop_reason": stop_reason, "prompt_token_ids": None}
        elif finish_reason is None:
            choice = {"index": 0, "delta": {"content": text}, **end}
        else:
            choice = {"index": 0, "delta": {"content": text}, **end, "stop_reason": stop_reason}
        document = {**self._document, "choices": [{**choice, "token_ids": None}]}
        if fingerprint is not None:
            document["system_fingerprint"] = fingerprint
        if self._continuous:
            document["usage"] = self.usage(tokens)
        return _event(document)

    def end(self, tokens: int, fingerprint: str | None = None) -> bytes:
        """Return the end after the last chunk: the usage if the client asked for it, and [DONE]."""
        if not self._usage_at_end:
            return b"data: [DONE]\n\n"
        document = {**self._document, "choices": [], "usage": self.usage(tokens)}
        if fingerprint is not None:
            document["system_fingerprint"] = fingerprint
        return _event(document) + b"data: [DONE]\n\n"

    def usage(self, tokens: int) -> dict[str, int]:
        """The usage of the whole answer, as if one engine had made it."""
        prompt = self._prompt_tokens
        return {"prompt_tokens": prompt, "total_tokens": prompt + tokens, "completion_tokens": tokens}


class ContinuedEvents:
    """The events of an engine that continues an answer, read and written again as the client's.

    cached_tokens: as that engine reports them, None before. done: nothing follows. failure: as SentAnswer's.
    """

    def __init__(self, plan: Plan, sent: SentAnswer, junction: Junction) -> None:
        """Cuts `sent` at the junction."""
        sent.cut(junction.tokens)
        before = junction.withheld
        if plan.include_stop and (begun_max := max(map(len, plan.stop), default=1) - 1):
            before = sent.sent_text()[-begun_max:]
        self._sent = sent
        self._shape = Shape(sent, plan.options)
        self._stops = StopsAcross(plan.stop, include_stop=plan.include_stop, before=before)
        self._include = plan.include_stop
        self._unsent: list[list[int]] = []  # noted once the client has text of it
        self._tokens = junction.tokens
        self._fingerprint: str | None = None
        self.cached_tokens: int | None = None
        self.done = False
        self.failure: str | None = None

    def take(self, events: bytes) -> bytes:
        """Whole events of the engine; returns the client's, up to a failure. Raises ValueError for what is no chunk."""
        parts = []
        for event in events.split(b"\n\n"):
            if not event.startswith(b"data: ") or self.done:
                continue  # a comment, or the blank after the last event
            data = event[len(b"data: ") :]
            if data == b"[DONE]":
                if not self._sent.finished:
                    self.failure = "it ended the reply without a finish reason"
                    break
                parts.append(self._shape.end(self._tokens, self._fingerprint))
                self.done = True
                break
            chunk = decode_chunk(data)
            self.failure = failure_of(chunk) or (None if chunk.error is None else "it refused to continue")
            if self.failure is not None:
                break
            parts.append(self._take_chunk(chunk))
        return b"".join(parts)

    @property
    def tokens(self) -> int:
        """The tokens of the whole answer so far."""
        return self._tokens

    def _take_chunk(self, chunk: Chunk) -> bytes:
        if chunk.usage is not None:
            details = chunk.usage.get("prompt_tokens_details")
            self.cached_tokens = count(details.get("cached_tokens")) if isinstance(details, dict) else None
        if not chunk.choices:
            self._fingerprint = chunk.system_fingerprint
            return b""
        choice = chunk.choices[0]
        ids, finish, stop_reason = choice.token_ids or [], choice.finish_reason, choice.stop_reason
        self._tokens += len(ids)
        by = stop_reason if isinstance(stop_reason, str) else None
        text, stop = self._stops.feed(choice.text or "", finished=finish is not None, stopped_by=by)
        self._note(ids, text)
        if stop is not None:
            finish, stop_reason = "stop", stop
        if finish is not None:
            self._sent.finished = True
        shown = self._shape.chunk(text, self._tokens, finish, stop_reason, chunk.system_fingerprint)
        if stop is not None and choice.finish_reason is None:  # the engine would go on
            self.done = True
            shown += self._shape.end(self._tokens)
        return shown

    def _note(self, ids: list[int], text: str) -> None:
        """Note what the client has. Text that is kept back for a stop string is not noted: after another failure it is
        made once more."""
        if self._stops.open and not self._include:
            self._unsent.append(ids)
            return
        for earlier in self._unsent:
            self._sent.note(earlier, "")
        self._unsent.clear()
        self._sent.note(ids, text)


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(document) + b"\n\n"
