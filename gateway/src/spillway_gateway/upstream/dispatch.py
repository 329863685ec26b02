"""Places and engines for requests, if this process alone serves."""

from __future__ import annotations

import logging
from collections.abc import Collection

from spillway_gateway.access.admission import Admission
from spillway_gateway.access.keys import Priority
from spillway_gateway.fleet.cold_prompts import ColdTurn
from spillway_gateway.fleet.model_fleet import Lease, ModelFleet
from spillway_gateway.fleet.waiting_prompt import WaitingPrompt
from spillway_gateway.routing.prefix import PromptBlocks
from spillway_gateway.routing.route import Decision
from spillway_gateway.upstream.outbound import OutboundRequest, Place
from spillway_gateway.upstream.suspects import Fingerprint, Suspects

logger = logging.getLogger(__name__)


class OwnDispatch:
    """Dispatch to the process's own fleets and queues. On the event loop."""

    def __init__(self, suspects: Suspects) -> None:
        self._suspects = suspects

    async def enter(self, admission: Admission, fleet: ModelFleet, request: OutboundRequest) -> Place:
        if logger.isEnabledFor(logging.DEBUG) and admission.is_full:
            logger.debug("request %s waits for room on the engines of %s", request.shown_id, fleet.name)
        waiting = WaitingPrompt(fleet, request.prompt, request.only_engine, admission.requests_per_engine_max)
        await admission.enter(request.tenant, request.priority, waiting.tokens_at_hand)
        return _OwnPlace(admission, fleet, request, self._suspects)


class _OwnPlace:
    __slots__ = ("_admission", "_fleet", "_request", "_suspects")

    def __init__(self, admission: Admission, fleet: ModelFleet, request: OutboundRequest, suspects: Suspects) -> None:
        self._suspects = suspects
        self._admission = admission
        self._fleet = fleet
        self._request = request

    async def choose(self, prompt: PromptBlocks, tried: frozenset[str]) -> Lease:
        request = self._request
        begun = prompt is not request.prompt  # the client has the beginning of its answer
        turn = ColdTurn(urgent=begun or request.priority is Priority.HIGH)
        where = request.only_engine, request.session, request.adapter
        try:
            while (lease := self._fleet.choose_unless_held(prompt, tried, *where, turn=turn)) is None:
                await self._fleet.cold.wait(turn)
        finally:
            self._fleet.cold.leave(turn)
        log_decision(request.request_id, lease.decision, tried)
        return lease

    async def ended(self, lease: Lease, fingerprint: Fingerprint, *, again: bool, begun: bool) -> bool:
        if lease.engine.was_to_end:
            return True
        alone = self._fleet.served_alone(lease)
        return self._suspects.judge(fingerprint, alone=alone, again=again, begun=begun)

    def leave(self) -> None:
        self._admission.leave()


def log_decision(request_id: bytes, decision: Decision, tried: Collection[str]) -> None:
    """At debug level: which engine a request was routed to, and why."""
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
