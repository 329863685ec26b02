"""Places and engines for requests, where this process alone serves."""

from __future__ import annotations

from spillway_gateway.access.admission import Admission
from spillway_gateway.fleet.model_fleet import Lease, ModelFleet
from spillway_gateway.routing.prefix import PromptBlocks
from spillway_gateway.upstream.outbound import OutboundRequest, Place


class OwnDispatch:
    """Of the process's own fleets and queues. On the event loop."""

    async def enter(self, admission: Admission, fleet: ModelFleet, request: OutboundRequest) -> Place:
        await admission.enter(request.tenant, request.priority)
        return _OwnPlace(admission, fleet, request)


class _OwnPlace:
    __slots__ = ("_admission", "_fleet", "_request")

    def __init__(self, admission: Admission, fleet: ModelFleet, request: OutboundRequest) -> None:
        self._admission = admission
        self._fleet = fleet
        self._request = request

    async def choose(self, prompt: PromptBlocks, tried: frozenset[str]) -> Lease:
        request = self._request
        return self._fleet.choose(prompt, tried, request.only_engine, request.session, request.adapter)

    def leave(self) -> None:
        self._admission.leave()
