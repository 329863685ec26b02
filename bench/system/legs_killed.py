"""Requests of two legs while engines of either side end or hang: all are answered, and as a computed prompt is.

The gateway is in the mode `always`. Half of the engines at most are away at a time. Each side loses one after the
other, at a random moment of a request's time, in one of these ways in turns:

- `kill`: SIGKILL to the engine with all its processes, and a new start.
- `stop`: SIGSTOP to all of them, for longer than the gateway takes to find an engine silent, and then SIGCONT.
- `drain`: SIGTERM to its first process, and a new start. What it does not answer in time goes to another engine.

No request loses two engines, since the gateway then takes it for one that ends engines and refuses it: an end waits
until all requests that were there at the last one are answered. Afterwards an engine computes each prompt under a salt
that no other request has. Answers have to be the same up to rounding (spillway_engine.near_ties); beside it each one is
compared with the answer to another prompt, which shows that this comparison finds differences.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from spillway_engine.near_ties import REQUEST, difference, scored
from system.device_run import Processes
from system.legs_load import REQUEST_SECONDS_MAX, LegsLoad
from system.report import percentile

ENDS = {"kill": "kills", "stop": "stops", "drain": "drains"}
HALTED_SECONDS = 15.0  # polls find an engine silent after 6 to 10 s (health.timeoutSeconds, timeoutsBeforeDown)
ANSWER_TOKENS = 32
TOGETHER = 8  # requests; one that was alone on an engine that died is not sent to another engine
REFERENCES_AT_ONCE = 4
Choice = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Engines:
    """Engines that can be ended; the first half of them prefills.

    Args:
        processes: has them under the names engine-0 and so on.
        start: starts one by its number.
        urls: by number.
    """

    processes: Processes
    start: Callable[[int], None]
    urls: Sequence[str]


async def killed(
    engines: Engines,
    gateway_url: str,
    *,
    load: LegsLoad,
    requests: int,
    prompt_tokens: int,
    seconds: float,
    request_seconds: float,
    ends: Sequence[str],
) -> dict[str, float]:
    """Ask, end engines, compare.

    Args:
        engines: engines that are ready.
        gateway_url: address to which the requests are sent.
        load: source of the prompts.
        requests: number of requests, TOGETHER at a time, at even distances.
        prompt_tokens: length of each prompt.
        seconds: time from the first request to the last.
        request_seconds: about what a request takes: an engine is ended within this time after a request was sent.
        ends: keys of ENDS, in turn.
    Returns:
        Counts and seconds by the name of the figure.
    """
    prompts = [load.prompt(prompt_tokens) for _ in range(requests)]
    half = len(engines.urls) // 2
    asked, moments = _Asked(half), random.Random(requests)
    async with load.session() as http, asyncio.TaskGroup() as group:
        enders = [
            group.create_task(_end(engines, numbers, ends, asked, lambda: moments.uniform(0.0, request_seconds)))
            for numbers in (range(half), range(half, 2 * half))
        ]
        answers = await _ask_all(http, gateway_url, prompts, seconds, asked)
        ended = await asyncio.gather(*enders)
        references = await _references(http, engines.urls[0], prompts)
    failed = [answer for answer in answers if isinstance(answer, str)]
    for error in sorted(set(failed))[:5]:
        print(f"   failed: {error}", flush=True)
    pairs = [(answer, at) for at, answer in enumerate(answers) if not isinstance(answer, str)]
    wrong = [text for answer, at in pairs if (text := difference(scored(references[at]), scored(answer))) is not None]
    for text in wrong[:5]:
        print(f"   differs: {text}", flush=True)
    foreign = [difference(scored(references[at - 1]), scored(answer)) for answer, at in pairs]
    return {
        "requests": requests,
        "failed_requests": len(failed),
        "answers_differing": len(wrong),
        "answers_differing_from_those_to_other_prompts": sum(text is not None for text in foreign),
        "answered_p50_seconds": percentile(asked.seconds, 0.5),
        "answered_last_seconds": max(asked.seconds),
    } | {
        f"{ENDS[end]}_of_{side}_engines": counts[end]
        for side, counts in zip(("prefill", "decode"), ended, strict=True)
        for end in dict.fromkeys(ends)
    }


class _Asked:
    """The requests that were sent. Tells waiters that a request was sent, or that all were answered.

    away: leaves as many engines as may be away at a time. one_ends: is held from the moment an end is planned until no
    request is left that the engine may have had. seconds: what each request took.
    """

    def __init__(self, away: int) -> None:
        self.all_answered = False
        self.away = asyncio.Semaphore(away)
        self.one_ends = asyncio.Lock()
        self.seconds: list[float] = []
        self.tasks: list[asyncio.Task[Choice | str]] = []
        self._next = asyncio.Event()

    def tell(self) -> None:
        self._next.set()
        self._next = asyncio.Event()

    async def wait(self) -> None:
        if not self.all_answered:
            await self._next.wait()

    async def answered(self) -> None:
        """Returns when all requests that were sent before are answered."""
        if self.tasks:
            await asyncio.wait(tuple(self.tasks))


async def _end(
    engines: Engines, numbers: Sequence[int], ends: Sequence[str], asked: _Asked, delay: Callable[[], float]
) -> Counter[str]:
    """End one engine of a side after the other until everything is answered; returns how many ended in which way."""
    counts: Counter[str] = Counter()
    for number, end in zip(itertools.cycle(numbers), itertools.cycle(ends), strict=False):
        async with asked.away:
            async with asked.one_ends:
                await asked.wait()
                if asked.all_answered:
                    break
                await asyncio.sleep(delay())
                await _lose(engines, number, end)
                counts[end] += 1
                await asked.answered()
            await _have_again(engines, number, end)
        if asked.all_answered:
            break
    return counts


async def _lose(engines: Engines, number: int, end: str) -> None:
    processes, name = engines.processes, f"engine-{number}"
    print(f"   {end} of {name}", flush=True)
    if end == "stop":
        processes.halt(name)
        try:
            await asyncio.sleep(HALTED_SECONDS)
        finally:
            processes.go_on(name)
    elif end == "drain":
        processes.terminate(name)
    else:
        processes.kill(name)


async def _have_again(engines: Engines, number: int, end: str) -> None:
    processes, name = engines.processes, f"engine-{number}"
    if end != "stop":
        await asyncio.to_thread(processes.wait, name)
        engines.start(number)
    await asyncio.to_thread(processes.wait_ready, {name: f"{engines.urls[number]}/ready"})


async def _ask_all(
    http: aiohttp.ClientSession, url: str, prompts: Sequence[list[int]], seconds: float, asked: _Asked
) -> list[Choice | str]:
    """The choice of each answer, or its error."""
    async with asyncio.TaskGroup() as group:
        for prompt in prompts:
            asked.tasks.append(group.create_task(_timed(_ask(http, url, prompt), asked.seconds)))
            if len(asked.tasks) % TOGETHER == 0:
                asked.tell()
                await asyncio.sleep(TOGETHER * seconds / len(prompts))
    asked.all_answered = True
    asked.tell()
    return [task.result() for task in asked.tasks]


async def _timed(asking: Awaitable[Choice | str], seconds: list[float]) -> Choice | str:
    began = time.perf_counter()
    answer = await asking
    seconds.append(time.perf_counter() - began)
    return answer


async def _references(http: aiohttp.ClientSession, url: str, prompts: Sequence[list[int]]) -> list[Choice]:
    at_once = asyncio.Semaphore(REFERENCES_AT_ONCE)

    async def computed(at: int, prompt: list[int]) -> Choice:
        async with at_once:
            choice = await _ask(http, url, prompt, cache_salt=f"reference {at}")
        if isinstance(choice, str):
            raise SystemExit(f"an engine alone did not answer: {choice}")
        return choice

    return await asyncio.gather(*(computed(at, prompt) for at, prompt in enumerate(prompts)))


async def _ask(http: aiohttp.ClientSession, url: str, prompt: list[int], **fields: str) -> Choice | str:
    """A whole reply, which a gateway may ask for again."""
    body = {"model": "model", "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
    timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS_MAX)
    try:
        async with http.post(f"{url}/v1/completions", json=body | REQUEST | fields, timeout=timeout) as response:
            text = await response.text()
            if response.status != 200:
                return f"status {response.status}: {text[:200]}"
            choice: Choice = json.loads(text)["choices"][0]
            return choice
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        return f"{type(error).__name__}: {error}"[:200]
