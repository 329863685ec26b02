"""A request to an engine, and the services that all requests share: the types between api/ and the relay."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from spillway_gateway.access.keys import Priority
from spillway_gateway.config.live import LiveConfig
from spillway_gateway.error_bodies import Dialect
from spillway_gateway.fleet.engine import Engine
from spillway_gateway.fleet.sessions import SessionKey
from spillway_gateway.lifecycle import RunningRequest
from spillway_gateway.metrics import GatewayMetrics
from spillway_gateway.routing.legs import LegsReason
from spillway_gateway.routing.prefix import PromptBlocks
from spillway_gateway.routing.route import Decision
from spillway_gateway.turns import Turns
from spillway_gateway.upstream.connections import Connections
from spillway_gateway.upstream.continuation.sent_answer import KeptBytes
from spillway_gateway.upstream.forward import Body, Headers
from spillway_gateway.upstream.pool import ConnectionPool
from spillway_gateway.upstream.retry import RetryBudget
from spillway_gateway.upstream.usage import Usage

if TYPE_CHECKING:
    from spillway_gateway.upstream.router import Router
    from spillway_gateway.upstream.suspects import EngineLooks, Suspects

ENDS_PER_ITERATION = 32  # of waits that end for one reason: each request is sent again, or its client gets an error

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]


class Client(Protocol):
    """The client's side of a request (client/connection.py)."""

    @property
    def engine_connections(self) -> Connections | None:
        """The connections through which this request reaches its engine; None: the gateway's own pool."""

    def set_disconnect_callback(self, callback: Callable[[], None]) -> None: ...

    def clear_disconnect_callback(self, callback: Callable[[], None]) -> None: ...

    def reply(self, status: int, headers: Headers, body: bytes) -> bool: ...

    def end_with_reply(self) -> None: ...

    def take_reply_bytes(self, more_bytes: int) -> bool: ...

    def give_reply_bytes(self, taken_bytes: int) -> None: ...

    @property
    def writable(self) -> bool:
        """Whether bytes that are sent now are written without waiting."""


class AttemptTrace(Protocol):
    """The trace of one attempt (tracing/request_trace.py)."""

    headers: Headers

    def first_byte(self) -> None: ...

    def end(self, status: int, error: str | None) -> None: ...


class RequestTrace(Protocol):
    """The trace of one request (tracing/request_trace.py, which is imported only if traces are exported)."""

    def hinted(self, engine: str) -> None: ...

    def admitted(self, asked_ns: int) -> None: ...

    def routed(self, asked_ns: int, decision: Decision) -> None: ...

    def attempt(
        self,
        model: str,
        engine: Engine,
        headers: Headers,
        *,
        again: bool,
        continues_after: int | None = None,
        leg: str | None = None,
    ) -> AttemptTrace | None: ...


@dataclass(slots=True)
class UpstreamServices:
    """Services that all requests of a process share.

    running: the requests in progress, which a shutdown may end. kept: token ids of answers that may be continued.
    ends: turns of waits that end from outside.
    """

    router: Router
    pool: ConnectionPool
    budget: RetryBudget
    metrics: GatewayMetrics
    live: LiveConfig
    running: set[RunningRequest]
    kept: KeptBytes
    suspects: Suspects
    looks: EngineLooks
    ends: Turns = field(default_factory=lambda: Turns(ENDS_PER_ITERATION))


class OutboundRequest(msgspec.Struct, frozen=True):
    """One parsed and admitted request.

    headers: the caller's, names in lower case. received_at: perf_counter() when the body was whole; a loop's own clock
    may tick in milliseconds. only_engine: the one engine that holds what the request asks for. on_reply: called with
    the engine's name and the plain reply or its first events, for status 200. charged_tokens: counted against the
    tenant's quota besides the prompt's. on_end: called once with the reply's usage. asks_ids: the body asks the engine
    for token ids, which the client did not. session: that it belongs to. adapter: the LoRA adapter that the body names.
    choices, reply_tokens_max: as in api/parsed_body.py. computes: False if the request asks for what an engine has
    stored; its tokens were counted when it was computed. retained_token_hours: what its prompt's retention costs; None:
    it has none. one_leg: why it takes no two legs, whatever the engines; None: it may.
    """

    path: bytes
    headers: Headers
    body: Body
    request_id: bytes
    stream: bool
    prompt: PromptBlocks
    received_at: float
    tenant: str = ""
    priority: Priority = Priority.NORMAL
    method: bytes = b"POST"
    dialect: Dialect = Dialect.OPENAI
    retryable: bool = True
    only_engine: str | None = None
    on_reply: Callable[[str, bytes], None] | None = None
    trace: RequestTrace | None = None
    charged_tokens: int = 0
    on_end: Callable[[Usage], None] | None = None
    asks_ids: bool = False
    session: SessionKey | None = None
    adapter: str | None = None
    choices: int = 1
    reply_tokens_max: int | None = 0
    computes: bool = True
    retained_token_hours: float | None = None
    one_leg: LegsReason | None = LegsReason.DIALECT

    @property
    def shown_id(self) -> str:
        """The request's id in log lines."""
        return self.request_id.decode("latin-1")
