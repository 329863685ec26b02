"""The endpoint picker chooses as the gateway does: one trace through both, from equal states."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Iterator
from contextlib import AsyncExitStack

import aiohttp

from gateway.tests.conftest import StartEngine
from spillway_gateway.testing.envoy import envoy_config, running_envoy
from spillway_gateway.testing.fake_engine import FakeEngine
from spillway_gateway.testing.faults import HoldInStream
from spillway_gateway.testing.running import RunningGateway, gateway_config, running_gateway, until

ENGINES = 3
OPEN_REQUESTS = 5  # streams that are still being answered when the next request comes


def trace(draw: random.Random) -> Iterator[str]:
    """Turns of chats, three of which share their beginning; a turn's prompt begins with the whole chat so far."""
    systems = [_words(draw, 150) for _ in range(4)]
    chats = [systems[draw.randrange(4)] for _ in range(12)]
    for _ in range(60):
        at = draw.randrange(len(chats))
        chats[at] += _words(draw, draw.randint(20, 300))
        yield chats[at]


def _words(draw: random.Random, count: int) -> str:
    return "".join(f"{draw.randrange(10_000):04} " for _ in range(count))


class Replay:
    """One way to the engines: sends requests one after the other, each beside the streams of those before it."""

    def __init__(self, session: aiohttp.ClientSession, url: str, running: RunningGateway, engines: list[FakeEngine]):
        self._session = session
        self._url = url
        self._running = running
        self._engines = engines
        self._open: deque[tuple[asyncio.Event, aiohttp.ClientResponse]] = deque()

    async def send(self, prompt: str) -> str:
        """The engine that gets it."""
        if len(self._open) == OPEN_REQUESTS:
            await self.end_first()
        end = asyncio.Event()
        for engine in self._engines:
            engine.fault = HoldInStream(1, end)
        body = {"model": self._engines[0].model, "prompt": prompt, "max_tokens": 8, "stream": True}
        reply = await self._session.post(f"{self._url}/v1/completions", json=body)
        assert reply.status == 200, await reply.text()
        self._open.append((end, reply))
        await self._until_running(len(self._open))
        return reply.headers["x-spillway-engine"]

    async def end_first(self) -> None:
        end, reply = self._open.popleft()
        end.set()
        assert (await reply.read()).endswith(b"data: [DONE]\n\n")
        await self._until_running(len(self._open))

    async def _until_running(self, count: int) -> None:
        counted = [self._running.engine(engine.name) for engine in self._engines]
        await until(lambda: sum(engine.running_requests for engine in counted) == count)


async def test_one_trace_goes_to_the_same_engines_through_the_gateway_and_the_picker(start_engine: StartEngine):
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        ways = []
        for picker in (False, True):
            engines = [await start_engine(f"fake-{number}", words=8) for number in range(ENGINES)]
            # Without polls, whose times differ.
            document = gateway_config(engines, listen={"port": 0, "pickerPort": 0}, health={"periodSeconds": 600})
            running = await stack.enter_async_context(running_gateway(document))
            url = running.url
            if picker:
                assert running.picker_port is not None
                url = await stack.enter_async_context(running_envoy(envoy_config(running.picker_port)))
            ways.append(Replay(session, url, running, engines))
        chosen: list[list[str]] = [[], []]
        for prompt in trace(random.Random(38)):
            for engines_chosen, way in zip(chosen, ways, strict=True):
                engines_chosen.append(await way.send(prompt))
        for way in ways:
            for _ in range(OPEN_REQUESTS):
                await way.end_first()
        assert chosen[0] == chosen[1]
        assert len(set(chosen[0])) == ENGINES, "the trace puts no load on some engine"
