"""Engines that are killed under requests in the four dialects, plain and streamed, before and within their answers."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
from stack_driver.deadlines import eventually
from stack_driver.engine_metrics import Reading
from stack_driver.engine_processes import engine_core, kill_group, vllm_group
from stack_driver.other_gateway import other_gateway

from .dialects import DIALECTS, PATHS, Crowd, Exchange, body_of
from .fleet import Fleet, words

PART = "failover"
NAME = "gateway-without-comments"
PROMPT_WORDS = 200  # computed in a second or more, so most of them wait when the engine ends
SHORT_WORDS = 10
TOKENS_MAX = 8
LONG_TOKENS_MAX = 600
STREAMS_MAX = 6  # of each dialect, until one is on the engine that is killed: the gateway decides where each goes
TWINS = 2  # of each kind of request: both engines get some
KILLS: dict[str, Callable[[int], None]] = {
    "core": lambda group: engine_core(group).signal(signal.SIGKILL),
    "server and core": kill_group,
}


def run(fleet: Fleet) -> None:
    # A comment would begin the reply before an engine is known, and its head would not name the engine.
    with other_gateway(fleet.stack, NAME, {"timeouts": {"keepAliveSeconds": 0}}) as url:
        for index, (how, kill) in enumerate(KILLS.items()):
            _killed(fleet, url, index, how, kill)


def _killed(fleet: Fleet, url: str, index: int, how: str, kill: Callable[[int], None]) -> None:
    """Streams that have begun, then requests that wait for their prefill, then the kill."""
    victim, crowd = f"engine-{index}", Crowd(url)
    fleet.ready()
    eventually("the gateway sends requests to both engines", lambda: _both_take_requests(fleet, url))
    before = fleet.stack.process(victim)
    ejections = _ejections(url, victim)
    for dialect in DIALECTS:
        for number in range(STREAMS_MAX):
            name = f"{how.replace(' ', '-')}-within-{dialect}-{number}"
            text = f"{words(name, SHORT_WORDS)}. Tell a very long story about the sea and a ship."
            one = crowd.send(name, dialect, body_of(dialect, fleet.model, text, LONG_TOKENS_MAX, stream=True))
            eventually("the stream has begun", partial(_begun, one))
            if one.engine == victim:
                break
    assert _dialects(_begun_on(crowd, victim)) == {*DIALECTS}, "streams of each dialect are under way there"
    waiting = []
    for number in range(TWINS):
        for dialect in DIALECTS:
            for stream in (False, True):
                name = f"{how.replace(' ', '-')}-before-{dialect}-{'stream' if stream else 'plain'}-{number}"
                body = body_of(dialect, fleet.model, words(name, PROMPT_WORDS), TOKENS_MAX, stream=stream)
                waiting.append(crowd.send(name, dialect, body))
    eventually(
        "the gateway has sent them", lambda: _routed(url, sum(not one.ended.is_set() for one in crowd.exchanges))
    )
    hit = _begun_on(crowd, victim)
    empty = [one for one in waiting if not one.text and not one.ended.is_set()]
    kill(vllm_group(before))
    for one in crowd.exchanges:
        one.left = one not in hit and one not in empty  # which takes minutes on the other engine
    crowd.join()

    log = fleet.stack.local.folder.log_file(NAME).read_text(errors="replace")
    moved = {(one.dialect, one.stream) for one in empty if f"request {one.name}: " in log}
    lost = [one for one in empty if not one.answered]
    seen = f"{len(lost)} without an answer; moved: " + (
        ", ".join(sorted(f"{dialect} {'stream' if stream else 'plain'}" for dialect, stream in moved)) or "none"
    )
    fleet.rows.add(PART, f"kill -9 of {how}, {len(empty)} requests before an answer", seen, not lost and bool(moved))
    _show(lost)

    interrupted = [one for one in hit if not one.answered]
    unclear = [one for one in interrupted if not one.error_is_clear]
    ends = f"{len(interrupted)} interrupted in {len(_dialects(interrupted))} dialects"
    case = f"kill -9 of {how}, {len(hit)} streams within their answers"
    held = not unclear and _dialects(interrupted) == {*DIALECTS}
    fleet.rows.add(PART, case, f"{ends}, {len(unclear)} without a clear error", held)
    _show(unclear)
    ejected, state = _ejections(url, victim) - ejections, _state(url, victim)
    out = state != "routable" or ejected > 0
    fleet.rows.add(PART, f"{how}: the engine gets no requests", f"{state}, {ejected:.0f} ejections", out)
    after = [
        httpx.post(f"{url}{PATHS[one]}", json=body_of(one, fleet.model, "Hello", 1), timeout=120) for one in DIALECTS
    ]
    seen = ", ".join(f"{reply.status_code} {reply.headers.get('x-spillway-engine')}" for reply in after)
    fleet.rows.add(PART, f"{how}: the next request of each dialect", seen, all(one.status_code == 200 for one in after))
    fleet.stack.local.wait_engine_ready(index, not_process=before)
    fleet.ready()
    fleet.rows.add(PART, f"{how}: started again, each engine answers", "", fleet.each_answers())


def _begun(one: Exchange) -> bool:
    return bool(one.parts) or one.ended.is_set()


def _begun_on(crowd: Crowd, victim: str) -> list[Exchange]:
    return [one for one in crowd.exchanges if one.engine == victim and one.parts and not one.ended.is_set()]


def _dialects(exchanges: list[Exchange]) -> set[str]:
    return {one.dialect for one in exchanges}


def _engines(url: str) -> dict[str, dict[str, Any]]:
    document = httpx.get(f"{url}/ui/state", timeout=120).json()
    return {engine["name"]: engine for model in document["models"] for engine in model["engines"]}


def _both_take_requests(fleet: Fleet, url: str) -> bool:
    """Send requests until both engines take them: after a failure a request shows the gateway that an engine works
    again."""
    for dialect in DIALECTS:
        httpx.post(f"{url}{PATHS[dialect]}", json=body_of(dialect, fleet.model, "Hello", 1), timeout=120)
    return all(engine["routable"] and not engine["slowStart"] for engine in _engines(url).values())


def _routed(url: str, requests: int) -> bool:
    """Whether engines have this many requests of the gateway's."""
    return sum(engine["runningRequests"] for engine in _engines(url).values()) >= requests


def _ejections(url: str, name: str) -> float:
    page = Reading.parse(httpx.get(f"{url}/metrics", timeout=120).text)
    return page.total("spillway_gateway_engine_ejections_total", engine=name)


def _state(url: str, name: str) -> str:
    engine = _engines(url)[name]
    return "routable" if engine["routable"] else str(engine["says"])


def _show(exchanges: list[Exchange]) -> None:
    for one in exchanges[:8]:
        print("     ", one, flush=True)
