"""Names and values of span attributes: OpenTelemetry's semantic conventions for HTTP and generative AI if they have
one, `spillway.` otherwise. No text of prompts or replies, and no tenant.
"""

from __future__ import annotations

from spillway_gateway.routing.route import Decision

HTTP_METHOD = "http.request.method"
HTTP_ROUTE = "http.route"
HTTP_STATUS = "http.response.status_code"
SERVER_ADDRESS = "server.address"
SERVER_PORT = "server.port"
ERROR_TYPE = "error.type"
OPERATION = "gen_ai.operation.name"
MODEL = "gen_ai.request.model"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
STREAM = "gen_ai.request.stream"
FIRST_CHUNK_SECONDS = "gen_ai.response.time_to_first_chunk"
REQUEST_ID = "spillway.request_id"
ENGINE = "spillway.engine"
RETRY = "spillway.retry"
PROMOTION_ENGINE = "spillway.promotion_engine"
LEG = "spillway.leg"
CONTINUED_TOKENS = "spillway.continued_tokens"

_OPERATIONS = {
    "/v1/completions": "text_completion",
    "/inference/v1/generate": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v2/embed": "embeddings",
    "/pooling": "embeddings",
    "/v1/chat/completions": "chat",
    "/v1/chat/completions/batch": "chat",
    "/v1/responses": "chat",
    "/v1/responses/{response_id}": "get_response",
    "/v1/responses/{response_id}/cancel": "cancel_response",
    "/v1/messages": "chat",
}

Attributes = dict[str, str | bool | int | float]


def operation_of(path: str) -> str:
    """gen_ai.operation.name of a route: a well-known value if there is one, else the route's last part."""
    return _OPERATIONS.get(path) or path.rpartition("/")[2]


def route_attributes(decision: Decision) -> Attributes:
    """Attributes of a decision's span."""
    held = decision.held
    session: Attributes = {} if decision.session is None else {"spillway.session": decision.session.value}
    legs: Attributes = {}
    if decision.legs is not None:
        legs = {"spillway.legs": decision.legs.decision, "spillway.legs.reason": decision.legs.reason.value}
        if decision.legs.two_legs_ms is not None:
            legs["spillway.legs.one_leg_ms"] = decision.legs.one_leg_ms
            legs["spillway.legs.two_legs_ms"] = decision.legs.two_legs_ms
    return {
        **session,
        **legs,
        ENGINE: decision.engine_name,
        "spillway.route.reason": decision.reason.value,
        "spillway.prompt_tokens": decision.prompt_tokens,
        "spillway.prefix.device_tokens": held.device_tokens,
        "spillway.prefix.cpu_tokens": held.cpu_tokens,
        "spillway.prefix.shared_tokens": held.shared_tokens,
    }


def candidate_events(decision: Decision) -> list[Attributes]:
    """The cost of each candidate, for the events of a decision's span."""
    return [
        {
            ENGINE: candidate.engine.name,
            "spillway.cost.total_ms": candidate.cost.total_ms,
            "spillway.cost.queue_ms": candidate.cost.queue_ms,
            "spillway.cost.link_ms": candidate.cost.link_ms,
            "spillway.cost.load_ms": candidate.cost.load_ms,
            "spillway.cost.prefill_ms": candidate.cost.prefill_ms,
            "spillway.cost.displaced_ms": candidate.cost.displaced_ms,
            "spillway.cost.later_ms": candidate.cost.later_ms,
            "spillway.prefix.total_tokens": candidate.engine.held.total_tokens,
        }
        for candidate in decision.candidates
    ]
