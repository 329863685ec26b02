import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from spillway_engine.ascend_acceptance.client import EngineClient, EngineFailed

USAGE = {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
METRICS = (
    'spillway_device_copy_bytes_total{direction="store",engine="0"} 10.0\n'
    'spillway_device_copy_bytes_total{direction="load",engine="0"} 4.0\n'
)


class Engine(BaseHTTPRequestHandler):
    status = 200
    tokens = 2

    def do_GET(self) -> None:
        self._answer(METRICS.encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/tokenize":
            self._answer(json.dumps({"tokens": [1, 2]}).encode())
        elif body.get("stream"):
            events = [{"choices": [{"token_ids": [token]}]} for token in range(self.tokens)]
            events.append({"choices": [], "usage": USAGE})
            lines = [f"data: {json.dumps(event)}\n\n" for event in events]
            self._answer("".join([*lines, "data: [DONE]\n\n"]).encode())
        else:
            assert body["temperature"] == 0 and body["prompt"] == [1, 2, 3]
            logprobs = {"top_logprobs": [{"token_id:5": -0.1, "token_id:6": -2.0}]}
            choice = {"token_ids": [5], "logprobs": logprobs}
            self._answer(json.dumps({"choices": [choice], "usage": USAGE}).encode())

    def _answer(self, body: bytes) -> None:
        self.send_response(self.status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def served() -> Iterator[tuple[EngineClient, type[Engine]]]:
    kind = type("Engine", (Engine,), {})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield EngineClient(server.server_address[1], "m"), kind
        server.shutdown()


def test_an_answer_has_its_likelihoods_and_what_was_cached(served) -> None:
    client, _ = served
    answer, cached = client.answer([1, 2, 3], 1)
    assert (answer.tokens, answer.tops, cached) == ((5,), ({5: -0.1, 6: -2.0},), 2)
    assert client.tokens("a text") == [1, 2]


def test_a_turn_is_timed_and_has_its_tokens(served) -> None:
    client, _ = served
    turn, answer = client.turn(3, [1, 2, 3], 2)
    assert (turn.number, turn.prompt_tokens, turn.cached_tokens, answer) == (3, 3, 2, [0, 1])
    assert turn.first_token_seconds > 0


def test_a_turn_that_ends_early_is_a_failure(served) -> None:
    client, kind = served
    kind.tokens = 1
    with pytest.raises(EngineFailed, match="1 tokens came instead of 2"):
        client.turn(0, [1], 2)


def test_a_refusal_is_told_in_the_engines_words(served) -> None:
    client, kind = served
    kind.status = 400
    with pytest.raises(EngineFailed, match="answered 400"):
        client.tokens("a text")


def test_samples_of_a_metric_are_added_up(served) -> None:
    client, _ = served
    assert client.metric("spillway_device_copy_bytes_total") == 14.0
    assert client.metric("spillway_device_copy_bytes_total", 'direction="load"') == 4.0
    assert client.metric("spillway_device_copy_path") == 0
