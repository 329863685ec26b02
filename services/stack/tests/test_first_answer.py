"""The first answer of a real HTTP server that streams like the gateway."""

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from spillway_stack.errors import StackError
from spillway_stack.first_answer import check_first_answer
from spillway_stack.local_http import probe_ready

Serve = Callable[..., int]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """(status, content type, body[, body of what is asked without `stream`]) -> port"""
    servers: list[http.server.HTTPServer] = []

    def start(status: int, content_type: str, body: bytes, plain: bytes | None = None) -> int:
        class Handler(http.server.BaseHTTPRequestHandler):
            def _answer(self) -> None:
                asked = self.rfile.read(int(self.headers.get("content-length", 0)))
                streamed = not asked or json.loads(asked).get("stream")
                content = body if streamed or plain is None else plain
                self.send_response(status)
                self.send_header("content-type", content_type)
                self.send_header("content-length", str(len(content)))
                self.send_header("x-spillway-engine", "engine-1")
                self.end_headers()
                self.wfile.write(content)

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


USAGE = {"prompt_tokens": 30, "completion_tokens": 9, "total_tokens": 39}


def events(*pieces: str, finish: str | None = "stop", usage: Any = USAGE, done: bool = True) -> bytes:
    head = {"id": "chat-1", "object": "chat.completion.chunk", "model": "m"}
    chunks: list[dict[str, Any]] = [{**head, "choices": [{"delta": {"role": "assistant", "content": ""}}]}]
    chunks += [{**head, "choices": [{"delta": {"content": piece}}]} for piece in pieces]
    chunks += [{**head, "choices": [{"delta": {}, "finish_reason": finish}]}, {**head, "choices": [], "usage": usage}]
    lines = [json.dumps(chunk) for chunk in chunks] + (["[DONE]"] if done else [])
    return "".join(f"data: {line}\n\n" for line in lines).encode()


def document(text: str, finish: str = "stop", **more: Any) -> bytes:
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": finish}
    return json.dumps({"object": "chat.completion", "model": "m", "choices": [choice], "usage": USAGE, **more}).encode()


def test_pieces_become_the_answer(serve: Serve) -> None:
    port = serve(200, "text/event-stream", events("It is ", "here", "."), document("It is here."))
    answer = check_first_answer(port, "m", bundled=True)

    assert (answer.text, answer.engine) == ("It is here.", "engine-1")
    assert answer.first_token_seconds >= 0


def test_other_words_are_a_fault_only_where_no_token_is_a_near_tie(serve: Serve) -> None:
    port = serve(200, "text/event-stream", events("It is there."), document("It is here."))

    assert check_first_answer(port, "m", bundled=False).text == "It is there."
    with pytest.raises(StackError, match="differ in text: 'It is there"):
        check_first_answer(port, "m", bundled=True)


def test_an_answer_may_begin_with_its_reasoning(serve: Serve) -> None:
    streamed = events("Hm.").replace(b'"content": "Hm."', b'"reasoning_content": "Hm."')
    plain = document("Hm.").replace(b'"content": "Hm."', b'"content": null, "reasoning_content": "Hm."')

    assert check_first_answer(serve(200, "text/event-stream", streamed, plain), "m", bundled=True).text == "Hm."


GOOD = events("a")


@pytest.mark.parametrize(
    ("status", "streamed", "plain", "message"),
    [
        (200, events(" "), b"", "is empty"),
        (200, b'data: {"error": {"message": "gone"}}\n\n', b"", "ended with an error"),
        (200, b"data: {", b"", "no JSON"),
        (200, events("a", done=False), b"", "without \\[DONE\\]"),
        (200, GOOD + b"data: {}\n\n", b"", "continues after"),
        (200, events("a", finish=None), b"", "one finish_reason; this one has 1"),
        (200, events("a", finish="error"), b"", "finish_reason is 'error'"),
        (200, events("a", finish="length"), b"", "cut at 9 tokens, 16 were allowed"),
        (200, events("a", usage=None), b"", "does not add up"),
        (200, events("a", usage={**USAGE, "total_tokens": 40}), b"", "does not add up"),
        (200, events("a").replace(b"chat-1", b"chat-2", 1), b"", "has one id"),
        (200, events("a").replace(b'"role": "assistant", ', b""), b"", "the role assistant"),
        (200, events("a").replace(b".chunk", b""), b"", "no chat.completion.chunk"),
        (200, GOOD, b"{}", "no chat.completion"),
        (200, GOOD, document(""), "is empty"),
        (200, GOOD, document("a", choices=[]), "0 choices"),
        (200, GOOD, document("a", usage={**USAGE, "prompt_tokens": 31, "total_tokens": 40}), "differ in prompt_tokens"),
        (200, GOOD, document("a", model="n"), "differ in model"),
        (200, GOOD, b"{", "failed: JSONDecodeError"),
        (503, b"{}", b"{}", "status 503"),
    ],
)
def test_anything_else_is_refused(serve: Serve, status: int, streamed: bytes, plain: bytes, message: str) -> None:
    with pytest.raises(StackError, match=message):
        check_first_answer(serve(status, "text/event-stream", streamed, plain), "m", bundled=False)


def test_readiness_carries_the_servers_reason(serve: Serve) -> None:
    busy = probe_ready(serve(503, "application/json", b'{"ready":false,"reason":"self-check"}'), "/ready")
    ready = probe_ready(serve(200, "application/json", b"{}"), "/ready")
    closed = probe_ready(1, "/ready")

    assert (busy.ready, busy.detail) == (False, "self-check")
    assert (ready.ready, ready.detail) == (True, "")
    assert (closed.ready, closed.detail) == (False, "starting")
    assert probe_ready(serve(200, "", b""), None).ready
