"""The port through which requests are routed and counted.

A process that serves alone routes and counts by itself (upstream/local_router.py). If several processes serve, one of
them does so for all, and the others ask it over a channel (processes/channel_router.py). Whoever holds a Router cannot
tell which.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from spillway_gateway.access.keys import Tenant
from spillway_gateway.access.limits import Settlement
from spillway_gateway.fleet.engine import Engine
from spillway_gateway.fleet.model_fleet import ModelFleet
from spillway_gateway.fleet.stored_responses import Owner
from spillway_gateway.routing.fleet_view import HeldPrefix, Leg
from spillway_gateway.routing.prefix import PromptBlocks
from spillway_gateway.routing.route import Decision

if TYPE_CHECKING:
    from spillway_gateway.upstream.outbound import OutboundRequest
    from spillway_gateway.upstream.suspects import Fingerprint


class Attempt(Protocol):
    """One request on one engine, counted until close(); fleet.attempt.Attempt says what each method counts. Each
    may be called more than once. now: monotonic seconds."""

    @property
    def engine(self) -> Engine: ...

    @property
    def decision(self) -> Decision: ...

    @property
    def expected_prefill_seconds(self) -> float: ...

    def accepted(self, now: float) -> None: ...

    def prefill_assumed(self) -> None: ...

    def counted(self, computed_tokens: int) -> None: ...

    def computed(self) -> None: ...

    def first_byte(self, now: float, *, measures_prefill: bool) -> None: ...

    def began(self) -> None: ...

    def succeeded(self) -> None: ...

    def failed(self, now: float) -> None: ...

    def close(self, now: float | None = None) -> None: ...


class Place(Protocol):
    """A request's place among those that the engines of its model have room for."""

    async def choose(self, prompt: PromptBlocks, tried: frozenset[str], leg: Leg) -> Attempt:
        """Route a part of the request to an engine that was not tried yet, and count it there. Before a second leg,
        wait until what the first one computed can be loaded. Raises NoEngineReady, and ModelNotFound if no engine has
        its adapter any more."""

    async def ended(self, fingerprint: Fingerprint, *, again: bool, begun: bool) -> bool:
        """The engine that was chosen last has ended. Whether another one may get the request: always if that end was
        known to come, otherwise as Suspects.judge, whose arguments these are."""

    def leave(self) -> None:
        """The request has ended."""


class Admitted(Protocol):
    """A request that counts among those of its tenant."""

    def end(self, settlement: Settlement) -> None:
        """The request has ended."""


class Router(Protocol):
    """The port, on the event loop."""

    # -- engines

    async def enter(self, fleet: ModelFleet, request: OutboundRequest) -> Place:
        """Wait until the engines have room. Raises GatewayOverloaded, NoEngineReady, and ModelNotFound if the model was
        removed meanwhile."""

    def engine_refused(self, engine: Engine, answer: str) -> None:
        """A request could not connect to the engine."""

    def engine_lacks_adapter(self, engine: Engine, adapter: str) -> None:
        """The engine answered that it has no such adapter."""

    def engine_failed(self, engine: Engine) -> None:
        """The engine failed a request: whether it lives is to be asked soon."""

    # -- tenants

    async def begin(self, tenant: Tenant, prompt_tokens: int) -> Admitted:
        """Count a request of this tenant; end() must follow. Raises TenantLimited."""

    # -- stored responses (fleet/stored_responses.py)

    def record_response(self, response_id: str, owner: Owner) -> bool:
        """Record which engine stores a new response. False if another tenant is known to own it."""

    def set_response_tokens(self, response_id: str, tenant: str, tokens: int) -> None:
        """Record how many tokens a request that continues this response of the tenant will read."""

    async def owner_of(self, response_id: str, tenant: str) -> Owner | None:
        """The owner; None for an unknown id and for another tenant's."""

    # -- counts of the live page (fleet/recent.py)

    def count_first_byte(self, model: str, engine: str, seconds: float) -> None:
        """seconds: The time to the first byte of a reply."""

    def count_cached(self, model: str, expected: HeldPrefix, cached_tokens: int) -> None:
        """An engine reported how many tokens of a prompt were cached. expected: by routing."""

    def count_continued(self, model: str, seconds: float) -> None:
        """An answer went on from another engine. seconds: from the failure to the next event."""
