"""Against a real HTTP server that streams as the gateway does."""

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from spillway_stack.errors import StackError
from spillway_stack.first_answer import check_first_answer
from spillway_stack.http_probe import probe_ready

Serve = Callable[[int, str, bytes], int]


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[http.server.HTTPServer] = []

    def start(status: int, content_type: str, body: bytes) -> int:
        class Handler(http.server.BaseHTTPRequestHandler):
            def _answer(self) -> None:
                self.rfile.read(int(self.headers.get("content-length", 0)))
                self.send_response(status)
                self.send_header("content-type", content_type)
                self.send_header("content-length", str(len(body)))
                self.send_header("x-spillway-engine", "engine-1")
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = _answer

            def log_message(self, *_: Any) -> None:
                return

        server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return int(server.server_address[1])

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def events(*pieces: str) -> bytes:
    chunks = [json.dumps({"choices": [{"delta": {"content": piece}}]}) for piece in pieces]
    return "".join(f"data: {chunk}\n\n" for chunk in [*chunks, "[DONE]"]).encode()


def test_pieces_become_the_answer(serve: Serve) -> None:
    answer = check_first_answer(serve(200, "text/event-stream", events("It is ", "Paris", ".")), "m", bundled=True)

    assert (answer.text, answer.engine) == ("It is Paris.", "engine-1")
    assert 0 <= answer.first_token_seconds <= answer.total_seconds


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (200, events("It is ", "Lyon"), "which lacks 'Paris'"),
        (200, events(" "), "is empty"),
        (200, b'data: {"error": {"message": "gone"}}\n\n', "ended with an error"),
        (200, b"data: {", "failed: JSONDecodeError"),
        (503, b"{}", "status 503"),
    ],
)
def test_anything_else_is_refused(serve: Serve, status: int, body: bytes, said: str) -> None:
    with pytest.raises(StackError, match=said):
        check_first_answer(serve(status, "text/event-stream", body), "m", bundled=True)


def test_readiness_carries_the_servers_reason(serve: Serve) -> None:
    busy = probe_ready(serve(503, "application/json", b'{"ready":false,"reason":"self-check"}'), "/ready")
    ready = probe_ready(serve(200, "application/json", b"{}"), "/ready")
    closed = probe_ready(1, "/ready")

    assert (busy.ready, busy.detail) == (False, "self-check")
    assert (ready.ready, ready.detail) == (True, "")
    assert (closed.ready, closed.detail) == (False, "starting")
    assert probe_ready(serve(200, "", b""), None).ready
