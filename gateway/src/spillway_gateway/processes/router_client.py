"""A front's side of the channel: asks the router for places, engines and limits, and reports what became of them."""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from spillway_gateway import errors
from spillway_gateway.access.admission import Admission
from spillway_gateway.access.keys import Priority
from spillway_gateway.errors import GatewayError, GatewayOverloaded, NoEngineReady
from spillway_gateway.fleet.engine import Engine
from spillway_gateway.fleet.model_fleet import Lease, ModelFleet
from spillway_gateway.processes import messages
from spillway_gateway.processes.channel import Channel
from spillway_gateway.processes.messages import Kind, Message
from spillway_gateway.routing.prefix import PromptBlocks, PromptTokens
from spillway_gateway.routing.route import Decision
from spillway_gateway.upstream.outbound import OutboundRequest, Place
from spillway_gateway.upstream.suspects import Fingerprint

Answer = TypeVar("Answer", bound=Message)
Tell = Callable[[Engine, PromptTokens, int], object]

_ERRORS: dict[str, type[GatewayError]] = {
    name: each for name, each in vars(errors).items() if isinstance(each, type) and issubclass(each, GatewayError)
}


class FrontLease(Lease):
    """A lease that the router counts. The methods are reported at the end of the event loop's iteration."""

    __slots__ = ("_expected_prefill_seconds", "_place")

    def __init__(self, place: FrontPlace, engine: Engine, decision: Decision, expected_prefill_seconds: float) -> None:
        self.engine = engine
        self.decision = decision
        self._place = place
        self._expected_prefill_seconds = expected_prefill_seconds
        self._closed = False

    @property
    def expected_prefill_seconds(self) -> float:
        return self._expected_prefill_seconds

    def accepted(self, now: float) -> None:
        self._place.report(Kind.ACCEPTED, now)

    def prefill_assumed(self) -> None:
        self._place.report(Kind.PREFILL_ASSUMED)

    def first_byte(self, now: float, *, measures_prefill: bool) -> None:
        self._place.report(Kind.FIRST_BYTE_MEASURED if measures_prefill else Kind.FIRST_BYTE, now)

    def began(self) -> None:
        self._place.report(Kind.BEGAN)

    def succeeded(self) -> None:
        self._place.report(Kind.SUCCEEDED)

    def failed(self, now: float) -> None:
        self._place.report(Kind.FAILED, now)

    def close(self, now: float | None = None) -> None:
        if self._closed:
            return
        self._closed = True
        self._place.report(Kind.CLOSED if now is None else Kind.CLOSED_WHOLE, now or 0.0)


