"""GET /openapi.json: what the gateway itself asks of a request. The schemas are those that its parsers decode with, so
they say what is read here; all other fields are the engine's, and pass.
"""

from __future__ import annotations

from typing import Any

import msgspec

from spillway_gateway.api.routes import ROUTES, ApiRoute, Salting
from spillway_gateway.error_bodies import Dialect

_REFERENCE = "#/components/schemas/{name}"
_STATUSES = {
    "400": "the body is not JSON, or a field that is read here has the wrong type",
    "401": "no API key, or an unknown one",
    "403": "this key may not use the model or the route",
    "404": "the model or the stored response is not known",
    "408": "the body did not arrive in time",
    "413": "the body is larger than limits.bodyBytesMax",
    "429": "a limit of the tenant is reached; see Retry-After",
    "502": "the engine broke off or answered with what is not HTTP",
    "503": "no engine can take the request; see Retry-After",
    "504": "the engine did not answer in time",
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "integer", "null"]},
            },
        }
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
_FORM = {
    "type": "object",
    "required": ["file"],
    "properties": {
        "model": {"type": "string"},
        "stream": {"type": "boolean"},
        "file": {"type": "string", "format": "binary"},
    },
}


def openapi_document(*, keys: bool) -> dict[str, Any]:
    """OpenAPI 3.1. keys: an API key is asked for."""
    bodies = {route.body for route in ROUTES if route.body is not None}
    _, schemas = msgspec.json.schema_components(sorted(bodies, key=lambda body: body.__name__), ref_template=_REFERENCE)
    paths = {route.path: {"post": _operation(route)} for route in ROUTES}
    paths["/v1/responses/{response_id}"] = {"get": _stored("A stored response")}
    paths["/v1/responses/{response_id}/cancel"] = {"post": _stored("Cancel a response in the background")}
    paths["/v1/models"] = {"get": {"summary": "The models served here", "responses": _responses("Error", "401")}}
    paths["/v1/models/{model}"] = {
        "get": {
            "summary": "One of them",
            "parameters": [_path_parameter("model")],
            "responses": _responses("Error", "401", "404"),
        }
    }
    for path, summary in (("/health", "The process is alive"), ("/ready", "At least one model has an engine")):
        paths[path] = {"get": {"summary": summary, "security": [], "responses": {"200": _ok("yes"), "503": _ok("no")}}}
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Spillway gateway", "version": "1"},
        "paths": paths,
        "components": {"schemas": {**schemas, "Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR}},
    }
    if keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _operation(route: ApiRoute) -> dict[str, Any]:
    if route.body is None:
        content = {"multipart/form-data": {"schema": _FORM}}
    else:
        content = {"application/json": {"schema": {"$ref": _REFERENCE.format(name=route.body.__name__)}}}
    error = "AnthropicError" if route.dialect is Dialect.ANTHROPIC else "Error"
    operation: dict[str, Any] = {
        "summary": "As the engine serves it",
        "requestBody": {"required": True, "content": content},
        "responses": _responses(error, *_STATUSES),
    }
    if route.salting is Salting.UNKNOWN:
        operation["description"] = "Closed to tenants unless auth.unsaltedRoutes allows it: the engine takes no salt."
    return operation


def _stored(summary: str) -> dict[str, Any]:
    statuses = [status for status in _STATUSES if status not in ("400", "403")]
    return {
        "summary": summary,
        "parameters": [_path_parameter("response_id")],
        "responses": _responses("Error", *statuses),
    }


def _path_parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _responses(error: str, *statuses: str) -> dict[str, Any]:
    schema = {"$ref": _REFERENCE.format(name=error)}
    own = {
        status: {"description": _STATUSES[status], "content": {"application/json": {"schema": schema}}}
        for status in statuses
    }
    # Any other status is the engine's own answer, byte for byte.
    return {"200": _ok("the engine's answer"), **own, "default": _ok("the engine's answer")}


def _ok(description: str) -> dict[str, Any]:
    return {"description": description}
