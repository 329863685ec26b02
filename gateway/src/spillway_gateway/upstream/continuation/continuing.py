"""Whether and how one request goes on after its engine has failed: attempts, engines, the answer so far, and what the
engine that continues it is sent.

Pure but for `join`, which asks that engine, by a function of its caller, for the text of some tokens.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import msgspec

from spillway_gateway.config.settings import ContinuationConfig
from spillway_gateway.errors import EngineBadReply, UpstreamError
from spillway_gateway.fleet.engine import Engine
from spillway_gateway.fleet.model_fleet import ModelFleet
from spillway_gateway.routing.prefix import PromptBlocks
from spillway_gateway.upstream.continuation import continued_events
from spillway_gateway.upstream.continuation.continued_events import (
    ContinuedEvents,
    NotContinuable,
    Plan,
    Shape,
    plan_of,
)
from spillway_gateway.upstream.continuation.junction import Junction, joined, known_junction, pieces
from spillway_gateway.upstream.continuation.sent_answer import KeptBytes, SentAnswer
from spillway_gateway.upstream.outbound import OutboundRequest
from spillway_gateway.upstream.retry import RetryBudget

CHAT_PATH = b"/v1/chat/completions"
DETOKENIZE_PATH = b"/detokenize"

Ask = Callable[[OutboundRequest], Awaitable[tuple[int, bytes]]]  # an engine's status and short reply


class NotJoined(Exception):
    """The text of the answer's tokens is not what the client has; the answer ends."""


class _Text(msgspec.Struct):
    prompt: str


_read_text = msgspec.json.Decoder(_Text).decode


class Continuing:
    """The answer to one request that may be continued, from its first event on.

    why_not: the metric's label for an answer that ended. failure: the one that is being bridged, or was bridged last.
    """

    __slots__ = ("_attempts", "_broke", "_config", "_fleet", "_plan", "_request", "_sent", "failure", "why_not")

    def __init__(
        self, request: OutboundRequest, fleet: ModelFleet, config: ContinuationConfig, kept: KeptBytes
    ) -> None:
        self._request = request
        self._fleet = fleet
        self._config = config
        self._plan: Plan | None = None
        self._attempts = 0
        self._broke: frozenset[str] = frozenset()  # engines that broke this answer
        self._sent = SentAnswer(kept, chat=request.path == CHAT_PATH, tokens_max=config.tokens_max)
        self.failure: UpstreamError | None = None
        self.why_not = ""

    @property
    def stall_seconds(self) -> float:
        return self._config.stall_seconds

    @property
    def pause_seconds(self) -> float:
        return self._config.pause_seconds

    @property
    def prompt_tokens(self) -> int:
        return self._sent.prompt_tokens

    @property
    def tokens(self) -> int:
        """The number of tokens of the answer that the client has."""
        return len(self._sent.tokens)

    @property
    def complete(self) -> bool:
        """Whether no engine is needed: the client has every token."""
        return self._sent.finished

    def take(self, events: bytes, engine: Engine) -> tuple[bytes, str | None]:
        """Whole events of the engine that began the answer: as the client gets them, and the failure behind them that
        another engine can make good."""
        sent = self._sent
        passed = sent.take(events)
        if sent.failure is None:
            return passed, None
        failure, held = sent.take_failure()
        if self.possible(engine):
            return passed, failure
        sent.lose("failed")
        return passed + held, None

    def possible(self, engine: Engine, tried: frozenset[str] = frozenset()) -> bool:
        """Whether the answer can go on without this engine. Reads the body the first time."""
        if self._sent.lost is None and self._plan is None:
            try:
                self._plan = plan_of(self._request.body, chat=self._sent.chat)
            except NotContinuable:
                self._sent.lose("request")
        if self._sent.lost is not None:
            self.why_not = self._sent.lost
        elif self._sent.envelope is None:
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

    def after(
        self,
        failure: UpstreamError,
        engine: Engine,
        tried: frozenset[str],
        budget: RetryBudget,
        *,
        first: bool,
        overdue: bool,
    ) -> frozenset[str] | None:
        """The engines to leave out next; None if the answer ends.

        first: a failure of its own, not of an attempt to bridge one. overdue: the time for bridging is over.
        """
        if overdue:
            self.why_not = "pause"
            return None
        if first:
            self.failure, tried = failure, frozenset()
        self._broke |= engine.same_process
        if not self.possible(engine, tried):
            return None
        if not self.complete and not budget.spend(failure):
            self.why_not = "retry_budget"
            return None
        # An engine that broke this answer earlier gets it again if there is no other.
        return self._broke if self._others(self._broke) else tried | engine.same_process

    def _others(self, left_out: frozenset[str]) -> bool:
        return any(engine.routable and name not in left_out for name, engine in self._fleet.engines.items())

    def prompt(self) -> PromptBlocks:
        """The prompt for the choice of an engine: the request's own blocks, and the answer's tokens as work."""
        prompt = self._request.prompt
        return msgspec.structs.replace(prompt, prompt_tokens=prompt.prompt_tokens + self.tokens)

    async def join(self, engine: Engine, ask: Ask) -> tuple[OutboundRequest, ContinuedEvents]:
        """The request for the engine that goes on, and what reads its events. Raises NotJoined if the place to go on
        from is not known, or no token is left, or how many are left is not known."""
        self._attempts += 1
        sent, plan = self._sent, self._known_plan
        junction = known_junction(sent, plan.held_back) or await self._decoded_junction(engine, ask)
        tokens_max = plan.tokens_max
        if tokens_max is None:
            length_max = engine.prompt_tokens_max
            tokens_max = 0 if length_max is None else length_max - sent.prompt_tokens
        if junction.tokens >= tokens_max:
            raise NotJoined
        body = continued_events.body_of(plan, sent, junction.tokens, tokens_max - junction.tokens)
        events = ContinuedEvents(plan, sent, junction)
        return msgspec.structs.replace(self._request, path=continued_events.PATH, body=body), events

    async def _decoded_junction(self, engine: Engine, ask: Ask) -> Junction:
        """Find the junction by the text that the engine gives for the last tokens."""
        sent, withheld_chars = self._sent, self._known_plan.held_back
        for piece in pieces(sent, withheld_chars):
            text = await self._text_of(sent.tokens[piece.start : piece.end], engine, ask)
            junction = joined(piece, text, sent.sent_text(), withheld_chars)
            if junction is not None:
                return junction
        raise NotJoined

    async def _text_of(self, tokens: Sequence[int], engine: Engine, ask: Ask) -> str:
        model = bytes(self._known_plan.members.get("model", b"null"))
        body = b'{"model":%s,"tokens":%s}' % (model, msgspec.json.encode(list(tokens)))
        request = msgspec.structs.replace(self._request, path=DETOKENIZE_PATH, body=body, stream=False)
        status, reply = await ask(request)
        try:
            return _read_text(reply).prompt
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise EngineBadReply(f"Engine {engine.name} answered {status} to {DETOKENIZE_PATH.decode()}") from error

    def last_events(self) -> bytes:
        """The events that the client lacks of a complete answer."""
        return Shape(self._sent, self._known_plan.options).end(self.tokens)

    def close(self) -> None:
        """The request has ended: give back the room of its token ids."""
        self._sent.close()

    @property
    def _known_plan(self) -> Plan:
        assert self._plan is not None
        return self._plan
