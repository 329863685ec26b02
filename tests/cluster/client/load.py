"""Runs in a pod of the cluster: asks the service as its clients do, checks every answer, and writes down what failed.

    python3 load.py ask URL [BODY]                     one GET, or a POST of this JSON; prints the reply as JSON
    python3 load.py once URL MODEL                     one chat; prints the answer as JSON
    python3 load.py run FOLDER URL MODEL WORKERS [real] until FOLDER/stop exists; then FOLDER/result.json

Half of the workers stream, half of them keep their connection. The same prompt has one right answer, whichever engine
gives it; from `real` engines it has several, as they may decide a near tie either way, and its answer is waited for
longer. If a connection was refused, timed out, or (a kept one) turned out to be closed before any of the reply came,
the request is sent again, as OpenAI's own clients do, and counted apart; whatever goes wrong after that is a failure.

A connection is given two seconds each time. One that begins before kube-proxy has written a Service's rules may never
be made, because Linux sends each repetition of its first packet the way that the first one went.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import itertools
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp

CONNECT_SECONDS = 2.0
QUESTION = "Name the capital of France."
QUESTION_TOKENS = 16
ANSWER_SECONDS = 60.0
ANSWER_SECONDS_REAL = 300.0  # on two slow cores
ASK_SECONDS = 180.0  # of an answer that may have to wait until an engine has started
UNREACHABLE_SECONDS = 60.0  # the pods of a node that is gone do not answer until Kubernetes counts it as lost
UNREACHABLE_SECONDS_ONCE = 10.0  # of a single question, while every node is there
CLOSED_TRIES = 2
FAILURES_KEPT = 40
PREFIXES = 6
PREFIX_WORDS = 260
WORDS = ("the", "house", "and", "the", "water", "of", "one", "day")


class Wrong(Exception):
    """An answer, but not a right one."""


class Load:
    def __init__(self, folder: Path, url: str, model: str, real: bool) -> None:
        self._folder, self._url, self._model, self._real = folder, url, model, real
        self._numbers = itertools.count()
        self._answers: dict[str, str] = {}
        self.requests = 0
        self.reconnects = 0
        self.closed = 0
        self.failures: list[dict[str, Any]] = []
        self.engines: collections.Counter[str] = collections.Counter()
        self.seconds: list[float] = []

    async def run(self, workers: int) -> None:
        begun = time.time()
        await asyncio.gather(*(self._work(number) for number in range(workers)))
        ordered = sorted(self.seconds) or [0.0]
        result = {
            "requests": self.requests,
            "failed": len(self.failures),
            "failures": self.failures[:FAILURES_KEPT],
            "last_failure": self.failures[-1]["at"] if self.failures else None,
            "reconnects": self.reconnects,
            "closed": self.closed,
            "engines": dict(self.engines),
            "begun": begun,
            "ended": time.time(),
            "median_seconds": round(ordered[len(ordered) // 2], 3),
            "slowest_seconds": round(ordered[-1], 3),
        }
        partial = self._folder / "result.partial"
        partial.write_text(json.dumps(result))
        partial.rename(self._folder / "result.json")

    async def _work(self, worker: int) -> None:
        streamed, kept = worker % 2 == 0, worker % 4 < 2
        read = ANSWER_SECONDS_REAL if self._real else ANSWER_SECONDS
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=read)
        connector = aiohttp.TCPConnector(force_close=not kept)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector, headers=key_header()) as session:
            while not (self._folder / "stop").exists():
                number = next(self._numbers)
                begun, at = time.monotonic(), time.time()
                self.requests += 1
                try:
                    await self._ask(session, number, streamed, kept)
                    self.seconds.append(time.monotonic() - begun)
                except (aiohttp.ClientError, TimeoutError, Wrong, OSError) as error:
                    self.failures.append(
                        {
                            "at": time.time(),
                            "asked": at,
                            "streamed": streamed,
                            "kept": kept,
                            "what": f"{type(error).__name__}: {error}",
                        }
                    )
                (self._folder / "progress").write_text(f"{self.requests - 1} {len(self.failures)}")

    async def _ask(self, session: aiohttp.ClientSession, number: int, streamed: bool, kept: bool) -> None:
        prompt = f"document {number % PREFIXES}: " + " ".join(WORDS[i % len(WORDS)] for i in range(PREFIX_WORDS))
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": f"{prompt} question {number // PREFIXES % 4}"}],
            "max_tokens": 16 + 16 * (number % 3),
            "temperature": 0,
            "ignore_eos": True,
            "stream": streamed,
        }
        key = json.dumps({**body, "stream": None})
        closed = 0
        while True:
            try:
                send = functools.partial(session.post, f"{self._url}/v1/chat/completions", json=body)
                reply = await connected(send, UNREACHABLE_SECONDS, self._count_reconnect)
                break
            except aiohttp.ClientConnectorError:
                raise
            except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError):
                closed += 1
                if not kept or closed > CLOSED_TRIES:
                    raise
                self.closed += 1
        async with reply:
            if reply.status != 200:
                raise Wrong(f"status {reply.status}: {(await reply.text())[:300]}")
            self.engines[reply.headers.get("x-spillway-engine", "?")] += 1
            answer = await _streamed(reply) if streamed else _plain(await reply.json())
        if not answer:
            raise Wrong("an empty answer")
        if not self._real and self._answers.setdefault(key, answer) != answer:
            raise Wrong(f"{answer[:60]!r}, but {self._answers[key][:60]!r} before")

    def _count_reconnect(self) -> None:
        self.reconnects += 1


async def connected(
    send: Callable[[], Awaitable[aiohttp.ClientResponse]], seconds: float, count: Callable[[], None] = lambda: None
) -> aiohttp.ClientResponse:
    """The reply to send(), which is called again, and counted, if it found no connection.

    Nothing was sent then.

    Raises:
        aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError: There was none for so many seconds.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return await send()
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
            count()
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.1)


