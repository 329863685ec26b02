"""The router of a process that counts requests itself, for its own clients or also for other processes' clients."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from spillway_gateway.access.admission import Admission
from spillway_gateway.access.gatekeeper import Gatekeeper
from spillway_gateway.access.keys import Priority, Tenant
from spillway_gateway.access.limits import Settlement, TenantUsage
from spillway_gateway.errors import ModelNotFound
from spillway_gateway.fleet.attempt import Attempt as FleetAttempt
from spillway_gateway.fleet.cold_prompts import ColdTurn
from spillway_gateway.fleet.engine import Engine
from spillway_gateway.fleet.hand_over import HandOver
from spillway_gateway.fleet.model_fleet import ModelFleet
from spillway_gateway.fleet.recent import Recent
from spillway_gateway.fleet.stored_responses import Owner, ResponseOwners
from spillway_gateway.fleet.waiting_prompt import WaitingPrompt
from spillway_gateway.routing.fleet_view import HeldPrefix, Leg
from spillway_gateway.routing.prefix import PromptBlocks
from spillway_gateway.routing.route import Decision
from spillway_gateway.upstream.outbound import OutboundRequest
from spillway_gateway.upstream.promotion_hints import PromotionHints
from spillway_gateway.upstream.router import Admitted, Attempt, Place
from spillway_gateway.upstream.suspects import Fingerprint, Suspects

logger = logging.getLogger(__name__)


class LocalRouter:
    """Routes to the process's own fleets through its own queues. On the event loop.

    Args:
        admissions: the queue of each model.
        gatekeeper: counts what tenants are allowed.
        suspects: requests of which engines end.
        hints: tells engines the prefixes of requests that wait.
        recent: keeps decisions and counts for the live page.
    """

    def __init__(
        self,
        admissions: Mapping[str, Admission],
        gatekeeper: Gatekeeper,
        suspects: Suspects,
        hints: PromotionHints,
        recent: Recent,
    ) -> None:
        self._admissions = admissions
        self._gatekeeper = gatekeeper
        self._suspects = suspects
        self._hints = hints
        self._recent = recent
        self._owners = ResponseOwners()

    def admission(self, model: str) -> Admission:
        """The model's queue. Raises ModelNotFound."""
        admission = self._admissions.get(model)
        if admission is None:
            raise ModelNotFound(f"The model {model!r} was removed a moment ago")
        return admission

    def decided(self, model: str, request_id: bytes, decision: Decision, tried: Collection[str]) -> None:
        """Note a decision for the live page, and in the log at debug level. tried: engines that failed before."""
        self._recent.decided(model, request_id, decision)
        log_decision(request_id, decision, tried)

    def tell(self, engine: Engine, request: OutboundRequest, first: int) -> None:
        """Announce the first `tokens` tokens of a request's prompt to an engine."""
        if request.prompt.tokens is not None and request.adapter is None:
            self._hints.tell(engine, request.prompt.tokens, first)

    # -- upstream.router.Router

    async def enter(self, fleet: ModelFleet, request: OutboundRequest) -> Place:
        admission = self.admission(fleet.name)
        if request.prompt.tokens is not None and admission.is_full:
            hinted = self._hints.expect(fleet, request)
            if hinted is not None and request.trace is not None:
                request.trace.hinted(hinted)
        if logger.isEnabledFor(logging.DEBUG) and admission.is_full:
            logger.debug("request %s waits for room on the engines of %s", request.shown_id, fleet.name)
        session = _digest_of(request)
        if not admission.enter_at_once(request.tenant, session, request.priority):
            waiting = WaitingPrompt(fleet, request.prompt, request.only_engine, admission.requests_per_engine_max)
            await admission.enter(request.tenant, request.priority, waiting.tokens_at_hand, session)
        return _LocalPlace(self, admission, fleet, request, self._suspects)

    def engine_refused(self, engine: Engine, answer: str) -> None:
        engine.refused(answer)

    def engine_lacks_adapter(self, engine: Engine, adapter: str) -> None:
        engine.lacks_adapter(adapter)

    def engine_failed(self, engine: Engine) -> None:
        engine.poll_soon()

    async def begin(self, tenant: Tenant, prompt_tokens: int) -> Admitted:
        return _LocalAdmitted(self._gatekeeper, tenant, await self._gatekeeper.begin(tenant, prompt_tokens))

    def record_response(self, response_id: str, owner: Owner) -> bool:
        return self._owners.record(response_id, owner)

    def set_response_tokens(self, response_id: str, tenant: str, tokens: int) -> None:
        self._owners.set_tokens(response_id, tenant, tokens)

    async def owner_of(self, response_id: str, tenant: str) -> Owner | None:
        return self._owners.of(response_id, tenant)

    def count_first_byte(self, model: str, engine: str, seconds: float) -> None:
        self._recent.first_byte(model, engine, seconds)

    def count_cached(self, model: str, expected: HeldPrefix, cached_tokens: int) -> None:
        self._recent.reported(model, expected, cached_tokens)

    def count_continued(self, model: str, seconds: float) -> None:
        self._recent.continued(model, seconds)


