"""The router port over a channel: a front's requests are routed and counted by the router process."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from spillway_gateway.access.keys import Priority, Tenant
from spillway_gateway.access.limits import Settlement
from spillway_gateway.errors import NoEngineReady
from spillway_gateway.fleet.engine import Engine
from spillway_gateway.fleet.model_fleet import ModelFleet
from spillway_gateway.fleet.stored_responses import Owner
from spillway_gateway.processes import messages
from spillway_gateway.processes.messages import EngineFault, Kind
from spillway_gateway.processes.router_client import RouterClient
from spillway_gateway.routing.fleet_view import HeldPrefix, Leg
from spillway_gateway.routing.prefix import PromptBlocks, PromptTokens
from spillway_gateway.routing.route import Decision
from spillway_gateway.upstream.outbound import OutboundRequest
from spillway_gateway.upstream.router import Admitted, Place
from spillway_gateway.upstream.suspects import Fingerprint

Hint = Callable[[Engine, PromptTokens, int], object]


class ChannelAttempt:
    """An attempt that the router counts. The methods are reported at the end of the event loop's iteration."""

    __slots__ = ("_closed", "_place", "decision", "engine", "expected_prefill_seconds")

    def __init__(
        self, place: ChannelPlace, engine: Engine, decision: Decision, expected_prefill_seconds: float
    ) -> None:
        self.engine = engine
        self.decision = decision
        self._place = place
        self.expected_prefill_seconds = expected_prefill_seconds
        self._closed = False

    def accepted(self, now: float) -> None:
        self._place.report(Kind.ACCEPTED, now)

    def prefill_assumed(self) -> None:
        self._place.report(Kind.PREFILL_ASSUMED)

    def counted(self, computed_tokens: int) -> None:
        self._place.report(Kind.COUNTED, computed_tokens)

    def computed(self) -> None:
        self._place.report(Kind.COMPUTED)

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


class ChannelPlace:
    """A request's place, which the router counts. left: called when the request leaves it."""

    __slots__ = ("_client", "_deferred", "_events", "_first", "_left", "_on_left", "fleet", "number", "request")

    def __init__(
        self, client: RouterClient, fleet: ModelFleet, request: OutboundRequest, left: Callable[[int], None]
    ) -> None:
        self._client = client
        self._on_left = left
        self.fleet = fleet
        self.request = request
        self.number = client.number()
        self._events: list[tuple[Kind, float]] = []
        self._deferred = False
        self._left = False
        self._first: ChannelAttempt | None = None  # until it is asked for

    async def enter(self) -> None:
        """Ask for the place and an engine at once."""
        leg = Leg.OPEN if self.request.one_leg is None and not self.fleet.disaggregation.is_off else Leg.WHOLE
        self._first = await self._route(self.request.prompt, frozenset(), leg, first=True)

    async def choose(self, prompt: PromptBlocks, tried: frozenset[str], leg: Leg) -> ChannelAttempt:
        first, self._first = self._first, None
        if first is not None and not tried and prompt is self.request.prompt:
            return first
        if first is not None:
            first.close()
        self.tell()
        return await self._route(prompt, tried, leg, first=False)

    async def _route(self, prompt: PromptBlocks, tried: frozenset[str], leg: Leg, *, first: bool) -> ChannelAttempt:
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
            prompt.text_tokens,
            prompt.spread_key,
            {size: _keys(keys) for size, keys in prompt.other_keys.items()},
            tuple(tried),
            request.only_engine,
            session.digest if session is not None else None,
            request.adapter,
            prompt.tokens is not None and (first or leg is Leg.OPEN),
            request.trace is not None,
            leg,
        )
        routed = await self._client.ask(asked, messages.Routed)
        engine = self.fleet.engines.get(routed.decision.engine_name)
        if engine is None:  # a configuration that takes it away has come meanwhile
            raise NoEngineReady(self.fleet.unavailable_message(tried))
        return ChannelAttempt(self, engine, routed.decision, routed.expected_prefill_seconds)

    async def ended(self, fingerprint: Fingerprint, *, again: bool, begun: bool) -> bool:
        self.tell()  # the failure, before the question
        digest, body_bytes = fingerprint
        asked = messages.Ended(self.number, digest, body_bytes, again, begun)
        return (await self._client.ask(asked, messages.Judged)).resend

    def report(self, kind: Kind, now: float = 0.0) -> None:
        self._events.append((kind, now))
        if not self._deferred:
            self._deferred = True
            self._client.defer(self.tell)

    def leave(self) -> None:
        """Release the place and whatever the router gave or will give."""
        self._left = True
        self._on_left(self.number)
        if not self._deferred:
            self._deferred = True
            self._client.defer(self.tell)

    def tell(self) -> None:
        """Report what has not been reported."""
        self._deferred = False
        if self._events or self._left:
            self._client.send(messages.Report(self.number, tuple(self._events), self._left))
            self._events = []


