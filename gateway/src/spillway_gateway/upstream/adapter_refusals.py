"""Replies in which an engine refuses a request for the sake of its LoRA adapter. Pure."""

from __future__ import annotations

from spillway_gateway.error_bodies import error_in
from spillway_gateway.errors import AdapterNotServed
from spillway_gateway.fleet.engine import Engine

# Status -> what vLLM's message says: the adapter is not loaded and no resolver finds it, or it could not be loaded.
REFUSED = {404: "does not exist", 400: "could not be loaded"}
_MESSAGE_CHARS_MAX = 500


def require_adapter(engine: Engine, adapter: str | None, status: int, body: bytes) -> None:
    """Raises AdapterNotServed if the reply says that the engine does not serve the request's adapter; other errors
    are the client's to see. adapter: None if the request names none."""
    if adapter is None or status not in REFUSED:
        return
    error = error_in(body)
    if error is None or adapter not in error.message or REFUSED[status] not in error.message:
        return
    said = error.message[:_MESSAGE_CHARS_MAX]
    failure = AdapterNotServed(f"Engine {engine.name} does not serve the adapter {adapter!r}: {said}")
    failure.status = status
    if status != 404:
        failure.code = "adapter_not_loaded"
    raise failure