class FrontPlace:
    """A request's place, which the router counts."""

    __slots__ = ("_deferred", "_events", "_first", "_left", "_router", "fleet", "number", "request")

    def __init__(self, router: RouterClient, fleet: ModelFleet, request: OutboundRequest) -> None:
        self._router = router
        self.fleet = fleet
        self.request = request
        self.number = router.number()
        self._events: list[tuple[Kind, float]] = []
        self._deferred = False
        self._left = False
        self._first: Lease | None = None  # until it is asked for

    async def enter(self) -> None:
        """Ask for the place and an engine at once."""
        self._first = await self._route(self.request.prompt, frozenset(), first=True)

    async def choose(self, prompt: PromptBlocks, tried: frozenset[str]) -> Lease:
        first, self._first = self._first, None
        if first is not None and not tried and prompt is self.request.prompt:
            return first
        if first is not None:
            first.close()
        self.tell()
        return await self._route(prompt, tried, first=False)

    async def _route(self, prompt: PromptBlocks, tried: frozenset[str], *, first: bool) -> Lease:
        request = self.request
        session = request.session
        asked = messages.Route(
            self.number,
            first,
            self.fleet.name,
            request.tenant,
            request.priority if prompt is request.prompt else Priority.HIGH,  # the client has a part of its answer
            request.request_id,
            _keys(prompt.keys),
            prompt.tokens_per_block,
            prompt.prompt_tokens,
            prompt.spread_key,
            {size: _keys(keys) for size, keys in prompt.other_keys.items()},
            tuple(tried),
            request.only_engine,
            session.digest if session is not None else None,
            request.adapter,
            first and prompt.tokens is not None,
            request.trace is not None,
        )
        routed = await self._router.ask(asked, messages.Routed)
        engine = self.fleet.engines.get(routed.engine)
        if engine is None:  # a configuration that takes it away has come meanwhile
            raise NoEngineReady(self.fleet.unavailable_message(tried))
        decision = Decision(
            routed.engine,
            routed.reason,
            routed.held,
            prompt.prompt_tokens,
            routed.uncached_tokens,
            routed.candidates,
            routed.session,
            prompt.text_tokens,
        )
        return FrontLease(self, engine, decision, routed.expected_prefill_seconds)

    async def ended(self, lease: Lease, fingerprint: Fingerprint, *, again: bool, begun: bool) -> bool:
        self.tell()  # the failure, before the question
        digest, body_bytes = fingerprint
        asked = messages.Ended(self.number, digest, body_bytes, again, begun)
        return (await self._router.ask(asked, messages.Judged)).resend

    def report(self, kind: Kind, now: float = 0.0) -> None:
        self._events.append((kind, now))
        if not self._deferred:
            self._deferred = True
            self._router.defer(self.tell)

    def leave(self) -> None:
        """Release the place and whatever the router gave or will give."""
        self._left = True
        self._router.places.pop(self.number, None)
        if not self._deferred:
            self._deferred = True
            self._router.defer(self.tell)

    def tell(self) -> None:
        """Report what has not been reported."""
        self._deferred = False
        if self._events or self._left:
            self._router.send(messages.Report(self.number, tuple(self._events), self._left))
            self._events = []


class RouterClient:
    """On the event loop. on_message: handles what is no answer. hint: promotion_hints.PromotionHints.tell."""

    def __init__(self, on_message: Callable[[Message], None], hint: Tell) -> None:
        self._on_message = on_message
        self._hint = hint
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Message]] = {}
        self.places: dict[int, FrontPlace] = {}
        self.channel: Channel | None = None

    def number(self) -> int:
        return next(self._numbers)

    def send(self, message: Message) -> None:
        assert self.channel is not None
        self.channel.send(message)

    def defer(self, tell: Callable[[], None]) -> None:
        assert self.channel is not None
        self.channel.defer(tell)

    async def ask(self, message: Any, kind: type[Answer]) -> Answer:
        """The router's answer to a message with a number. Raises the error of a refusal."""
        assert self.channel is not None
        if self.channel.full:
            raise GatewayOverloaded("the process that routes does not keep up")
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._answers[message.number] = answer
        try:
            self.send(message)
            given = await answer
        finally:
            del self._answers[message.number]
        if isinstance(given, messages.Refused):
            raise _error(given)
        assert isinstance(given, kind)
        return given

    def received(self, message: Message) -> None:
        number = getattr(message, "number", None)
        if isinstance(message, messages.Waiting):
            place = self.places.get(message.number)
            engine = place.fleet.engines.get(message.engine) if place is not None else None
            tokens = place.request.prompt.tokens if place is not None else None
            if engine is not None and tokens is not None:
                self._hint(engine, tokens, message.tokens)
        elif number is None or isinstance(message, messages.Count):
            self._on_message(message)
        else:
            answer = self._answers.get(number)
            if answer is not None and not answer.done():
                answer.set_result(message)

    # -- upstream.outbound.Dispatch

    async def enter(self, admission: Admission, fleet: ModelFleet, request: OutboundRequest) -> Place:
        place = FrontPlace(self, fleet, request)
        self.places[place.number] = place
        try:
            await place.enter()
        except BaseException:
            place.leave()
            raise
        return place


def _keys(keys: Sequence[int]) -> bytes:
    return array("Q", keys).tobytes()


def _error(refused: messages.Refused) -> GatewayError:
    kind = _ERRORS.get(refused.error, GatewayError)
    error = kind.__new__(kind)
    Exception.__init__(error, refused.text)
    error.args = (refused.text,)
    if refused.retry_after_seconds is not None:
        error.retry_after_seconds = refused.retry_after_seconds
    return error
