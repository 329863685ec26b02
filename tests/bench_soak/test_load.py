"""The clients against a scripted server: what counts as wrong, what as excused, and that the check can fail."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from reference_answers.margins import scored
from soak.asking import ANSWER_TOKENS
from soak.load import INJECTED_AT, Load
from soak.outages import GATEWAY, Outages
from soak.references import Reference
from stack_driver.deadlines import eventually
from stack_driver.prompts import make_prompt

RIGHT = list(range(100, 100 + ANSWER_TOKENS))


def choice(tokens: list[int]) -> dict[str, Any]:
    """As vLLM tells a choice; the model is sure of every token."""
    return {
        "token_ids": tokens,
        "logprobs": {"top_logprobs": [{f"token_id:{token}": -0.1, "token_id:7": -3.0} for token in tokens]},
    }


class Script:
    """answer: what it says. mode: well, refuse (503), cut (after three tokens), tell (error event after three)."""

    def __init__(self) -> None:
        self.answer, self.mode, self.cached = list(RIGHT), "well", 256
        self.bodies: list[dict[str, Any]] = []


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def url(script: Script) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            script.bodies.append(body)
            if script.mode == "refuse":
                return self.send(503, {"error": {"message": "away", "type": "unavailable"}})
            usage = {"prompt_tokens_details": {"cached_tokens": script.cached}}
            if not body.get("stream"):
                return self.send(200, {"choices": [choice(script.answer)], "usage": usage})
            self.send_response(200)
            self.send_header("x-spillway-engine", "engine-0")
            self.end_headers()
            for token in script.answer if script.mode == "well" else script.answer[:3]:
                self.event({"choices": [choice([token])]})
            if script.mode == "cut":
                return None
            if script.mode == "tell":
                self.event({"error": {"message": "engine-0 is gone", "type": "engine_lost"}})
            else:
                self.event({"choices": [], "usage": usage})
            self.wfile.write(b"data: [DONE]\n\n")
            return None

        def send(self, status: int, document: dict[str, Any]) -> None:
            content = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def event(self, document: dict[str, Any]) -> None:
            self.wfile.write(f"data: {json.dumps(document)}\n\n".encode())

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def outages() -> Outages:
    return Outages(("engine-0", GATEWAY))


REFERENCE = Reference(make_prompt("one", 4), "tenant", scored(choice(RIGHT)), 0.02, frozenset([0, 512]))


def make_load(url: str, outages: Outages, inject_wrong: bool = False) -> Load:
    return Load((REFERENCE,), {"engine-0": url}, url, "m", outages, seed=1, clients=2, inject_wrong=inject_wrong)


@pytest.mark.parametrize("target", ["engine-0", GATEWAY])
def test_right_and_wrong_answers(url: str, script: Script, outages: Outages, target: str) -> None:
    load = make_load(url, outages)
    with httpx.Client() as client:
        load.ask(client, REFERENCE, target)
        load.ask(client, REFERENCE, target)
        assert load.tally.wrong == 0
        script.answer[7] += 1
        load.ask(client, REFERENCE, target)
    assert (load.tally.answers, load.tally.wrong) == (3, 1)
    assert load.tally.by_cached == {"part": 3}
    assert load.tally.unlearnt_lengths == 3, "256 cached tokens were never learnt, and checked all the same"
    assert "WRONG" in load.tally.texts[0]
    assert script.bodies[0]["cache_salt"] == "tenant"


def test_a_short_answer_is_wrong(url: str, script: Script, outages: Outages) -> None:
    script.answer.pop()
    load = make_load(url, outages)
    with httpx.Client() as client:
        load.ask(client, REFERENCE, "engine-0")
    assert load.tally.wrong == 1


def test_the_check_can_fail(url: str, outages: Outages) -> None:
    load = make_load(url, outages, inject_wrong=True)
    load.start()
    eventually("enough answers", lambda: load.tally.answers > INJECTED_AT)
    load.stop()
    assert load.tally.wrong == 1
    assert not load.tally.failed


@pytest.mark.parametrize("mode", ["cut", "tell", "refuse"])
def test_failures_without_a_fault_have_no_excuse(url: str, script: Script, outages: Outages, mode: str) -> None:
    script.mode = mode
    load = make_load(url, outages)
    with httpx.Client() as client:
        load.ask(client, REFERENCE, GATEWAY)
    assert sum(load.tally.failed.values()) == 1
    assert not load.tally.excused


class Times:
    """A clock that the outages read while a request is judged: the fault always falls into the request."""

    def __init__(self, outages: Outages, monkeypatch: pytest.MonkeyPatch, target: str, *, excuses: bool) -> None:
        def excuse(asked: str, begun: float, ended: float, *, routed: bool = False) -> str | None:
            return "engine_killed" if excuses and asked == target else None

        monkeypatch.setattr(outages, "excuse", excuse)


@pytest.mark.parametrize(
    ("mode", "target", "excused"),
    [
        ("tell", GATEWAY, True),  # some tokens, then a sentence
        ("cut", GATEWAY, False),  # some tokens, then nothing: nobody was told
        ("refuse", GATEWAY, False),  # before the first token another engine must answer
        ("refuse", "engine-0", True),  # asked directly there is no other
    ],
)
def test_what_a_killed_engine_excuses(
    url: str, script: Script, outages: Outages, monkeypatch: pytest.MonkeyPatch, mode: str, target: str, excused: bool
) -> None:
    Times(outages, monkeypatch, "engine-0", excuses=True)
    script.mode = mode
    load = make_load(url, outages)
    with httpx.Client() as client:
        load.ask(client, REFERENCE, target)
    assert bool(load.tally.excused) == excused
    assert bool(load.tally.failed) != excused


def test_doors() -> None:
    now = 0.0
    outages = Outages(("engine-0", "engine-1", GATEWAY), clock=lambda: now)
    now = 5.0
    outages.close("engine-0", "engine_killed")
    assert outages.open_targets() == ["engine-1", GATEWAY]
    assert outages.excuse("engine-0", 4.0, 6.0) == "engine_killed"
    assert outages.excuse("engine-0", 5.5, 6.0) is None, "begun after the kill"
    assert outages.excuse("engine-0", 3.0, 4.9) is None, "failed before it"
    assert outages.excuse("engine-1", 4.0, 6.0) is None
    outages.open("engine-0")
    assert outages.is_open("engine-0")


def test_a_drained_stop_excuses_what_outlasts_the_drain_alone() -> None:
    now = 8.0
    outages = Outages(("engine-0",), clock=lambda: now)
    outages.close("engine-0", "engine_terminated", drain_seconds=30.0)
    assert outages.excuse("engine-0", 7.0, 37.9) is None
    assert outages.excuse("engine-0", 7.0, 38.0) == "engine_terminated"


def test_what_the_gateway_routed_to_an_engine_just_killed_is_excused() -> None:
    now = 5.0
    outages = Outages(("engine-0",), clock=lambda: now)
    outages.close("engine-0", "engine_parent_killed")
    now = 9.0
    outages.open("engine-0")
    outages.close("engine-0", "engine_killed")  # later outages leave the end of earlier ones alone
    now = 20.0
    outages.open("engine-0")
    assert outages.excuse("engine-0", 5.5, 6.0, routed=True) == "engine_parent_killed"
    assert outages.excuse("engine-0", 5.5, 6.0) is None, "who asks directly has seen the door"
    assert outages.excuse("engine-0", 9.5, 10.0, routed=True) == "engine_killed"
    assert outages.excuse("engine-0", 20.5, 21.0, routed=True) is None, "begun after the successor was ready"


def test_nobody_behind_a_closed_door_is_asked(url: str, script: Script, outages: Outages) -> None:
    outages.close("engine-0", "engine_killed")
    load = make_load(url, outages)
    with httpx.Client() as client:
        load.ask(client, REFERENCE, "engine-0")
    assert script.bodies == []
    assert load.tally.answers == 0
