"""GET /openapi.json: the routes of clients and probes, with the types that describe them.

A request body is described by the type that its parser decodes with, so the document lists what the gateway reads; all
other fields are the engine's, and pass.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from spillway_gateway.api.routes import ROUTES, ApiRoute, Salting
from spillway_gateway.error_bodies import Dialect
from spillway_settings.vllm_salts import OLDEST

_REFERENCE = "#/components/schemas/{name}"
_FORM = {
    "type": "object",
    "required": ["file"],
    "properties": {
        "model": {"type": "string"},
        "stream": {"type": "boolean"},
        "file": {"type": "string", "format": "binary"},
    },
}
STATUSES = {
    400: "the body is not JSON, or a field that is read here has the wrong type",
    401: "no API key, or an unknown one",
    403: "this key may not use the model or the route",
    404: "the model or the stored response is not known",
    408: "the body did not arrive in time",
    413: "the body is larger than limits.bodyBytesMax",
    429: "a limit of the tenant is reached; see Retry-After",
    502: "the engine broke off or answered with what is not HTTP",
    503: "no engine can take the request; see Retry-After",
    504: "the engine did not answer in time",
}


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | int | None


class Error(msgspec.Struct):
    error: ErrorDetail


class AnthropicErrorDetail(msgspec.Struct):
    type: str
    message: str


class AnthropicError(msgspec.Struct):
    type: Literal["error"]
    error: AnthropicErrorDetail


class ModelCard(msgspec.Struct):
    """A model's card; further fields are the engine's."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelCards(msgspec.Struct):
    object: Literal["list"]
    data: list[ModelCard]


STORED_PATH = "/v1/responses/{response_id}"


def openapi_document(*, keys: bool) -> dict[str, Any]:
    """OpenAPI 3.1. keys: an API key is required."""
    of_stored = _responses(*(status for status in STATUSES if status not in (400, 403)))
    of_probes = {"200": {"description": "yes"}, "503": {"description": "no"}}
    open_to_all: dict[str, Any] = {"security": []}
    paths = {
        **{route.path: {"post": _inference(route)} for route in ROUTES},
        STORED_PATH: {"get": _operation("A stored response", of_stored, "response_id")},
        f"{STORED_PATH}/cancel": {"post": _operation("Cancel a response in the background", of_stored, "response_id")},
        "/health": {"get": _operation("The process is alive", of_probes) | open_to_all},
        "/ready": {"get": _operation("At least one model has an engine", of_probes) | open_to_all},
        "/v1/models": {"get": _operation("The models served here", _responses(401, answer=ModelCards))},
        "/v1/models/{model}": {"get": _operation("One of them", _responses(401, 404, answer=ModelCard), "model")},
    }
    for path, operations in paths.items():
        for method, operation in operations.items():
            operation["operationId"] = re.sub(r"\W+", "_", f"{method}{path}").rstrip("_")  # post_v1_chat_completions
    types = {route.body for route in ROUTES if route.body is not None} | {Error, AnthropicError, ModelCard, ModelCards}
    _, schemas = msgspec.json.schema_components(sorted(types, key=lambda each: each.__name__), ref_template=_REFERENCE)
    components: dict[str, Any] = {"schemas": schemas}
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Spillway gateway", "version": "1"},
        "paths": paths,
    }
    if keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return {**document, "components": components}


def _inference(route: ApiRoute) -> dict[str, Any]:
    body = {"content": {"multipart/form-data": {"schema": _FORM}}} if route.body is None else _json(route.body)
    found = _operation("As the engine serves it", _responses(*STATUSES, dialect=route.dialect))
    found["requestBody"] = {"required": True, **body}
    closed = "Closed to tenants unless auth.unsaltedRoutes allows it: engines take no salt"
    if route.salted_since > OLDEST:
        closed += " before vLLM {}.{}".format(*route.salted_since)
    if route.salting is Salting.UNKNOWN or route.salted_since > OLDEST:
        found["description"] = f"{closed}."
    return found


def _operation(summary: str, responses: Mapping[str, Any], parameter: str | None = None) -> dict[str, Any]:
    """parameter: the parameter in the path, if there is one."""
    found: dict[str, Any] = {"summary": summary, "responses": responses}
    if parameter is not None:
        found["parameters"] = [{"name": parameter, "in": "path", "required": True, "schema": {"type": "string"}}]
    return found


def _responses(*statuses: int, answer: type | None = None, dialect: Dialect = Dialect.OPENAI) -> dict[str, Any]:
    """The gateway's own errors; every other status is the engine's answer, byte for byte. answer: of a 200."""
    error = _json(AnthropicError if dialect is Dialect.ANTHROPIC else Error)
    engines = {"description": "the engine's answer"}
    return {
        "200": {**engines, **_json(answer)} if answer is not None else engines,
        **{str(status): {"description": STATUSES[status], **error} for status in statuses},
        "default": engines,
    }


def _json(body: type) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": {"$ref": _REFERENCE.format(name=body.__name__)}}}}
