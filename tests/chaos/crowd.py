"""Two hundred clients that never rest, and what became of each of their requests.

A client is what a Service and an SDK make of it: a request whose replica dies before the first byte is sent to another
replica. Whatever else goes wrong before the first byte is counted as lost.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from .machines import SECONDS_MAX, Replica, now
from .tenants import Answers, Ask, key_of

PAUSE_SECONDS = 0.05  # while no replica takes requests


@dataclass(slots=True)
class Disturbance:
    """A time in which replies of these engines or replicas may break. ended: None while it lasts."""

    names: frozenset[str]
    began: float
    ended: float | None = None

    def covers(self, name: str, began: float, ended: float) -> bool:
        return name in self.names and self.began <= ended and (self.ended is None or began <= self.ended)


@dataclass(slots=True)
class Counts:
    """requests: sent by clients, each counted once and in exactly one of whole, broken, lost, refused, wrong."""

    requests: int = 0
    whole: int = 0  # with the answer that the engine has to give
    broken: int = 0  # ended after the first byte, with a fault that explains it
    lost: int = 0  # had no first byte, and no answer either
    refused: int = 0  # answered with an error status
    wrong: int = 0  # another answer than the engine's
    broken_without_cause: int = 0
    resent: int = 0  # to another replica, as theirs died before the first byte
    moved: int = 0  # by the gateway, to another engine before the first byte
    first_asks: int = 0  # of a tenant for what only others had asked before
    wrong_tenant_hits: int = 0  # first asks that found blocks, by the engine's count or by the gateway's
    own_hits: int = 0  # later asks that found blocks: the cache does work
    by_engine: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)  # about what must not be


class Crowd:
    """streams: how many requests are open at once, from start to stop."""

    def __init__(self, streams: int, replicas: Sequence[Replica], asks: Iterator[Ask], answers: Answers) -> None:
        self.counts = Counts()
        self.disturbances: list[Disturbance] = []
        self.open_streams = 0  # after their first byte
        self._streams = streams
        self._replicas = replicas
        self._asks = asks
        self._answers = answers
        self._asked: Counter[tuple[str, int]] = Counter()  # by tenant and group
        self._groups: set[int] = set()
        self._stopping = False

    @property
    def finished(self) -> int:
        counts = self.counts
        return counts.whole + counts.broken + counts.lost + counts.refused + counts.wrong

    def stop(self) -> None:
        """Every request that is open is still brought to its end."""
        self._stopping = True

    async def run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=None, connect=SECONDS_MAX, sock_read=SECONDS_MAX)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with (
            aiohttp.ClientSession(timeout=timeout, connector=connector) as session,
            asyncio.TaskGroup() as group,
        ):
            for number in range(self._streams):
                group.create_task(self._client(session, number))

    async def _client(self, session: aiohttp.ClientSession, number: int) -> None:
        while not self._stopping:
            ask = next(self._asks)
            self.counts.requests += 1
            about = ask.tenant, ask.group
            others_asked = ask.group in self._groups
            self._asked[about] += 1
            first = self._asked[about] == 1
            self._groups.add(ask.group)
            request = _Request(ask, now())
            while not await self._sent(session, request, number):
                number += 1
            alone = self._asked[about] == 1  # no later ask of the same tenant can have overtaken it
            if first and alone and others_asked and request.text and not request.again:
                self._first_ask(request)
            elif not first:
                self.counts.own_hits += request.cached_tokens > 0

    async def _sent(self, session: aiohttp.ClientSession, request: _Request, number: int) -> bool:
        """Send a request and return whether it is done; if its replica died before the first byte, it is sent again."""
        taking = [replica for replica in self._replicas if replica.taking]
        if not taking:
            await asyncio.sleep(PAUSE_SECONDS)
            return False
        replica = taking[number % len(taking)]
        life = replica.lives
        try:
            await self._answered(session, request, replica)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            if request.begun:
                self._broken(request, replica, f"{error.__class__.__name__}")
            elif replica.lives != life or not replica.taking:
                self.counts.resent += 1
                request.again = True
                return False
            else:
                self.counts.lost += 1
                self._say(f"lost at {replica.name}: {error!r}")
        finally:
            self.open_streams -= request.begun and request.ask.stream
        return True

    async def _answered(self, session: aiohttp.ClientSession, request: _Request, replica: Replica) -> None:
        ask = request.ask
        headers = {"authorization": f"Bearer {key_of(ask.tenant)}"}
        async with session.post(replica.url + "/v1/chat/completions", json=ask.body, headers=headers) as reply:
            request.take_headers(reply.headers)
            self.counts.by_engine[request.engine] += 1
            self.counts.moved += request.moved
            if reply.status != 200:
                self.counts.refused += 1
                self._say(f"status {reply.status} from {replica.name}: {(await reply.text())[:300]}")
                return
            if not ask.stream:
                document = json.loads(await reply.read())
                request.text = document["choices"][0]["message"]["content"]
                request.take_usage(document["usage"])
                self._whole(request)
                return
            async for line in reply.content:
                if not line.startswith(b"data:"):
                    continue
                if not request.begun:
                    request.begun = True
                    self.open_streams += 1
                data = line[5:].strip()
                if data == b"[DONE]":
                    self._whole(request)
                    return
                document = json.loads(data)
                if "error" in document:
                    self._broken(request, replica, document["error"]["message"])
                    return
                request.take_chunk(document)
        self._broken(request, replica, "the stream ended without [DONE]")

    def _whole(self, request: _Request) -> None:
        if request.text == self._answers.to(request.ask):
            self.counts.whole += 1
        else:
            self.counts.wrong += 1
            self._say(f"{request.engine} answered {request.text[:100]!r}")

    def _broken(self, request: _Request, replica: Replica, why: str) -> None:
        self.counts.broken += 1
        ended = now()
        for disturbance in self.disturbances:
            if any(disturbance.covers(name, request.began, ended) for name in (request.engine, replica.name)):
                return
        self.counts.broken_without_cause += 1
        self._say(f"broken on {request.engine} through {replica.name} without a fault there: {why}")

    def _first_ask(self, request: _Request) -> None:
        self.counts.first_asks += 1
        if request.cached_tokens or request.expected_tokens:
            self.counts.wrong_tenant_hits += 1
            self._say(
                f"{request.ask.tenant} had never asked for group {request.ask.group}: {request.cached_tokens} tokens "
                f"cached on {request.engine}, {request.expected_tokens} expected by the gateway"
            )

    def _say(self, what: str) -> None:
        if len(self.counts.violations) < 20:
            self.counts.violations.append(what)


@dataclass(slots=True)
class _Request:
    ask: Ask
    began: float
    begun: bool = False  # its first byte has arrived
    again: bool = False  # sent more than once, so it may find its own blocks
    moved: bool = False
    engine: str = "none"
    expected_tokens: int = 0
    cached_tokens: int = 0
    text: str = ""

    def take_headers(self, headers: Any) -> None:
        self.engine = headers.get("x-spillway-engine", "none")
        self.expected_tokens = int(headers.get("x-spillway-prefix-tokens", 0))
        self.moved = headers.get("x-spillway-route") == "retry"
        self.again = self.again or self.moved

    def take_chunk(self, document: dict[str, Any]) -> None:
        for choice in document["choices"]:
            self.text += choice["delta"].get("content") or ""
        if document.get("usage"):
            self.take_usage(document["usage"])

    def take_usage(self, usage: dict[str, Any]) -> None:
        details = usage["prompt_tokens_details"]
        self.cached_tokens = details["cached_tokens"] if details else 0