class ChannelAdmitted:
    """A request of a tenant with limits, which the router counts."""

    __slots__ = ("_client", "_number")

    def __init__(self, client: RouterClient, number: int) -> None:
        self._client = client
        self._number = number

    def end(self, settlement: Settlement) -> None:
        self._client.send(messages.Settle(self._number, *settlement))


class Uncounted:
    """A request of a tenant without limits."""

    def end(self, settlement: Settlement) -> None:
        """Do nothing."""


UNCOUNTED = Uncounted()


class ChannelRouter:
    """A front's router, on the event loop: it asks the router process. hint: sends an engine the first tokens of a
    prompt, as many as are given."""

    def __init__(self, client: RouterClient, hint: Hint) -> None:
        self._client = client
        self._hint = hint
        self._places: dict[int, ChannelPlace] = {}

    def waiting(self, said: messages.Waiting) -> None:
        """A request waits for room, and an engine could prepare for it."""
        place = self._places.get(said.number)
        engine = place.fleet.engines.get(said.engine) if place is not None else None
        tokens = place.request.prompt.tokens if place is not None else None
        if engine is not None and tokens is not None:
            self._hint(engine, tokens, said.tokens)

    def _left(self, number: int) -> None:
        self._places.pop(number, None)

    # -- upstream.router.Router

    async def enter(self, fleet: ModelFleet, request: OutboundRequest) -> Place:
        place = ChannelPlace(self._client, fleet, request, self._left)
        self._places[place.number] = place
        try:
            await place.enter()
        except BaseException:
            place.leave()
            raise
        return place

    def engine_refused(self, engine: Engine, answer: str) -> None:
        self._report_fault(engine, EngineFault.REFUSED, answer)

    def engine_lacks_adapter(self, engine: Engine, adapter: str) -> None:
        self._report_fault(engine, EngineFault.LACKS_ADAPTER, adapter)

    def engine_failed(self, engine: Engine) -> None:
        self._report_fault(engine, EngineFault.FAILED, "")

    def _report_fault(self, engine: Engine, fault: EngineFault, text: str) -> None:
        """Report it to the router, which decides what follows."""
        self._client.send(messages.EngineFaultReport(engine.model, engine.name, fault, text))

    async def begin(self, tenant: Tenant, prompt_tokens: int) -> Admitted:
        if not tenant.limited:
            return UNCOUNTED
        number = self._client.number()
        await self._client.ask(messages.Begin(number, tenant, prompt_tokens), messages.Begun)
        return ChannelAdmitted(self._client, number)

    def record_response(self, response_id: str, owner: Owner) -> bool:
        self._client.send(messages.OwnResponse(response_id, owner.tenant, owner.model, owner.engine))
        return True  # if another tenant owns it the router records nothing

    def set_response_tokens(self, response_id: str, tenant: str, tokens: int) -> None:
        self._client.send(messages.ResponseTokens(response_id, tenant, tokens))

    async def owner_of(self, response_id: str, tenant: str) -> Owner | None:
        asked = messages.FindOwner(self._client.number(), response_id, tenant)
        found = await self._client.ask(asked, messages.OwnerIs)
        return Owner(tenant, found.model, found.engine, found.tokens) if found.model is not None else None

    def count_first_byte(self, model: str, engine: str, seconds: float) -> None:
        self._client.send(messages.Noted(model, engine, seconds))

    def count_cached(self, model: str, expected: HeldPrefix, cached_tokens: int) -> None:
        self._client.send(messages.Cached(model, expected, cached_tokens))

    def count_continued(self, model: str, seconds: float) -> None:
        self._client.send(messages.Noted(model, None, seconds))


def _keys(keys: Sequence[int]) -> bytes:
    return array("Q", keys).tobytes()