def _plain(document: dict[str, Any]) -> str:
    return str(document["choices"][0]["message"]["content"])


async def _streamed(reply: aiohttp.ClientResponse) -> str:
    parts: list[str] = []
    async for line in reply.content:
        if not line.startswith(b"data: "):
            continue
        data = line[6:].strip()
        if data == b"[DONE]":
            return "".join(parts)
        document = json.loads(data)
        if "error" in document:
            raise Wrong(f"an error in the stream: {document['error']}")
        for choice in document["choices"]:
            parts.append(choice["delta"].get("content") or "")
    raise Wrong(f"the stream ended after {len(parts)} pieces, without its end")


async def once(url: str, model: str) -> None:
    """The same chat plain and streamed; one line of JSON with both."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": QUESTION_TOKENS,
        "temperature": 0,
    }
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    plain, stream = [await reply_to(f"{url}/v1/chat/completions", asked) for asked in (body, streamed)]
    print(json.dumps({**plain, "streamed": stream}))


async def reply_to(url: str, body: dict[str, Any] | None) -> dict[str, Any]:
    """The status, headers and text of the reply to a GET, or to a POST of this body."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS, sock_read=ASK_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout, headers=key_header()) as session:
        send = functools.partial(session.request, "GET" if body is None else "POST", url, json=body)
        async with await connected(send, UNREACHABLE_SECONDS_ONCE) as reply:
            return {"status": reply.status, "headers": dict(reply.headers), "body": await reply.text()}


async def ask(url: str, body: dict[str, Any] | None) -> None:
    print(json.dumps(await reply_to(url, body)))


def key_header() -> dict[str, str]:
    key = os.environ.get("SPILLWAY_CLIENT_KEY", "")
    return {"authorization": f"Bearer {key}"} if key else {}


def main(arguments: list[str]) -> None:
    if arguments[0] == "once":
        asyncio.run(once(arguments[1], arguments[2]))
        return
    if arguments[0] == "ask":
        asyncio.run(ask(arguments[1], json.loads(arguments[2]) if arguments[2:] else None))
        return
    folder = Path(arguments[1])
    folder.mkdir(parents=True)
    asyncio.run(Load(folder, arguments[2], arguments[3], arguments[5:] == ["real"]).run(int(arguments[4])))


if __name__ == "__main__":
    main(sys.argv[1:])
