"""The gateway's HTTP connection to engines beside aiohttp's client: CPU time of this process per request and per event.

    python bench/upstream_client.py [--rounds 5]

One mock engine (gateway_load/engine.py), 64 requests at a time, chats of about 2.3 KB, plain and streamed in 32 events.
Both clients are given headers and body as bytes and read status, headers and the raw body. They take turns; the figure
is the median of the rounds. About half a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import aiohttp
import uvloop
from gateway_load.processes import free_ports, mock_engines
from gateway_load.prompts import chat_body

from spillway_gateway.config.settings import EngineConfig, RoutingConfig
from spillway_gateway.fleet.engine import Engine
from spillway_gateway.upstream.forward import request_head
from spillway_gateway.upstream.pool import ConnectionPool
from spillway_stack.bundled_model import choose_model

CONCURRENT = 64
REQUESTS = {False: 4_096, True: 1_024}  # of a round, plain and streamed
EVENTS = 32
BODY_BYTES = 2_300
HEADERS = [(b"content-type", b"application/json"), (b"accept", b"*/*"), (b"user-agent", b"bench")]
PATH = b"/v1/chat/completions"

Ask = Callable[[bytes], Awaitable[int]]  # body -> status; reads the whole reply


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args(arguments).rounds
    tokenizer = Path(choose_model("", lambda _: None).folder)
    (port,) = free_ports(1)
    with mock_engines([port], tokenizer, EVENTS, 0.002):
        spent = uvloop.run(_measure(port, rounds))
    for stream, unit in ((False, "us a plain request"), (True, "us a streamed event")):
        own, other = (statistics.median(spent[name, stream]) for name in ("EngineConnection", "aiohttp"))
        print(f"{unit:<22} EngineConnection {1e6 * own:7.1f}   aiohttp {1e6 * other:7.1f}   {other / own:.1f} times")
    return 0


async def _measure(port: int, rounds: int) -> dict[tuple[str, bool], list[float]]:
    """CPU seconds of each round, per request or event, by client and by whether the reply streams."""
    messages = [{"role": "user", "content": "word " * (BODY_BYTES // 5)}]  # a client reads none of it
    bodies = {stream: [chat_body(messages, stream=stream)] * count for stream, count in REQUESTS.items()}
    engine = Engine("m", EngineConfig(name="engine", url=f"http://127.0.0.1:{port}"), RoutingConfig())
    pool = ConnectionPool(lambda: CONCURRENT, lambda: 5.0, time.monotonic)
    url = f"http://127.0.0.1:{port}{PATH.decode()}"

    async def own(body: bytes) -> int:
        connection = pool.take_idle(engine) or await pool.open(engine)
        try:
            connection.send((request_head(PATH, engine.host_header, HEADERS, len(body), b"1"), body))
            await connection.head()
            while await connection.chunk():
                pass
            return connection.status
        finally:
            pool.release(engine, connection)

    spent: dict[tuple[str, bool], list[float]] = {}
    connector = aiohttp.TCPConnector(limit=CONCURRENT)
    async with aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar()) as session:
        headers = [(name.decode(), value.decode()) for name, value in (*HEADERS, (b"x-request-id", b"1"))]

        async def other(body: bytes) -> int:
            async with session.post(url, data=body, headers=headers) as reply:
                async for _ in reply.content.iter_any():
                    pass
                return reply.status

        clients = {"EngineConnection": own, "aiohttp": other}
        for number in range(rounds + 1):  # the first warms up
            for name, ask in list(clients.items())[:: -1 if number % 2 else 1]:
                for stream, count in REQUESTS.items():
                    seconds = await _cpu_seconds(ask, bodies[stream])
                    if number:
                        spent.setdefault((name, stream), []).append(seconds / (count * (EVENTS if stream else 1)))
    pool.close()
    return spent


async def _cpu_seconds(ask: Ask, bodies: Sequence[bytes]) -> float:
    rest = iter(bodies)

    async def worker() -> None:
        for body in rest:
            status = await ask(body)
            if status != 200:
                raise RuntimeError(f"the mock engine answered {status}")

    started = time.process_time()
    await asyncio.gather(*(worker() for _ in range(CONCURRENT)))
    return time.process_time() - started


if __name__ == "__main__":
    sys.exit(main())
