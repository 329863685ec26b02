"""Requests of given lengths at given rates over HTTP, whatever the answers take, and the times of their tokens.

Prompts are random token ids, so that lengths are exact and no prompt begins as another one does. Arrivals depend on the
seed alone: each system gets the same ones.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

REQUEST_SECONDS_MAX = 240.0
FIRST_ID = 1_000  # behind the special tokens


@dataclass(frozen=True, slots=True)
class Kind:
    """Requests of one length. per_second: mean of their arrivals, for two engines."""

    prompt_tokens: int
    answer_tokens: int
    per_second: float


@dataclass(slots=True)
class Timed:
    """One request. gaps: seconds between two parts of its answer. error: None when it was answered to its end."""

    kind: Kind
    first_token_seconds: float = 0.0
    gaps: list[float] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = "the stream ended without [DONE]"

    @property
    def token_seconds(self) -> float:
        """Mean time of a token behind the first one."""
        return sum(self.gaps) / max(1, len(self.ids) - 1)


def arrivals(kinds: Sequence[Kind], scale: float, seconds: float, seed: int) -> list[tuple[float, Kind]]:
    """Return when a request of which kind arrives, in order. scale: of the rates."""
    plan: list[tuple[float, Kind]] = []
    for number, kind in enumerate(kinds):
        drawn = random.Random(f"{seed} {number}")
        gaps = (drawn.expovariate(kind.per_second * scale) for _ in itertools.count())
        plan += [(at, kind) for at in itertools.takewhile(lambda at: at < seconds, itertools.accumulate(gaps))]
    return sorted(plan, key=lambda each: each[0])


class LegsLoad:
    """Asks one address. vocabulary: size of the model's. request_seconds: after which a request has failed."""

    def __init__(
        self, url: str, model: str, vocabulary: int, seed: str, *, request_seconds: float = REQUEST_SECONDS_MAX
    ) -> None:
        self._request_seconds = request_seconds
        self._url = url
        self._model = model
        self._ids = range(FIRST_ID, vocabulary)
        self._random = random.Random(seed)

    def prompt(self, tokens: int) -> list[int]:
        """One that no request had."""
        return self._random.choices(self._ids, k=tokens)

    async def arriving(self, kinds: Sequence[Kind], scale: float, seconds: float, seed: int) -> list[Timed]:
        """All requests that arrive within the seconds. scale: of the rates."""
        plan = arrivals(kinds, scale, seconds, seed)
        prompts = [self.prompt(kind.prompt_tokens) for _, kind in plan]
        began = time.perf_counter()
        async with self.session() as http, asyncio.TaskGroup() as group:
            asking = []
            for (at, kind), prompt in zip(plan, prompts, strict=True):
                await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
                asking.append(group.create_task(self.ask(http, prompt, kind)))
        return [task.result() for task in asking]

    def session(self) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(total=self._request_seconds)
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)

    async def ask(self, http: aiohttp.ClientSession, prompt: list[int], kind: Kind) -> Timed:
        """Ask for a stream, and follow it to its end."""
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": kind.answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        timed, last = Timed(kind), time.perf_counter()
        try:
            async with http.post(f"{self._url}/v1/completions", json=body) as response:
                if response.status != 200:
                    timed.error = f"status {response.status}: {(await response.text())[:200]}"
                    return timed
                async for line in response.content:
                    if line.startswith(b"data:"):
                        last = self._event(line[5:].strip(), timed, last)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            timed.error = f"{type(error).__name__}: {error}"[:200]
        return timed

    def _event(self, data: bytes, timed: Timed, last: float) -> float:
        """Returns when the last token came, or when the request was sent."""
        if data == b"[DONE]":
            timed.error = timed.error if timed.error and not timed.error.startswith("the stream ended with") else None
            return last
        event = json.loads(data)
        if (error := event.get("error")) is not None:
            timed.error = f"status of a stream: {error}"[:200]
        if (usage := event.get("usage")) is not None:
            timed.prompt_tokens = usage["prompt_tokens"]
            timed.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        ids = [each for choice in event.get("choices") or () for each in choice.get("token_ids") or ()]
        if not ids:
            return last
        now = time.perf_counter()
        if timed.ids:
            timed.gaps.append(now - last)
        else:
            timed.first_token_seconds = now - last
        timed.ids += ids
        return now
