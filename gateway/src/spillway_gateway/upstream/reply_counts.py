"""The tokens that one request's reply takes of its tenant's limits: the engine's counts if they are possible, and
estimates for what it does not count."""

from __future__ import annotations

import math

from spillway_gateway.error_bodies import Dialect
from spillway_gateway.fleet.engine import Engine
from spillway_gateway.upstream.outbound import OutboundRequest
from spillway_gateway.upstream.sse import count_events
from spillway_gateway.upstream.usage import (
    COUNT_MAX,
    NO_USAGE,
    ReplyUsage,
    Usage,
    merged,
    usage_in_events,
    usage_in_reply,
    within,
)

BYTES_PER_TOKEN = 4  # of a plain reply without usage
LENGTH_MAX = 1 << 24  # tokens of prompt and answer, if the engine does not say
TURNS_MAX = 64  # of a response whose tools the engine calls itself: its counts are of all turns
ABANDONED_TOKENS_PER_SECOND = 100  # of one answer


class ReplyCounts:
    """Counts of one request, over all its attempts."""

    __slots__ = ("_bytes", "_events", "_given_up", "_reader", "_request", "_streams", "_usage")

    def __init__(self, request: OutboundRequest) -> None:
        self._request = request
        self._usage: Usage | None = None
        self._reader: ReplyUsage | None = None  # of a reply or an event in parts
        self._events = 0
        self._bytes = 0
        self._given_up: int | None = None  # tokens of a reply that its client did not wait for
        self._streams = False  # the reply is a stream of events

    def begin_attempt(self, *, streams: bool) -> None:
        """An engine has begun its reply. streams: by events."""
        self._streams = streams
        self._reader = None

    @property
    def reported(self) -> Usage | None:
        """The usage that the engine has reported; None if it has reported none."""
        return self._usage

    @property
    def usage(self) -> Usage:
        """Completion tokens that no engine counts are those of the events, which hold one or a few each, or of a plain
        reply's bytes, or what an abandoned reply may have had."""
        usage = self._usage or NO_USAGE
        if usage.completion_tokens is not None or not self._request.computes:
            return usage
        if self._streams:
            return usage._replace(completion_tokens=self._events)
        if self._given_up is not None:
            return usage._replace(completion_tokens=self._given_up)
        if self._bytes and self._request.reply_tokens_max != 0:
            return usage._replace(completion_tokens=self._bytes // BYTES_PER_TOKEN)
        return usage

    def read_events(self, engine: Engine, events: bytes) -> None:
        """Whole events that are sent to the client."""
        self._events += count_events(events)
        if (usage := usage_in_events(events)) is not None:
            self._add(engine, usage)

    def read_plain(self, engine: Engine, body: bytes) -> None:
        """A whole reply."""
        self._bytes = len(body)
        if (usage := usage_in_reply(body)) is not None:
            self._add(engine, usage)

    def read_part(self, engine: Engine, body: bytes) -> None:
        """The next part of a long plain reply, or of a long event."""
        if self._reader is None:
            self._reader = ReplyUsage()
        self._reader.feed(body)
        self._bytes += len(body)
        if self._reader.usage is not None:
            self._add(engine, self._reader.usage)

    def continued(self, passed: bytes, usage: Usage) -> None:
        """Events of an engine that continues an answer. usage: of the whole answer so far."""
        self._events += count_events(passed)
        self._usage = within(usage, COUNT_MAX, COUNT_MAX)

    def abandoned(self, engine: Engine, seconds: float) -> None:
        """The count for a client that left before a plain reply was complete, of which the engine reports nothing: the
        length that the request asked for, or without one the length that its answers may have after this number of
        seconds."""
        request = self._request
        most = request.reply_tokens_max
        if most is None:
            most = request.choices * math.ceil(ABANDONED_TOKENS_PER_SECOND * seconds)
        self._given_up = min(most, request.choices * _length(engine), COUNT_MAX)

    def _add(self, engine: Engine, usage: Usage) -> None:
        request = self._request
        if not request.computes:
            return
        length = _length(engine)
        turns = TURNS_MAX if request.dialect is Dialect.RESPONSES else 1
        # Every token of text has a byte of the body, and a prompt of anything else is one within the model's length.
        prompt_tokens_max = turns * length + len(request.body)
        usage = within(usage, prompt_tokens_max, turns * length * request.choices)
        usage = merged(self._usage, usage)
        self._usage = within(usage, prompt_tokens_max, COUNT_MAX)


def _length(engine: Engine) -> int:
    return engine.prompt_tokens_max or LENGTH_MAX