class _LocalAdmitted:
    __slots__ = ("_gatekeeper", "_tenant", "_usage")

    def __init__(self, gatekeeper: Gatekeeper, tenant: Tenant, usage: TenantUsage) -> None:
        self._gatekeeper = gatekeeper
        self._tenant = tenant
        self._usage = usage

    def end(self, settlement: Settlement) -> None:
        self._gatekeeper.end(self._tenant, self._usage, settlement)


class _LocalPlace:
    __slots__ = ("_admission", "_attempt", "_fleet", "_hand_over", "_request", "_router", "_session", "_suspects")

    def __init__(
        self,
        router: LocalRouter,
        admission: Admission,
        fleet: ModelFleet,
        request: OutboundRequest,
        suspects: Suspects,
    ) -> None:
        self._router = router
        self._session = _digest_of(request)
        self._suspects = suspects
        self._admission = admission
        self._fleet = fleet
        self._request = request
        self._attempt: FleetAttempt | None = None  # the last one
        self._hand_over: HandOver | None = None  # of a first leg

    async def choose(self, prompt: PromptBlocks, tried: frozenset[str], leg: Leg) -> Attempt:
        request = self._request
        if self._hand_over is not None and leg is Leg.SECOND:
            await self._hand_over.arrived(self._fleet.disaggregation.hand_over_seconds_max)
        if self._hand_over is not None:
            self._end_hand_over()
        begun = prompt is not request.prompt  # the client has the beginning of its answer
        turn = ColdTurn(urgent=begun or request.priority is Priority.HIGH)
        where, whose = (request.only_engine, request.session, request.adapter), request.tenant
        try:
            while (
                attempt := self._fleet.choose_unless_held(prompt, tried, *where, turn=turn, leg=leg, tenant=whose)
            ) is None:
                await self._fleet.cold.wait(turn)
        finally:
            if turn.until is not None:
                self._fleet.cold.leave(turn)
        self._attempt = attempt
        self._admission.turns.charge(request.tenant, self._session, attempt.decision.uncached_tokens)
        self._router.decided(self._fleet.name, request.request_id, attempt.decision, tried)
        loading = self._fleet.loading_engine(attempt.decision) if attempt.decision.legs is not None else None
        if loading is not None:
            second = self._fleet.engines[loading]
            self._hand_over = self._fleet.hand_over(
                prompt, second.name, lambda first: self._router.tell(second, request, first)
            )
        return attempt

    def _end_hand_over(self) -> None:
        if self._hand_over is not None:
            self._hand_over.end()
            self._hand_over = None

    async def ended(self, fingerprint: Fingerprint, *, again: bool, begun: bool) -> bool:
        return may_be_sent_again(self._fleet, self._attempt, self._suspects, fingerprint, again=again, begun=begun)

    def leave(self) -> None:
        self._end_hand_over()
        self._admission.leave(self._request.tenant, self._session)


def _digest_of(request: OutboundRequest) -> int | None:
    return request.session.digest if request.session is not None else None


def may_be_sent_again(
    fleet: ModelFleet,
    attempt: FleetAttempt | None,
    suspects: Suspects,
    fingerprint: Fingerprint,
    *,
    again: bool,
    begun: bool,
) -> bool:
    """End as Place.ended does. attempt: on the engine that was chosen last."""
    if attempt is not None and attempt.engine.was_to_end:
        return True
    alone = attempt is not None and fleet.served_alone(attempt)
    return suspects.judge(fingerprint, alone=alone, again=again, begun=begun)


def log_decision(request_id: bytes, decision: Decision, tried: Collection[str]) -> None:
    """Log at debug level to which engine a request was routed, and why."""
    if logger.isEnabledFor(logging.DEBUG):
        held = decision.held
        logger.debug(
            "request %s is routed to engine %s by %s: of %d tokens %d are expected on its device, %d in its CPU tier, "
            "%d in its shared tier; costs in ms: %s; tried before: %s",
            request_id.decode("latin-1"),
            decision.engine_name,
            decision.reason.value,
            decision.prompt_tokens,
            held.device_tokens,
            held.cpu_tokens,
            held.shared_tokens,
            ", ".join(f"{each.engine.name} {each.cost.total_ms:.1f}" for each in decision.candidates) or "not sent",
            ", ".join(sorted(tried)) or "none",
        )
