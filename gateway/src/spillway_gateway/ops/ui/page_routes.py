"""Routes of the live page. Its three files are read once and served with a strict content security policy."""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib.resources import files

import msgspec
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from spillway_gateway.access.admission import Admission
from spillway_gateway.access.gatekeeper import Gatekeeper
from spillway_gateway.error_bodies import response_of
from spillway_gateway.errors import GatewayError
from spillway_gateway.fleet.model_fleet import ModelFleet
from spillway_gateway.fleet.recent import Recent
from spillway_gateway.lifecycle import Lifecycle
from spillway_gateway.ops.ui.snapshot import snapshot

_FILES = {
    "/ui/": ("page.html", "text/html; charset=utf-8"),
    "/ui/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/ui/page.css": ("page.css", "text/css; charset=utf-8"),
}
# Scripts, styles and requests of its own origin alone, so that injected text cannot become any of them.
SECURITY_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class PageRoutes:
    """fleets, admissions: live objects, read at each request."""

    def __init__(
        self,
        fleets: list[ModelFleet],
        admissions: Mapping[str, Admission],
        recent: Recent,
        lifecycle: Lifecycle,
        gatekeeper: Gatekeeper,
    ) -> None:
        self._fleets = fleets
        self._admissions = admissions
        self._recent = recent
        self._lifecycle = lifecycle
        self._gatekeeper = gatekeeper
        folder = files("spillway_gateway.ops.ui")
        self._contents = {path: folder.joinpath(name).read_bytes() for path, (name, _) in _FILES.items()}

    def routes(self, *, require_key: bool) -> list[Route]:
        """require_key: the listener is open to clients too, so the state needs an operator's key. The page itself holds
        no state, and prompts for the key."""
        state = self._state_for_keys if require_key else self._state
        static = [Route(path, self._file) for path in _FILES]
        return [Route("/ui", self._to_page), *static, Route("/ui/state", state)]

    async def _to_page(self, request: Request) -> Response:
        return RedirectResponse("ui/", 307, SECURITY_HEADERS)  # relative: a path in front of the gateway stays

    async def _file(self, request: Request) -> Response:
        path = request.url.path
        return Response(self._contents[path], headers=SECURITY_HEADERS, media_type=_FILES[path][1])

    async def _state(self, request: Request) -> Response:
        document = snapshot(
            self._fleets,
            self._admissions,
            self._recent,
            draining=self._lifecycle.draining,
            now=time.time(),
            monotonic=time.monotonic(),
        )
        return Response(msgspec.json.encode(document), headers=SECURITY_HEADERS, media_type="application/json")

    async def _state_for_keys(self, request: Request) -> Response:
        try:
            self._gatekeeper.allow_operator(request.headers.raw)
        except GatewayError as error:
            return response_of(error, SECURITY_HEADERS)
        return await self._state(request)
