"""Whether and how one request goes on after its engine has failed: attempts, the pause, and the answer so far.

Pure but for the clock that callers read.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from spillway_gateway.config.settings import ContinuationConfig
from spillway_gateway.errors import UpstreamError
from spillway_gateway.fleet.engine import Engine
from spillway_gateway.fleet.model_fleet import ModelFleet
from spillway_gateway.routing.prefix import PromptBlocks
from spillway_gateway.upstream import continuation
from spillway_gateway.upstream.continuation import ContinuedEvents, NotContinuable, Plan, Shape, plan_of
from spillway_gateway.upstream.junction import Junction, known_junction
from spillway_gateway.upstream.outbound import OutboundRequest
from spillway_gateway.upstream.sent_answer import KeptBytes, SentAnswer


class NotJoined(Exception):
    """The text of the answer's tokens is not what the client has; the answer ends."""


class Continuing:
    """The state of one request that may be continued, from its first event on.

    why_not: of an answer that ended, a value of the metric's label. failed_at: loop time of the failure that is being
    bridged; None while events come. events: of the engine that continues, None before.
    """

    __slots__ = (
        "_attempts",
        "_broke",
        "_config",
        "_fleet",
        "_plan",
        "_request",
        "events",
        "failed_at",
        "failure",
        "sent",
        "why_not",
    )

    def __init__(
        self, request: OutboundRequest, fleet: ModelFleet, config: ContinuationConfig, kept: KeptBytes, *, chat: bool
    ) -> None:
        self._request = request
        self._fleet = fleet
        self._config = config
        self._plan: Plan | None = None
        self._attempts = 0
        self._broke: frozenset[str] = frozenset()  # engines that broke this answer
        self.sent = SentAnswer(kept, chat=chat, tokens_max=config.tokens_max)
        self.events: ContinuedEvents | None = None
        self.failed_at: float | None = None
        self.failure: UpstreamError | None = None
        self.why_not = ""

    @property
    def stall_seconds(self) -> float:
        return self._config.stall_seconds

    def possible(self, engine: Engine, tried: frozenset[str] = frozenset()) -> bool:
        """Whether the answer can go on without this engine. Reads the body the first time."""
        if self.sent.lost is None and self._plan is None:
            try:
                self._plan = plan_of(self._request.body, chat=self.sent.chat)
            except NotContinuable:
                self.sent.lose("request")
        if self.sent.lost is not None:
            self.why_not = self.sent.lost
        elif self.sent.envelope is None:
            self.why_not = "no_token_ids"
        elif self.complete:
            return True
        elif self._attempts >= self._config.attempts_max:
            self.why_not = "attempts"
        elif not self._others(tried | engine.same_process):
            self.why_not = "no_engine"
        else:
            return True
        return False

    def after(self, failure: UpstreamError, engine: Engine, tried: frozenset[str], now: float) -> frozenset[str] | None:
        """The engines to leave out next; None where the answer ends. now: loop time."""
        if self.failed_at is None:  # a failure of its own, not of an attempt to bridge one
            self.failed_at, self.failure = now, failure
            tried = frozenset()
        elif now - self.failed_at >= self._config.pause_seconds:
            self.why_not = "pause"
            return None
        self._broke |= engine.same_process
        if not self.possible(engine, tried):
            return None
        # An engine that broke this answer earlier gets it again where there is no other.
        return self._broke if self._others(self._broke) else tried | engine.same_process

    def _others(self, left_out: frozenset[str]) -> bool:
        return any(engine.routable and name not in left_out for name, engine in self._fleet.engines.items())

    @property
    def plan(self) -> Plan:
        assert self._plan is not None
        return self._plan

    @property
    def complete(self) -> bool:
        """Whether no engine is needed: the client has every token."""
        return self.sent.finished

    def last_events(self) -> bytes:
        """What the client lacks of a complete answer."""
        return Shape(self.sent, self.plan.options).end(len(self.sent.tokens))

    def prompt(self) -> PromptBlocks:
        """For the choice of an engine: the request's own blocks, and the answer's tokens as work."""
        prompt = self._request.prompt
        return msgspec.structs.replace(prompt, prompt_tokens=prompt.prompt_tokens + len(self.sent.tokens))

    def seconds_left(self, now: float) -> float:
        """The seconds left of the pause. now: loop time."""
        assert self.failed_at is not None
        return max(0.0, self.failed_at + self._config.pause_seconds - now)

    def begin(self) -> None:
        """An attempt on another engine begins."""
        self._attempts += 1

    def known_junction(self) -> Junction | None:
        return known_junction(self.sent, self.plan.held_back)

    def join(self, junction: Junction, length_max: int | None) -> OutboundRequest:
        """The request for the engine that continues from here. length_max: of its prompts and answers together, in
        tokens; None where it did not report it. Raises NotJoined where no token is left, or how many is not known."""
        tokens_max, prompt_tokens = self.plan.tokens_max, self.sent.prompt_tokens
        if tokens_max is None:
            tokens_max = 0 if length_max is None else length_max - prompt_tokens
        if junction.tokens >= tokens_max:
            raise NotJoined
        body = continuation.body_of(self.plan, self.sent, junction.tokens, tokens_max - junction.tokens)
        self.events = ContinuedEvents(self.plan, self.sent, junction)
        return msgspec.structs.replace(self._request, path=continuation.PATH, body=body)

    def text_request(self, tokens: Sequence[int]) -> bytes:
        """Body of /detokenize for these tokens of the answer."""
        model = bytes(self.plan.members.get("model", b"null"))
        return b'{"model":%s,"tokens":%s}' % (model, msgspec.json.encode(list(tokens)))
