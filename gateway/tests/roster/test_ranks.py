"""Data parallel ranks of one engine, through a real gateway: each is routed to by itself, and all share one server."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
import zmq

from spillway_gateway.testing.fake_engine import FakeEngine
from spillway_gateway.testing.fake_kubernetes import FakeKubernetes, endpoint_slice, pod_endpoint
from spillway_gateway.testing.faults import Status
from spillway_gateway.testing.kv_publisher import KvPublisher
from spillway_gateway.testing.running import RunningGateway, gateway_config, patient, running_gateway, until

TWO_RANKS = b"""vllm:num_requests_running{engine="0",model_name="fake"} 0.0
vllm:num_requests_running{engine="1",model_name="fake"} 0.0
"""
BLOCK = 16


@pytest.fixture
def publishers() -> Iterator[list[KvPublisher]]:
    """The publishers of ranks 0 and 1, at ports that follow each other, as vLLM's do."""
    made: list[KvPublisher] = []
    while len(made) < 2:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        with contextlib.suppress(zmq.ZMQError), contextlib.ExitStack() as failed:
            for rank in range(2):
                events, replay = (f"tcp://127.0.0.1:{port + offset + rank}" for offset in (0, 2))
                publisher = KvPublisher(events, replay)
                failed.callback(publisher.close)
                made.append(publisher)
            failed.pop_all()
        if len(made) < 2:
            made.clear()
    yield made
    for publisher in made:
        publisher.close()


async def rank_seen(running: RunningGateway, fake: FakeEngine, prompt: list[int]) -> tuple[str, list[bytes]]:
    """The engine that the gateway names, and the rank headers that the engine got."""
    body, headers = {"model": "fake", "prompt": prompt}, {"x-data-parallel-rank": "7"}
    async with (
        aiohttp.ClientSession() as client,
        client.post(running.url + "/v1/completions", json=body, headers=headers) as reply,
    ):
        assert reply.status == 200, await reply.text()
        name = reply.headers["x-spillway-engine"]
    return name, [value for key, value in fake.seen[-1].headers if key == b"x-data-parallel-rank"]


async def test_a_prompt_goes_to_the_rank_that_published_its_blocks(
    start_engine: Any, publishers: list[KvPublisher]
) -> None:
    fake = await start_engine()
    fake.pages["/metrics"] = TWO_RANKS
    config = gateway_config([fake])
    config["models"][0]["engines"][0] |= {
        "kvEvents": publishers[0].events_url,
        "kvReplay": publishers[0].replay_url,
        "dataParallelRanks": 2,
    }
    prompts = [[rank * 1000 + token for token in range(20 * BLOCK)] for rank in range(2)]
    for rank, publisher in enumerate(publishers):
        blocks = [prompts[rank][start : start + BLOCK] for start in range(0, 20 * BLOCK, BLOCK)]
        for at, block in enumerate(blocks):
            publisher.stored([rank * 100 + at + 1], rank * 100 + at if at else None, block, BLOCK)
    async with running_gateway(config) as running:
        assert sorted(running.gateway.fleets[0].engines) == ["fake-0/dp0", "fake-0/dp1"]
        index = running.gateway.fleets[0].index
        await until(lambda: index.blocks == 2 * 20)
        for rank in (1, 0):
            prompt = prompts[rank]
            assert await rank_seen(running, fake, prompt) == (f"fake-0/dp{rank}", [b"%d" % rank])


async def test_an_engine_without_ranks_gets_no_rank_header(start_engine: Any) -> None:
    fake = await start_engine()
    async with running_gateway(gateway_config([fake])) as running:
        assert await rank_seen(running, fake, [1, 2, 3]) == ("fake-0", [])


async def test_a_rank_that_the_process_lacks_gets_no_request(start_engine: Any) -> None:
    fake = await start_engine()
    fake.pages["/metrics"] = TWO_RANKS
    config = gateway_config([fake])
    config["models"][0]["engines"][0]["dataParallelRanks"] = 3
    async with running_gateway(config, wait_ready=False) as running:
        await running.until_engine("fake-0/dp1", lambda engine: engine.routable)
        await running.until_engine("fake-0/dp2", lambda engine: engine.answer == "has 2 data parallel ranks")
        assert not running.engine("fake-0/dp2").routable
        fake.pages["/metrics"] = TWO_RANKS + b'vllm:num_requests_running{engine="2",model_name="fake"} 0.0\n'
        await running.until_engine("fake-0/dp2", lambda engine: engine.routable)


async def test_a_process_that_fails_is_tried_once_whatever_its_ranks(start_engine: Any) -> None:
    broken, other = await start_engine("a"), await start_engine("b")
    config = gateway_config([broken, other], limits={"attemptsMax": 2})
    config["models"][0]["engines"][0]["dataParallelRanks"] = 4
    broken.fault = Status(503)
    async with running_gateway(config) as running, aiohttp.ClientSession() as client:
        for number in range(4):
            body = {"model": "fake", "prompt": [number] * 40}
            async with client.post(running.url + "/v1/completions", json=body) as reply:
                assert (reply.status, reply.headers["x-spillway-engine"]) == (200, "b")


async def test_discovered_pods_are_listed_by_their_ranks_and_leave_together(start_engine: Any) -> None:
    api = FakeKubernetes()
    await api.start()
    fake = await start_engine("vllm-0")
    fake.pages["/metrics"] = TWO_RANKS
    kubernetes = {"service": "engines", "namespace": "spillway", "apiServer": api.url, "dataParallelRanks": 2}
    document = {"models": [{"name": "fake", "discovery": {"kubernetes": kubernetes}}], **patient()}
    try:
        async with running_gateway(document, wait_ready=False) as running:
            engines = running.gateway.fleets[0].engines
            api.put(endpoint_slice("s", [pod_endpoint("vllm-0", "127.0.0.1")], {"http": fake.port}))
            await until(lambda: sorted(engines) == ["vllm-0/dp0", "vllm-0/dp1"])
            for name in ("vllm-0/dp0", "vllm-0/dp1"):
                await running.until_engine(name, lambda engine: engine.routable)
            api.put(endpoint_slice("s", [], {"http": fake.port}))
            await until(lambda: not engines)
    finally:
        await api.stop()
