"""The client-facing HTTP application: every route registered with FastAPI, which dispatches all but inference requests.

Bodies and streams of inference requests stay raw: their endpoints are ASGI applications, which dispatch.py calls
without the framework.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from spillway_gateway.access.gatekeeper import Gatekeeper
from spillway_gateway.api.dispatch import AsgiApp, InferenceDispatch
from spillway_gateway.api.inference import InferenceContext, InferenceEndpoint, StoredResponseEndpoint
from spillway_gateway.api.models import ModelList
from spillway_gateway.api.openapi import (
    CANCEL,
    PROBES,
    STORED,
    ModelCard,
    ModelCards,
    description_of,
    openapi_document,
    responses_of,
)
from spillway_gateway.api.routes import ROUTES
from spillway_gateway.client.cors import Cors
from spillway_gateway.error_bodies import INTERNAL_ERROR, error_body, response_of
from spillway_gateway.errors import GatewayError
from spillway_gateway.roster.served import model_not_found


class RawResponse(Response):
    """A response that an ASGI application gives, which reads the request's body itself."""

    def __init__(self, application: AsgiApp) -> None:
        self._application = application
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._application(scope, receive, send)


def client_application(
    context: InferenceContext, model_list: ModelList, other_routes: Sequence[Route], lifespan: Any, cors: Cors
) -> InferenceDispatch:
    """What the main listener runs. other_routes: of operations, and in the document if they are its probes."""
    api = FastAPI(
        title="Spillway gateway",
        version="1",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        exception_handlers={HTTPException: http_error, GatewayError: _gateway_error, Exception: _internal_error},
    )
    api.router.redirect_slashes = False  # a redirect would send clients to whatever host they name
    document = cache(lambda: openapi_document(api, keys=context.gatekeeper.enabled))
    api.openapi = document  # type: ignore[method-assign]
    endpoints = {route.path: InferenceEndpoint(route, context) for route in ROUTES}
    for route in ROUTES:
        api.add_api_route(route.path, _raw(endpoints[route.path]), methods=["POST"], **description_of(route))
    stored = "/v1/responses/{response_id}"
    cancel = StoredResponseEndpoint("POST", "/cancel", context)
    api.add_api_route(f"{stored}/cancel", _raw_by_id(cancel), methods=["POST"], **CANCEL)
    # FastAPI's GET routes refuse HEAD. Starlette's serve it; before FastAPI's of the same path they serve both methods.
    get = StoredResponseEndpoint("GET", "", context)
    api.router.routes += [Route(stored, get, methods=["GET"]), *other_routes]
    api.add_api_route(stored, _raw_by_id(get), **STORED)
    for other in other_routes:
        if other.path in PROBES:
            api.add_api_route(other.path, other.endpoint, **PROBES[other.path])
    _add_models(api, context.gatekeeper, model_list)
    return InferenceDispatch(endpoints, api, cors)


def _raw(application: AsgiApp) -> Callable[[], Awaitable[Response]]:
    async def answer() -> Response:
        return RawResponse(application)

    return answer


def _raw_by_id(application: AsgiApp) -> Callable[[str], Awaitable[Response]]:
    async def answer(response_id: str) -> Response:  # the endpoint takes it from the scope
        return RawResponse(application)

    return answer


def _add_models(api: FastAPI, gatekeeper: Gatekeeper, model_list: ModelList) -> None:
    @api.get("/v1/models", summary="The models served here", responses=responses_of(401, answer=ModelCards))
    async def models(request: Request) -> Response:
        body = await model_list.read_list(gatekeeper.tenant_of(request.headers.raw))
        return Response(body, media_type="application/json")

    @api.get("/v1/models/{model:path}", summary="One of them", responses=responses_of(401, 404, answer=ModelCard))
    async def model(request: Request, model: str) -> Response:
        cards = await model_list.read(gatekeeper.tenant_of(request.headers.raw))
        if model not in cards:
            raise model_not_found(model, cards)
        return Response(cards[model].body, media_type="application/json")


async def http_error(request: Request, error: Exception) -> Response:
    """The framework's own errors, in OpenAI's shape."""
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
