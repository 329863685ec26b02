"""Against a real HTTP server on loopback that answers like an engine."""

import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from spillway_stack.demo.asking import ask, ask_one_token, count_prompt_tokens
from spillway_stack.errors import StackError

USAGE = {"choices": [], "usage": {"prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": 32}}}
ROLE = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}


def piece(text: str, *token_ids: int) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}, "token_ids": list(token_ids)}]}


class Engine(http.server.ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = 200
        self.events: list[dict[str, Any]] = [ROLE, piece("Lis", 5), piece("bon", 6, 7), USAGE]
        self.bodies: list[dict[str, Any]] = []


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Engine

    def do_POST(self) -> None:
        engine = self.server
        engine.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(engine.status)
        self.send_header("X-Spillway-Engine", "engine-0")
        self.end_headers()
        if self.path == "/v1/chat/completions":
            for event in engine.events:
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")
        else:
            self.wfile.write(json.dumps({"count": 12, "path": self.path}).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_an_answer_holds_text_tokens_usage_and_headers(engine: Engine) -> None:
    answer = ask(engine.server_port, "m", [{"role": "user", "content": "?"}])
    assert (answer.text, answer.token_ids) == ("Lisbon", (5, 6, 7))
    assert (answer.prompt_tokens, answer.cached_tokens) == (40, 32)
    assert answer.headers["x-spillway-engine"] == "engine-0"
    assert answer.ttft_seconds > 0


def test_the_lead_of_each_token_is_reported(engine: Engine) -> None:
    def sure(*leads: float) -> dict[str, Any]:
        return {"content": [{"top_logprobs": [{"logprob": -0.5}, {"logprob": -0.5 - lead}]} for lead in leads]}

    for event, leads in zip(engine.events[1:], ((2.0,), (1.0, 3.0)), strict=False):
        event["choices"][0]["logprobs"] = sure(*leads)
    assert ask(engine.server_port, "m", []).leads == (2.0, 1.0, 3.0)


def test_the_request_is_greedy_streamed_and_bounded(engine: Engine) -> None:
    ask(engine.server_port, "m", [])
    (body,) = engine.bodies
    assert (body["temperature"], body["stream"], body["max_completion_tokens"]) == (0, True, 16)
    assert body["stream_options"] == {"include_usage": True}
    assert body["return_token_ids"] is True


def test_an_engine_that_caches_nothing_may_leave_the_details_out(engine: Engine) -> None:
    engine.events = [piece("x", 1), {"choices": [], "usage": {"prompt_tokens": 4, "prompt_tokens_details": None}}]
    assert ask(engine.server_port, "m", []).cached_tokens == 0


@pytest.mark.parametrize(
    ("events", "complaint"),
    [
        ([ROLE, USAGE], "no content"),
        ([piece("x", 1)], "no usage"),
        ([piece("x"), USAGE], "no token ids"),
        ([{"error": {"message": "gone"}}], "gone"),
    ],
)
def test_an_incomplete_stream_is_no_answer(engine: Engine, events: list[dict[str, Any]], complaint: str) -> None:
    engine.events = events
    with pytest.raises(StackError, match=complaint):
        ask(engine.server_port, "m", [])


def test_a_refusal_is_passed_on_with_its_status(engine: Engine) -> None:
    engine.status = 503
    with pytest.raises(StackError, match="status 503"):
        ask(engine.server_port, "m", [])
    with pytest.raises(StackError, match="status 503"):
        ask_one_token(engine.server_port, "m")


def test_a_closed_port_is_an_error(engine: Engine) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as closed:
        port = closed.server_port
    with pytest.raises(StackError, match=f"request to port {port} failed"):
        ask(port, "m", [])


def test_prompt_tokens_are_counted_with_the_chat_template(engine: Engine) -> None:
    messages = [{"role": "user", "content": "?"}]
    assert count_prompt_tokens(engine.server_port, "m", messages) == 12
    assert engine.bodies == [{"model": "m", "messages": messages}]
