"""Recent decisions, times to first byte and cache hits, for the operations page.

Bounded in number, without prompts, answers or tenants. Recording costs an append; everything else is computed when the
page is requested.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import msgspec

from spillway_gateway.fleet.last_hour import LastHour
from spillway_gateway.routing.fleet_view import HeldPrefix
from spillway_gateway.routing.route import Decision

DECISIONS_MAX = 200
FIRST_BYTES_MAX = 2_048
CONTINUATIONS_MAX = 2_048
REQUEST_ID_CHARS_MAX = 64


class NotedDecision(msgspec.Struct, frozen=True, gc=False):
    """A routing decision and its request."""

    at: float  # time()
    model: str
    request_id: bytes
    decision: Decision


class NotedFirstByte(msgspec.Struct, frozen=True, gc=False):
    """The time to first byte of one request."""

    at: float  # time()
    model: str
    engine: str
    seconds: float


class NotedContinuation(msgspec.Struct, frozen=True, gc=False):
    """An answer that went on from another engine, and the pause that its client saw."""

    at: float  # time()
    model: str
    seconds: float


class PromptTokens:
    """Prompt tokens of the requests that were sent, by the tier in which routing expected them. Since the start.

    expected, reported: of the requests whose reply says how many were cached, those that routing expected to be, and
    those that the engine says were; the same by minute in last_hour.
    """

    __slots__ = ("computed", "cpu", "device", "expected", "last_hour", "reported", "shared")

    def __init__(self) -> None:
        self.device = self.cpu = self.shared = self.computed = self.expected = self.reported = 0
        self.last_hour = LastHour()

    def add(self, decision: Decision) -> None:
        held = decision.held
        self.device += held.device_tokens
        self.cpu += held.cpu_tokens
        self.shared += held.shared_tokens
        self.computed += decision.uncached_tokens


class Recent:
    """One per gateway. On the event loop only."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self.decisions: deque[NotedDecision] = deque(maxlen=DECISIONS_MAX)
        self.first_bytes: deque[NotedFirstByte] = deque(maxlen=FIRST_BYTES_MAX)
        self.continuations: deque[NotedContinuation] = deque(maxlen=CONTINUATIONS_MAX)
        self.prompt_tokens: dict[str, PromptTokens] = {}  # by model

    def decided(self, model: str, request_id: bytes, decision: Decision) -> None:
        """Record a decision."""
        self.decisions.append(NotedDecision(self._clock(), model, request_id[:REQUEST_ID_CHARS_MAX], decision))
        self._tokens_of(model).add(decision)

    def reported(self, model: str, held: HeldPrefix, cached_tokens: int) -> None:
        """An engine reported how many tokens of a prompt were cached. held: those that routing expected."""
        tokens = self._tokens_of(model)
        tokens.expected += held.total_tokens
        tokens.reported += cached_tokens
        tokens.last_hour.add(self._clock(), held, cached_tokens)

    def _tokens_of(self, model: str) -> PromptTokens:
        tokens = self.prompt_tokens.get(model)
        if tokens is None:
            tokens = self.prompt_tokens[model] = PromptTokens()
        return tokens

    def first_byte(self, model: str, engine: str, seconds: float) -> None:
        """Record a time to first byte, in seconds."""
        self.first_bytes.append(NotedFirstByte(self._clock(), model, engine, seconds))

    def continued(self, model: str, seconds: float) -> None:
        """Record a continuation. seconds: from the failure to the next event."""
        self.continuations.append(NotedContinuation(self._clock(), model, seconds))
