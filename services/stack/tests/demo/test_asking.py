"""Questions to a fake engine on loopback."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from spillway_gateway.testing.fake_engine import FakeEngine, Scripted
from spillway_gateway.testing.fake_engine_host import served_in_thread
from spillway_gateway.testing.faults import Status
from spillway_stack.demo.asking import ask, ask_one_token, count_prompt_tokens, is_in_slow_start, take_blocks
from spillway_stack.errors import StackError

USAGE = {"choices": [], "usage": {"prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": 32}}}
ROLE = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}


def piece(text: str, *token_ids: int) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}, "token_ids": list(token_ids)}]}


class Engine(FakeEngine):
    """Streams `events`."""

    def __init__(self) -> None:
        super().__init__(
            model="m",
            name="engine-0",
            name_header="x-spillway-engine",
            tokenize=lambda body: [0] * 12,
            script=lambda path, body: Scripted(events=self.events),
        )
        self.events: list[dict[str, Any]] = [ROLE, piece("Lis", 5), piece("bon", 6, 7), USAGE]

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(seen.body) for seen in self.seen]


@pytest.fixture
def engine() -> Iterator[Engine]:
    with served_in_thread(Engine()) as served:
        yield served


def test_an_answer_holds_text_tokens_usage_and_headers(engine: Engine) -> None:
    answer = ask(engine.port, "m", [{"role": "user", "content": "?"}])
    assert (answer.text, answer.token_ids) == ("Lisbon", (5, 6, 7))
    assert (answer.prompt_tokens, answer.cached_tokens) == (40, 32)
    assert answer.headers["x-spillway-engine"] == "engine-0"
    assert answer.ttft_seconds > 0


def test_the_lead_of_each_token_is_reported(engine: Engine) -> None:
    def sure(*leads: float) -> dict[str, Any]:
        return {"content": [{"top_logprobs": [{"logprob": -0.5}, {"logprob": -0.5 - lead}]} for lead in leads]}

    for event, leads in zip(engine.events[1:], ((2.0,), (1.0, 3.0)), strict=False):
        event["choices"][0]["logprobs"] = sure(*leads)
    assert ask(engine.port, "m", []).leads == (2.0, 1.0, 3.0)


def test_the_request_is_greedy_streamed_and_bounded(engine: Engine) -> None:
    ask(engine.port, "m", [])
    (body,) = engine.bodies
    assert (body["temperature"], body["stream"], body["max_completion_tokens"]) == (0, True, 16)
    assert body["stream_options"] == {"include_usage": True}
    assert body["return_token_ids"] is True


def test_an_engine_that_caches_nothing_may_leave_the_details_out(engine: Engine) -> None:
    engine.events = [piece("x", 1), {"choices": [], "usage": {"prompt_tokens": 4, "prompt_tokens_details": None}}]
    assert ask(engine.port, "m", []).cached_tokens == 0


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
        ask(engine.port, "m", [])


def test_a_refusal_is_passed_on_with_its_status(engine: Engine) -> None:
    engine.fault = Status(503)
    with pytest.raises(StackError, match="status 503"):
        ask(engine.port, "m", [])
    with pytest.raises(StackError, match="status 503"):
        ask_one_token(engine.port, "m")
    with pytest.raises(StackError, match="status 503"):
        take_blocks(engine.port, "m", 3)


def test_a_closed_port_is_an_error() -> None:
    with served_in_thread(Engine()) as closed:
        port = closed.port
    with pytest.raises(StackError, match=f"request to port {port} failed"):
        ask(port, "m", [])


def test_prompt_tokens_are_counted_with_the_chat_template(engine: Engine) -> None:
    messages = [{"role": "user", "content": "?"}]
    assert count_prompt_tokens(engine.port, "m", messages) == 12
    assert engine.bodies == [{"model": "m", "messages": messages}]


def test_blocks_are_taken_by_answers_of_one_request(engine: Engine) -> None:
    """One request, because the first of several could have ended when the last arrives."""
    take_blocks(engine.port, "m", 40)
    (body,) = engine.bodies
    assert (body["n"], body["max_tokens"] > 1) == (40, True)


def test_a_gateway_that_does_not_say_so_is_an_error(engine: Engine) -> None:
    """An engine of an older release, or behind a key, does not say so."""
    with pytest.raises(StackError, match="status 404"):
        is_in_slow_start(engine.port)
