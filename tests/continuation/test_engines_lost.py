"""Processes of engines are killed, stopped and drained in the middle of streams: clients see whole answers, and where
an answer may not go on elsewhere, its end as without continuation."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from chaos.machines import Replica
from continuation.clients import ANSWER_TOKENS, Stream, follow, make_stream
from continuation.machines import EngineProcess, running
from stack_driver.deadlines import eventually

STREAMS = 24
BEGUN_PIECES = 10
FAULTS: dict[str, Callable[[EngineProcess], None]] = {
    "killed": lambda engine: engine.send(signal.SIGKILL),
    "hung": lambda engine: engine.send(signal.SIGSTOP),
    "drained": lambda engine: engine.fault("drain", timeout_seconds=0.2),
}


async def hurt_midway(
    gateway: Replica,
    engines: Sequence[EngineProcess],
    streams: Sequence[Stream],
    fault: Callable[[EngineProcess], None],
) -> str:
    """The fault meets the engine with the most streams once every stream has begun; returns its name."""
    reading = asyncio.create_task(follow(gateway.url, streams))
    await asyncio.to_thread(
        eventually, "every stream has begun", lambda: all(each.pieces >= BEGUN_PIECES for each in streams)
    )
    name = Counter(each.engine for each in streams if not each.ends).most_common(1)[0][0]
    await asyncio.to_thread(fault, next(engine for engine in engines if engine.name == name))
    await reading
    return name


def counted(gateway: Replica, family: str) -> dict[str, float]:
    """Return the samples of a metric by its last label."""
    found = gateway.samples(f"spillway_gateway_{family}")
    return {labels.split('"')[-2]: value for labels, value in found.items() if value}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_client_sees_one_whole_answer(tmp_path: Path, fault: str) -> None:
    streams = [make_stream(number) for number in range(STREAMS)]
    with running(tmp_path, engines=3) as (engines, gateway):
        lost = asyncio.run(hurt_midway(gateway, engines, streams, FAULTS[fault]))
        moved = sum(each.engine == lost for each in streams)
        assert moved >= STREAMS // 3
        for stream in streams:
            assert stream.error == ""
            assert stream.text == stream.expected_text
            assert (len(stream.ids), stream.ends, stream.roles, stream.token_ids) == (1, 1, int(stream.chat), 0)
            assert stream.finishes == ["length"]
            (usage,) = stream.usages
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (stream.prompt_tokens, ANSWER_TOKENS)
        assert counted(gateway, "not_continued_answers_total") == {}
        continued = counted(gateway, "continued_answers_total")
        if fault == "hung":  # a slow machine may take another engine for hung too; its answers are as whole
            assert continued.keys() == {"idle_timeout"}
            assert continued["idle_timeout"] >= moved
        else:
            reason = "disconnected" if fault == "killed" else "ending"
            assert continued.keys() == {reason}
            assert 0 < continued[reason] <= moved, "an answer may have ended before the fault met its engine"
        assert gateway.sum_of("spillway_gateway_in_flight_requests") == 0


SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
EXCLUDED = (
    {"logprobs": True, "top_logprobs": 1},
    {"presence_penalty": 0.5},
    {"frequency_penalty": 0.5},
    {"min_tokens": 5},
    {"response_format": SCHEMA},
    {"seed": 7},
    {"tools": [FUNCTION]},
    {"return_token_ids": True},
)


def test_what_may_not_go_on_elsewhere_ends_with_an_error(tmp_path: Path) -> None:
    excluded = [make_stream(2 * number, **fields) for number, fields in enumerate(EXCLUDED)]
    plain = make_stream(len(excluded) * 2)
    with running(tmp_path, engines=2) as (engines, gateway):
        chosen, other = engines
        other.fault("not_ready")
        eventually("the other engine is left out", lambda: not gateway.engine_up(other.name))

        def kill(engine: EngineProcess) -> None:
            other.fault("clear")
            eventually("the other engine is ready", lambda: gateway.engine_up(other.name))
            engine.send(signal.SIGKILL)

        lost = asyncio.run(hurt_midway(gateway, engines, [*excluded, plain], kill))
        assert lost == chosen.name
        assert {each.engine for each in (*excluded, plain)} == {lost}
        assert (plain.error, plain.text, plain.ends) == ("", plain.expected_text, 1)
        for stream in excluded:
            assert stream.error, stream.body
            assert stream.ends == 0
            assert stream.expected_text.startswith(stream.text) and stream.text != stream.expected_text
            assert bool(stream.token_ids) is ("return_token_ids" in stream.body)
        assert counted(gateway, "continued_answers_total") == {"disconnected": 1.0}
        assert counted(gateway, "not_continued_answers_total").keys() == {"request"}
