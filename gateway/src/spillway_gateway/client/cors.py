"""CORS (https://fetch.spec.whatwg.org/#http-cors-protocol): lets pages of other origins read the gateway's answers.

The headers belong to a connection's reply, whoever makes it: an engine, the gateway's own routes, an error. What
engines say of it is left out (upstream/forward.py), so no header comes twice.
"""

from __future__ import annotations

from typing import NamedTuple

from spillway_gateway.config.cors import ANY, CorsConfig

Headers = list[tuple[bytes, bytes]]
_ORIGIN = b"access-control-allow-origin"
_METHODS = "DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT"
_SAFE_HEADERS = ("Accept", "Accept-Language", "Content-Language", "Content-Type")
_MAX_AGE_SECONDS = 600  # for which a browser keeps the answer to a preflight


class Preflight(NamedTuple):
    """The answer to a browser's question what it may send."""

    status: int
    headers: Headers
    body: bytes


class Cors:
    """One policy. Pure."""

    def __init__(self, config: CorsConfig) -> None:
        self._any = ANY in config.origins
        self._origins = frozenset(origin.encode() for origin in config.origins)
        self._methods = _METHODS if ANY in config.methods else ", ".join(config.methods)
        self._any_header = ANY in config.headers
        self._headers = ", ".join(sorted({*_SAFE_HEADERS, *config.headers}))

    def answer_headers(self, request: Headers) -> Headers:
        """The headers that every answer to this request gets besides its own."""
        if not self._origins:
            return []
        origin = next((value for name, value in request if name == b"origin"), None)
        if self._any:
            return [(_ORIGIN, b"*")] if origin is not None else []
        vary = (b"vary", b"Origin")  # so that no cache gives one origin the answer to another
        return [(_ORIGIN, origin), vary] if origin is not None and origin in self._origins else [vary]

    def refusal_headers(self, read: Headers) -> Headers:
        """The headers that a refusal gets besides its own. read: The request's headers before its fault, perhaps
        without its origin."""
        return [(_ORIGIN, b"*")] if self._any else self.answer_headers(read)

    def preflight(self, request: Headers) -> Preflight | None:
        """Return the answer to a preflight; None: the request is none, or nothing is allowed here. A preflight needs no
        key, which browsers do not send with it."""
        asked = dict(request)
        origin, method = asked.get(b"origin"), asked.get(b"access-control-request-method")
        if not self._origins or origin is None or method is None:
            return None
        wanted = asked.get(b"access-control-request-headers", b"")
        refused = [
            what
            for what, allowed in (
                ("origin", self._any or origin in self._origins),
                ("method", method.decode("latin-1") in self._methods.split(", ")),
                ("headers", self._allows(wanted)),
            )
            if not allowed
        ]
        if refused:
            return Preflight(400, [], f"Not allowed by the gateway's cors: {', '.join(refused)}".encode())
        granted = wanted if self._any_header and wanted else self._headers.encode()
        return Preflight(
            200,
            [
                (b"access-control-allow-methods", self._methods.encode()),
                (b"access-control-allow-headers", granted),
                (b"access-control-max-age", b"%d" % _MAX_AGE_SECONDS),
                (b"vary", b"Access-Control-Request-Headers"),
            ],
            b"OK",
        )

    def _allows(self, wanted: bytes) -> bool:
        names = {name.strip().lower() for name in wanted.decode("latin-1").split(",") if name.strip()}
        return self._any_header or names <= {name.lower() for name in self._headers.split(", ")}
