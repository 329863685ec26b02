"""GET /openapi.json: FastAPI's document of the registered routes, with the types that describe them.

A request body is described by the type that its parser decodes with, so the document lists what the gateway reads; all
other fields are the engine's, and pass.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import Response

from spillway_gateway.api.routes import ROUTES, ApiRoute, Salting
from spillway_gateway.error_bodies import Dialect
from spillway_settings.vllm_salts import OLDEST

Responses = dict[int | str, dict[str, Any]]
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
    """Further fields are the engine's."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelCards(msgspec.Struct):
    object: Literal["list"]
    data: list[ModelCard]


def responses_of(*statuses: int, answer: type | None = None, dialect: Dialect = Dialect.OPENAI) -> Responses:
    """The gateway's own errors; every other status is the engine's answer, byte for byte. answer: of a 200."""
    error = _json(AnthropicError if dialect is Dialect.ANTHROPIC else Error)
    engines = {"description": "the engine's answer"}
    return {
        200: {**engines, **_json(answer)} if answer is not None else engines,
        **{status: {"description": STATUSES[status], **error} for status in statuses},
        "default": engines,
    }


def _json(body: type) -> dict[str, Any]:
    """By reference: FastAPI would build a validator for each type of each route, 3.7 MB in all, and use none."""
    return {"content": {"application/json": {"schema": {"$ref": _REFERENCE.format(name=body.__name__)}}}}


_STORED: dict[str, Any] = {
    "response_class": Response,
    "responses": responses_of(*(status for status in STATUSES if status not in (400, 403))),
}
STORED = {"summary": "A stored response", **_STORED}
CANCEL = {"summary": "Cancel a response in the background", **_STORED}
_PROBE: dict[str, Any] = {
    "response_class": Response,
    "responses": {200: {"description": "yes"}, 503: {"description": "no"}},
    "openapi_extra": {"security": []},
}
PROBES = {
    "/health": {"summary": "The process is alive", **_PROBE},
    "/ready": {"summary": "At least one model has an engine", **_PROBE},
}


def description_of(route: ApiRoute) -> dict[str, Any]:
    """The description of an inference route, for FastAPI, which sees nothing of a body that is read raw."""
    body = {"content": {"multipart/form-data": {"schema": _FORM}}} if route.body is None else _json(route.body)
    closed = "Closed to tenants unless auth.unsaltedRoutes allows it: engines take no salt"
    if route.salted_since > OLDEST:
        closed += " before vLLM {}.{}".format(*route.salted_since)
    return {
        "summary": "As the engine serves it",
        "description": f"{closed}." if route.salting is Salting.UNKNOWN or route.salted_since > OLDEST else None,
        "response_class": Response,
        "responses": responses_of(*STATUSES, dialect=route.dialect),
        "openapi_extra": {"requestBody": {"required": True, **body}},
    }


def openapi_document(app: FastAPI, *, keys: bool) -> dict[str, Any]:
    """OpenAPI 3.1. keys: an API key is required."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    types = {route.body for route in ROUTES if route.body is not None} | {Error, AnthropicError, ModelCard, ModelCards}
    _, schemas = msgspec.json.schema_components(sorted(types, key=lambda each: each.__name__), ref_template=_REFERENCE)
    components: dict[str, Any] = {"schemas": schemas}
    if keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return {**document, "components": components}
