"""Measurements of bench/picker.py other than times: the picker's decisions on a whole trace beside the gateway's, and
requests that fail while the picker's process ends and starts again."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import NamedTuple

import aiohttp
from traces.session import Trace

from gateway_load.load_generator import generate_load, requests_of
from gateway_load.prompts import MODEL
from spillway_gateway.testing.envoy import envoy_config, running_envoy

VOCABULARY = 49_152
CONNECTIONS = 16
BEFORE_SECONDS, LOAD_SECONDS = 2.0, 14.0
KILLS, KILL_SECONDS = 6, 6.0  # of one load; it lasts so much longer for each further one
RETRIES = 1_000

StartGateway = Callable[[], AbstractContextManager[subprocess.Popen[bytes]]]


def prompts_of(trace: Trace) -> Iterator[list[int]]:
    """Return the trace's prompts as token ids, in the order of their times if each answer takes a second."""
    requests: list[tuple[float, int, list[int]]] = []
    for number, session in enumerate(trace.sessions):
        at, context = session.start_seconds, list[int]()
        for turn in session.turns:
            at += turn.pause_seconds
            context += [token % VOCABULARY for segment in turn.added for token in segment.ids()]
            requests.append((at, number, list(context)))
            context += [token % VOCABULARY for token in turn.answer.ids()]
            at += 1.0
    return (prompt for _, _, prompt in sorted(requests, key=lambda request: request[:2]))


async def decisions(urls: Sequence[str], trace: Trace) -> dict[str, float]:
    """Send each request of the trace to each of these, of equal state, and compare the engines that got it."""
    chosen: list[list[str]] = [[] for _ in urls]
    async with aiohttp.ClientSession() as session:
        for prompt in prompts_of(trace):
            body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 1})
            headers = {"content-type": "application/json"}
            for engines, url in zip(chosen, urls, strict=True):
                async with session.post(f"{url}/v1/completions", data=body, headers=headers) as reply:
                    await reply.read()
                    engines.append(reply.headers["x-spillway-engine"])
    first, *others = chosen
    differ = sum(len({*each}) > 1 for each in zip(first, *others, strict=True))
    fewest = min(Counter(first).values())
    return {"trace_requests": len(first), "trace_engines_differ": differ, "trace_requests_of_one_engine_min": fewest}


class Case(NamedTuple):
    """by: what ends the picker. kills: times under one load."""

    name: str
    by: signal.Signals
    kills: int = 1
    retries: int = 0
    keeps_bodies: bool = False
    stream: bool = False


CASES = (
    Case("ended", signal.SIGTERM),
    Case("killed", signal.SIGKILL),
    Case("killed_and_repeated", signal.SIGKILL, retries=RETRIES),
    Case("killed_bodies_kept", signal.SIGKILL, KILLS, keeps_bodies=True),
    Case("killed_bodies_kept_streams", signal.SIGKILL, KILLS, keeps_bodies=True, stream=True),
)


async def restarts(
    start_gateway: StartGateway, picker: int, engines: Sequence[int], chats: list[bytes]
) -> dict[str, float]:
    """Requests, and connections of CONNECTIONS on which one failed, while the picker's process ends under load and
    starts again; Envoy fails open."""
    report: dict[str, float] = {}
    addresses = [f"127.0.0.1:{engine}" for engine in engines]
    for case in CASES:
        bodies = [json.dumps(json.loads(chat) | {"stream": case.stream}).encode() for chat in chats]
        config = envoy_config(picker, fail_open_to=addresses, retries=case.retries, keeps_bodies=case.keeps_bodies)
        kills = 0
        async with running_envoy(config) as url:
            with ExitStack() as stack:
                process = await asyncio.to_thread(stack.enter_context, start_gateway())
                port = int(url.rpartition(":")[2])
                loading = asyncio.create_task(
                    generate_load(
                        [port],
                        requests_of(itertools.cycle(bodies), port),
                        stream=case.stream,
                        concurrent=CONNECTIONS,
                        warm_seconds=0.0,
                        seconds=LOAD_SECONDS + (case.kills - 1) * KILL_SECONDS,
                        at_start=lambda: None,
                        at_end=lambda: None,
                    )
                )
                while kills < case.kills and not loading.done():
                    await asyncio.sleep(BEFORE_SECONDS)
                    process.send_signal(case.by)
                    kills += not loading.done()
                    await asyncio.to_thread(process.wait)
                    process = await asyncio.to_thread(stack.enter_context, start_gateway())
                measured = await loading
        report[f"picker_{case.name}_times"] = kills
        report[f"picker_{case.name}_requests"] = len(measured.whole)
        report[f"picker_{case.name}_failed"] = measured.failures
    return report
