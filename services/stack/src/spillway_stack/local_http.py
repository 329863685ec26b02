"""Requests to the HTTP servers of this machine."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from spillway_stack.errors import StackError

READ_SECONDS = 5.0  # for a page that a server has at hand


@dataclass(frozen=True, slots=True)
class Probe:
    ready: bool
    detail: str  # the server's reason, or why the request failed


def probe_ready(port: int, path: str | None, timeout_seconds: float = 2.0) -> Probe:
    """Ask if a server is ready: by status 200, or by an accepted connection if `path` is None. Never raises."""
    try:
        if path is None:
            with socket.create_connection(("127.0.0.1", port), timeout_seconds):
                return Probe(True, "")
        status, body = get(port, path, timeout_seconds)
    except ConnectionRefusedError:
        return Probe(False, "starting")
    except (OSError, http.client.HTTPException) as error:
        return Probe(False, type(error).__name__)
    return Probe(status == 200, _reason(body) if status != 200 else "")


def get(port: int, path: str, timeout_seconds: float) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_seconds)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


@contextmanager
def exchange(
    port: int, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_seconds: float
) -> Iterator[http.client.HTTPResponse]:
    """Send a request. Raises StackError if the status is not 200, the answer breaks off or is not JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_seconds)
    try:
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            said = response.read(500)
            raise StackError(f"port {port} answered {path} with status {response.status}: {said!r}; see make logs")
        yield response
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise StackError(f"the request to port {port} failed: {reason}; see make status") from error
    finally:
        connection.close()


def _reason(body: bytes) -> str:
    try:
        answer: Any = json.loads(body)
    except ValueError:
        return body.decode(errors="replace")[:120]
    return str(answer.get("reason", answer) if isinstance(answer, dict) else answer)[:200]
