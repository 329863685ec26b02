"""What bench/picker.py shows beside times: the picker's decisions on a whole trace beside the gateway's, and requests
that fail while the picker's process ends and starts again."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack

import aiohttp
from traces.session import Trace

from gateway_load.load_generator import generate_load, requests_of
from gateway_load.prompts import MODEL
from spillway_gateway.testing.envoy import envoy_config, running_envoy

VOCABULARY = 49_152
CONNECTIONS = 16
BEFORE_SECONDS, LOAD_SECONDS = 2.0, 14.0
RETRIES = 1_000

StartGateway = Callable[[], AbstractContextManager[subprocess.Popen[bytes]]]


def prompts_of(trace: Trace) -> Iterator[list[int]]:
    """Its prompts as token ids, in the order of their times if an answer takes a second."""
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


async def restarts(
    start_gateway: StartGateway, picker: int, engines: Sequence[int], bodies: list[bytes]
) -> dict[str, float]:
    """Requests, and connections of CONNECTIONS on which one failed, while the picker's process ends under load and
    starts again; Envoy fails open."""
    report: dict[str, float] = {}
    cases = [
        ("ended", signal.SIGTERM, 0),
        ("killed", signal.SIGKILL, 0),
        ("killed_and_repeated", signal.SIGKILL, RETRIES),
    ]
    for name, by, retries in cases:
        with ExitStack() as stack:
            process = stack.enter_context(start_gateway())
            addresses = [f"127.0.0.1:{engine}" for engine in engines]
            async with running_envoy(envoy_config(picker, fail_open_to=addresses, retries=retries)) as url:
                port = int(url.rpartition(":")[2])
                loading = asyncio.create_task(
                    generate_load(
                        [port],
                        requests_of(itertools.cycle(bodies), port),
                        stream=False,
                        concurrent=CONNECTIONS,
                        warm_seconds=0.0,
                        seconds=LOAD_SECONDS,
                        at_start=lambda: None,
                        at_end=lambda: None,
                    )
                )
                await asyncio.sleep(BEFORE_SECONDS)
                process.send_signal(by)
                await asyncio.to_thread(process.wait)
                await asyncio.to_thread(stack.enter_context, start_gateway())
                measured = await loading
        report[f"picker_{name}_requests"] = len(measured.whole)
        report[f"picker_{name}_failed"] = measured.failures
    return report
