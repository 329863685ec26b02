"""The clients against a scripted server: what counts as wrong, what as excused, and that the check can fail."""

from __future__ import annotations

import json
from collections.abc import Iterator
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

from spillway_gateway.testing.fake_engine import FakeEngine, Scripted
from spillway_gateway.testing.fake_engine_host import served_in_thread
from spillway_gateway.testing.faults import DieInStream, ErrorInStream, Fault, Status

RIGHT = list(range(100, 100 + ANSWER_TOKENS))


def choice(tokens: list[int]) -> dict[str, Any]:
    """A choice as vLLM sends it; the model is sure of every token."""
    return {
        "token_ids": tokens,
        "logprobs": {"top_logprobs": [{f"token_id:{token}": -0.1, "token_id:7": -3.0} for token in tokens]},
    }


class ScriptedEngine(FakeEngine):
    """answer: the token ids of each reply."""

    def __init__(self) -> None:
        super().__init__(model="m", name="engine-0", name_header="x-spillway-engine", script=self.scripted)
        self.answer = list(RIGHT)

    def scripted(self, path: str, body: dict[str, Any]) -> Scripted:
        usage = {"prompt_tokens_details": {"cached_tokens": 256}}
        events = [{"choices": [choice([token])]} for token in self.answer]
        return Scripted({"choices": [choice(self.answer)], "usage": usage}, [*events, {"choices": [], "usage": usage}])


MODES: dict[str, Fault] = {
    "refuse": Status(503),
    "cut": DieInStream(3),  # after three tokens
    "error": ErrorInStream(3),
}


@pytest.fixture
def engine() -> Iterator[ScriptedEngine]:
    with served_in_thread(ScriptedEngine()) as made:
        yield made


@pytest.fixture
def url(engine: ScriptedEngine) -> str:
    return engine.url


@pytest.fixture
def outages() -> Outages:
    return Outages(("engine-0", GATEWAY))


REFERENCE = Reference(make_prompt("one", 4), "tenant", scored(choice(RIGHT)), 0.02, frozenset([0, 512]))


def make_load(url: str, outages: Outages, inject_wrong: bool = False) -> Load:
    return Load((REFERENCE,), {"engine-0": url}, url, "m", outages, seed=1, clients=2, inject_wrong=inject_wrong)


@pytest.mark.parametrize("target", ["engine-0", GATEWAY])
def test_right_and_wrong_answers(url: str, engine: ScriptedEngine, outages: Outages, target: str) -> None:
    load = make_load(url, outages)
    with httpx.Client(timeout=120) as client:
        load.ask(client, REFERENCE, target)
        load.ask(client, REFERENCE, target)
        assert load.tally.wrong == 0
        engine.answer[7] += 1
        load.ask(client, REFERENCE, target)
    assert (load.tally.answers, load.tally.wrong) == (3, 1)
    assert load.tally.by_cached == {"part": 3}
    assert load.tally.unrecorded_lengths == 3, "256 cached tokens were never recorded, and checked all the same"
    assert "WRONG" in load.tally.texts[0]
    assert json.loads(engine.seen[0].body)["cache_salt"] == "tenant"


def test_a_short_answer_is_wrong(url: str, engine: ScriptedEngine, outages: Outages) -> None:
    engine.answer.pop()
    load = make_load(url, outages)
    with httpx.Client(timeout=120) as client:
        load.ask(client, REFERENCE, "engine-0")
    assert load.tally.wrong == 1


def test_the_check_can_fail(url: str, outages: Outages) -> None:
    load = make_load(url, outages, inject_wrong=True)
    load.start()
    eventually("enough answers", lambda: load.tally.answers > INJECTED_AT)
    load.stop()
    assert load.tally.wrong == 1
    assert not load.tally.failed


@pytest.mark.parametrize("mode", list(MODES))
def test_failures_without_a_fault_have_no_excuse(url: str, engine: ScriptedEngine, outages: Outages, mode: str) -> None:
    engine.fault = MODES[mode]
    load = make_load(url, outages)
    with httpx.Client(timeout=120) as client:
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
        ("error", GATEWAY, True),  # some tokens, then an error event
        ("cut", GATEWAY, False),  # some tokens, then nothing: no error event
        ("refuse", GATEWAY, False),  # before the first token another engine must answer
        ("refuse", "engine-0", True),  # asked directly there is no other
    ],
)
def test_what_a_killed_engine_excuses(
    url: str,
    engine: ScriptedEngine,
    outages: Outages,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    target: str,
    excused: bool,
) -> None:
    Times(outages, monkeypatch, "engine-0", excuses=True)
    engine.fault = MODES[mode]
    load = make_load(url, outages)
    with httpx.Client(timeout=120) as client:
        load.ask(client, REFERENCE, target)
    assert bool(load.tally.excused) == excused
    assert bool(load.tally.failed) != excused


def test_targets_open_and_close() -> None:
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
    assert outages.excuse("engine-0", 5.5, 6.0) is None, "a direct request has checked the target"
    assert outages.excuse("engine-0", 9.5, 10.0, routed=True) == "engine_killed"
    assert outages.excuse("engine-0", 20.5, 21.0, routed=True) is None, "begun after the successor was ready"


def test_a_closed_target_is_not_asked(url: str, engine: ScriptedEngine, outages: Outages) -> None:
    outages.close("engine-0", "engine_killed")
    load = make_load(url, outages)
    with httpx.Client(timeout=120) as client:
        load.ask(client, REFERENCE, "engine-0")
    assert engine.seen == []
    assert load.tally.answers == 0
