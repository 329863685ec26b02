from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from system import legs_killed
from system.device_run import Processes
from system.legs_killed import ENDS, Engines, killed
from system.legs_load import LegsLoad


class Ended:
    """Processes that note what is done to them."""

    def __init__(self) -> None:
        self.done: list[tuple[str, str]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda of: self.done.append((name, of if isinstance(of, str) else next(iter(of))))


def answer_to(prompt: list[int]) -> dict[str, Any]:
    tokens = prompt[:3]
    tops = [{f"token_id:{token}": -0.1, "token_id:1": -3.0} for token in tokens]
    return {"choices": [{"token_ids": tokens, "logprobs": {"top_logprobs": tops}}]}


async def ask_while_engines_end(ends: list[str], fails_at: int | None = None) -> tuple[dict[str, float], Ended]:
    processes, asked = Ended(), 0

    async def complete(request: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        if asked == fails_at:
            return web.Response(status=502)
        await asyncio.sleep(0.01)
        return web.json_response(answer_to((await request.json())["prompt"]))

    application = web.Application()
    application.router.add_post("/v1/completions", complete)
    async with TestServer(application) as server:
        url = str(server.make_url("")).rstrip("/")
        engines = Engines(processes, lambda number: processes.done.append(("start", f"engine-{number}")), [url, url])
        load = LegsLoad(url, "model", 5_000, "seed")
        found = await killed(
            engines, url, load=load, requests=64, prompt_tokens=8, seconds=0.8, request_seconds=0.01, ends=ends
        )
    return found, processes


@pytest.mark.parametrize("ends", [["kill"], ["stop", "drain", "kill"]])
async def test_engines_of_both_sides_end_in_turns_and_all_answers_are_compared(
    ends: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(legs_killed, "HALTED_SECONDS", 0.0)
    found, processes = await ask_while_engines_end(ends)
    assert (found["requests"], found["failed_requests"], found["answers_differing"]) == (64, 0, 0)
    assert found["answers_differing_from_those_to_other_prompts"] == 64
    assert found["answered_last_seconds"] >= found["answered_p50_seconds"] > 0
    for side, engine in (("prefill", "engine-0"), ("decode", "engine-1")):
        counts = {end: found[f"{ENDS[end]}_of_{side}_engines"] for end in ends}
        assert sum(counts.values()) > 0
        own = [what for what, name in processes.done if name == engine]
        lost = {"kill": "kill", "stop": "halt", "drain": "terminate"}
        assert {end: own.count(lost[end]) for end in ends} == counts
        assert own.count("go_on") == counts.get("stop", 0)
        assert own.count("start") == sum(counts.values()) - counts.get("stop", 0), "a stopped engine goes on"
        assert own.count("wait_ready") == sum(counts.values())


async def test_a_request_without_an_answer_is_counted() -> None:
    found, _ = await ask_while_engines_end(["kill"], fails_at=5)
    assert (found["requests"], found["failed_requests"], found["answers_differing"]) == (64, 1, 0)


def test_an_engine_is_halted_with_the_group_that_it_started(tmp_path) -> None:
    """An engine's first process starts vLLM in a session of its own."""
    child = "import time\nprint('ready', flush=True)\ntime.sleep(600)"
    parent = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    processes = Processes(tmp_path)
    processes.start("engine-0", [sys.executable, "-c", parent])
    pids: list[int] = []
    try:
        log = tmp_path / "engine-0.log"
        while len(lines := log.read_text().split()) < 2:
            time.sleep(0.01)
        pids = [processes._running["engine-0"].pid, int(next(line for line in lines if line != "ready"))]
        processes.halt("engine-0")
        assert [wait_for(pid, "T") for pid in pids] == ["T", "T"]
        processes.go_on("engine-0")
        assert [wait_for(pid, "S") for pid in pids] == ["S", "S"]
    finally:
        for pid in pids[1:]:
            os.kill(pid, signal.SIGKILL)
        processes.end(0.1)


def wait_for(pid: int, state: str) -> str:
    """The state of the process, once it is that."""
    while (seen := Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]) != state:
        time.sleep(0.01)
    return seen
