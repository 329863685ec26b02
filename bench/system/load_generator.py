"""The agents' load over HTTP: closed loop, for a fixed time, one answered request per JSON line.

    PYTHONPATH=bench python -m system.load_generator --urls http://127.0.0.1:8100,... --way turns
        --tokenizer tokenizer.json --output answers.jsonl [--sessions 64] [--seconds 75]
        [--tokens common,own,turn,answer] [--turns 12] [--seed 1] [--grace-seconds 20]

way: `turns` sends requests to the addresses in turn, `pinned` all of one place to one address, `one` to the first. A
gateway's promise is its header x-spillway-prefix-tokens. Texts are words of one token each, so that lengths in tokens
are those of the simulation.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
from traces.session import Segment

from system.agents import AgentLoad
from system.report import Answered

TEMPLATE_TOKENS = 10  # of a system prompt
REQUEST_SECONDS_MAX = 300.0


def words(tokenizer: Path) -> list[str]:
    """Words that are one token each behind a space."""
    vocabulary = json.loads(tokenizer.read_text(encoding="utf-8"))["model"]["vocab"]
    known = (token[1:] for token in vocabulary if token.startswith("Ġ"))
    return sorted(word for word in known if word.isascii() and word.isalpha() and word.islower() and 2 < len(word) < 10)


@dataclass(slots=True)
class Reply:
    """The outcome of one request. error: None when it was answered to its end."""

    text: str = ""
    first_token: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0
    promised_tokens: int = 0
    error: str | None = None


class Agents:
    """All places of a load."""

    def __init__(self, load: AgentLoad, urls: Sequence[str], way: str, model: str, vocabulary: Sequence[str]) -> None:
        self._load = load
        self._urls = urls
        self._way = way
        self._model = model
        self._vocabulary = vocabulary
        self._turns = itertools.count()
        self.answered: list[Answered] = []
        self.errors: list[str] = []

    async def run(self, grace_seconds: float) -> None:
        """One load to its end. grace_seconds: behind it, for answers under way."""
        self._began = time.perf_counter()
        timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS_MAX)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:
            with suppress(TimeoutError):  # what is under way after the grace does not count
                async with asyncio.timeout(self._load.seconds + grace_seconds), asyncio.TaskGroup() as places:
                    for place in range(self._load.places):
                        places.create_task(self._place(http, place))

    def _now(self) -> float:
        return time.perf_counter() - self._began

    def _text(self, segment: Segment) -> str:
        return " ".join(random.Random(segment.seed).choices(self._vocabulary, k=max(1, segment.tokens)))

    def _url(self, place: int) -> str:
        at = {"turns": next(self._turns), "pinned": place, "one": 0}[self._way]
        return self._urls[at % len(self._urls)]

    async def _place(self, http: aiohttp.ClientSession, place: int) -> None:
        await asyncio.sleep(self._load.start_of(place))
        common = self._load.common(place)
        beginning = []
        if common.tokens:
            system = self._text(Segment(common.seed, common.tokens - TEMPLATE_TOKENS))
            beginning = [{"role": "system", "content": system}]
        for number in itertools.count():
            messages = list(beginning)
            for message, pause in self._load.session(place, number):
                if self._now() >= self._load.seconds:
                    return
                messages.append({"role": "user", "content": self._text(message)})
                sent = self._now()
                reply = await self._ask(http, self._url(place), messages)
                if reply.error is not None or reply.first_token is None:
                    self.errors.append(reply.error or "an answer without a token")
                    await asyncio.sleep(pause)
                    break
                self.answered.append(
                    Answered(
                        sent,
                        reply.first_token - sent,
                        self._now(),
                        reply.prompt_tokens,
                        reply.cached_tokens,
                        reply.promised_tokens,
                        reply.answer_tokens,
                        of_crowd=self._load.is_crowd(place),
                    )
                )
                messages.append({"role": "assistant", "content": reply.text})
                await asyncio.sleep(pause)

    async def _ask(self, http: aiohttp.ClientSession, url: str, messages: list[dict[str, str]]) -> Reply:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": messages,
            "max_tokens": self._load.answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        reply = Reply()
        try:
            async with http.post(f"{url}/v1/chat/completions", json=body) as response:
                if response.status != 200:
                    reply.error = f"status {response.status}: {(await response.text())[:200]}"
                    return reply
                reply.promised_tokens = int(response.headers.get("x-spillway-prefix-tokens", 0))
                reply.error = "the stream ended without [DONE]"
                async for line in response.content:
                    if line.startswith(b"data:"):
                        self._event(line[5:].strip(), reply)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            reply.error = f"{type(error).__name__}: {error}"[:200]
        return reply

    def _event(self, data: bytes, reply: Reply) -> None:
        if data == b"[DONE]":
            reply.error = None
            return
        event = json.loads(data)
        if (error := event.get("error")) is not None:
            reply.error = f"the stream ended with {error}"[:200]
        if (usage := event.get("usage")) is not None:
            reply.prompt_tokens = usage["prompt_tokens"]
            reply.answer_tokens = usage["completion_tokens"]
            reply.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        for choice in event.get("choices") or ():
            content = choice.get("delta", {}).get("content")
            if content:
                if reply.first_token is None:
                    reply.first_token = self._now()
                reply.text += content


def read_answers(path: Path) -> list[Answered]:
    return [Answered(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--urls", required=True)
    parser.add_argument("--way", choices=["turns", "pinned", "one"], required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--model", default="model")
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=75.0)
    parser.add_argument("--ramp-seconds", type=float, default=8.0)
    parser.add_argument("--tokens", default="4000,6000,1000,64")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--think-seconds", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--grace-seconds", type=float, default=20.0)
    options = parser.parse_args(arguments)
    common_tokens, own_tokens, turn_tokens, answer_tokens = (int(each) for each in options.tokens.split(","))
    load = AgentLoad(
        options.sessions,
        options.seconds,
        options.ramp_seconds,
        common_tokens,
        own_tokens,
        turn_tokens,
        answer_tokens,
        turns=options.turns,
        think_seconds=options.think_seconds,
        seed=options.seed,
    )
    agents = Agents(load, options.urls.split(","), options.way, options.model, words(options.tokenizer))
    asyncio.run(agents.run(options.grace_seconds))
    options.output.write_text("".join(json.dumps(asdict(one)) + "\n" for one in agents.answered), encoding="utf-8")
    print(json.dumps({"answered": len(agents.answered), "failed": len(agents.errors), "errors": agents.errors[:3]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
