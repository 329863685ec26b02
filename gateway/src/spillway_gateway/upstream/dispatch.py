"""Places and engines for requests, where this process alone serves."""

from __future__ import annotations

from spillway_gateway.access.admission import Admission
from spillway_gateway.fleet.model_fleet import Lease, ModelFleet
from spillway_gateway.routing.prefix import PromptBlocks
from spillway_gateway.upstream.outbound import OutboundRequest, Place
from spillway_gateway.upstream.suspects import Fingerprint, Suspects


class OwnDispatch:
    """Dispatch to the process's own fleets and queues. On the event loop."""

    def __init__(self, suspects: Suspects) -> None:
        self._suspects = suspects

    async def enter(self, admission: Admission, fleet: ModelFleet, request: OutboundRequest) -> Place:
        await admission.enter(request.tenant, request.priority)
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
        return self._fleet.choose(prompt, tried, request.only_engine, request.session, request.adapter)

    async def ended(self, lease: Lease, fingerprint: Fingerprint, *, again: bool, begun: bool) -> bool:
        if lease.engine.was_to_end:
            return True
        alone = self._fleet.served_alone(lease)
        return self._suspects.judge(fingerprint, alone=alone, again=again, begun=begun)

    def leave(self) -> None:
        self._admission.leave()
