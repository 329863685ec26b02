"""The client-facing HTTP application: Starlette dispatches all but inference requests.

Bodies and streams of inference requests stay raw: their endpoints are ASGI applications, which dispatch.py calls
without the framework.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from spillway_gateway.access.gatekeeper import Gatekeeper
from spillway_gateway.api.dispatch import InferenceDispatch
from spillway_gateway.api.inference import InferenceContext, InferenceEndpoint, StoredResponseEndpoint
from spillway_gateway.api.models import ModelList
from spillway_gateway.api.openapi import STORED_PATH, openapi_document
from spillway_gateway.api.routes import ROUTES
from spillway_gateway.client.cors import Cors
from spillway_gateway.error_bodies import INTERNAL_ERROR, error_body, response_of
from spillway_gateway.errors import GatewayError
from spillway_gateway.roster.served import model_not_found


def client_application(
    context: InferenceContext, model_list: ModelList, other_routes: Sequence[Route], lifespan: Any, cors: Cors
) -> InferenceDispatch:
    """Return the application of the main listener. other_routes: of operations."""
    endpoints = {route.path: InferenceEndpoint(route, context) for route in ROUTES}
    api = Starlette(
        routes=[
            *(Route(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()),
            Route(f"{STORED_PATH}/cancel", StoredResponseEndpoint("POST", "/cancel", context), methods=["POST"]),
            Route(STORED_PATH, StoredResponseEndpoint("GET", "", context), methods=["GET"]),
            *other_routes,
            *_model_routes(context.gatekeeper, model_list),
            _document_route(context.gatekeeper),
        ],
        exception_handlers={HTTPException: http_error, GatewayError: _gateway_error, Exception: _internal_error},
        lifespan=lifespan,
    )
    api.router.redirect_slashes = False  # a redirect would send clients to whatever host they name
    return InferenceDispatch(endpoints, api, cors)


def _model_routes(gatekeeper: Gatekeeper, model_list: ModelList) -> list[Route]:
    async def models(request: Request) -> Response:
        body = await model_list.read_list(gatekeeper.tenant_of(request.headers.raw))
        return Response(body, media_type="application/json")

    async def model(request: Request) -> Response:
        name: str = request.path_params["model"]
        cards = await model_list.read(gatekeeper.tenant_of(request.headers.raw))
        if name not in cards:
            raise model_not_found(name, cards)
        return Response(cards[name].body, media_type="application/json")

    return [Route("/v1/models", models), Route("/v1/models/{model:path}", model)]


def _document_route(gatekeeper: Gatekeeper) -> Route:
    document = cache(lambda: msgspec.json.encode(openapi_document(keys=gatekeeper.enabled)))

    async def show(request: Request) -> Response:
        return Response(document(), media_type="application/json")

    return Route("/openapi.json", show)


async def http_error(request: Request, error: Exception) -> Response:
    """Answer the framework's own errors in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        message, code = f"Unknown route: {request.method} {request.url.path}", "unknown_route"
    elif error.status_code == 405:
        message, code = f"{request.method} is not allowed on {request.url.path}", "method_not_allowed"
    else:
        message, code = str(error.detail), "http_error"
    body = error_body(message, "invalid_request_error", None, code)
    return Response(body, error.status_code, error.headers, media_type="application/json")


async def _gateway_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, GatewayError)
    return response_of(error)


async def _internal_error(request: Request, error: Exception) -> Response:
    return Response(INTERNAL_ERROR, 500, media_type="application/json")
