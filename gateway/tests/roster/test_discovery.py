"""Engines that are added and removed under a running gateway, as an API server and a name server report them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from spillway_gateway.config.settings import parse_config
from spillway_gateway.metrics import GatewayMetrics
from spillway_gateway.roster.local_engines import LocalEngines
from spillway_gateway.testing.fake_dns import NameServer
from spillway_gateway.testing.fake_engine import FakeEngine
from spillway_gateway.testing.fake_kubernetes import FakeKubernetes, endpoint_slice, pod_endpoint
from spillway_gateway.testing.faults import Hang, HoldInStream
from spillway_gateway.testing.kv_publisher import KvPublisher
from spillway_gateway.testing.running import RunningGateway, gateway_config, patient, running_gateway, until

PROMPT = {"model": "fake", "prompt": list(range(200))}


def settings(api: FakeKubernetes, **sections: Any) -> dict[str, Any]:
    kubernetes = {
        "service": "engines",
        "namespace": "spillway",
        "kvEventsPort": "kv-events",
        "kvReplayPort": "kv-replay",
        "apiServer": api.url,
        "retrySecondsMax": 0.02,
    }
    model = {"name": "fake", "discovery": {"kubernetes": kubernetes}}
    return {"models": [model], **patient(**sections)}


def put(api: FakeKubernetes, fake: FakeEngine, *, uid: str | None = None, **conditions: Any) -> None:
    """Each engine has a slice of its own, since they share an address and differ in their ports."""
    ports = {"http": fake.port}
    if fake.publisher is not None and fake.publisher.replay_url is not None:
        for name, url in (("kv-events", fake.publisher.events_url), ("kv-replay", fake.publisher.replay_url)):
            ports[name] = int(url.rpartition(":")[2])
    api.put(
        endpoint_slice(f"slice-of-{fake.name}", [pod_endpoint(fake.name, "127.0.0.1", uid=uid, **conditions)], ports)
    )


def names(running: RunningGateway) -> list[str]:
    return sorted(running.gateway.fleets[0].engines)


async def ready(running: RunningGateway, *wanted: str) -> None:
    await until(lambda: names(running) == sorted(wanted))
    for name in wanted:
        await running.until_engine(name, lambda engine: engine.routable)


async def engine_of(client: aiohttp.ClientSession, running: RunningGateway, body: Any = PROMPT) -> str:
    async with client.post(running.url + "/v1/completions", json=body) as reply:
        assert reply.status == 200, await reply.text()
        await reply.read()
        return reply.headers["x-spillway-engine"]


async def test_before_anything_is_found_requests_are_refused_with_the_reason(
    api: FakeKubernetes, start_engine: Any
) -> None:
    fake = await start_engine("vllm-0")
    async with running_gateway(settings(api)) as running, aiohttp.ClientSession() as client:
        async with client.post(running.url + "/v1/completions", json=PROMPT) as reply:
            assert reply.status == 503
            assert "none is known" in (await reply.json())["error"]["message"]
        async with client.get(running.url + "/ready") as reply:
            assert reply.status == 503
        put(api, fake)
        await ready(running, "vllm-0")
        assert await engine_of(client, running) == "vllm-0"
        async with client.get(running.url + "/ready") as reply:
            assert reply.status == 200


async def test_a_model_at_zero_is_woken_and_served(api: FakeKubernetes, start_engine: Any) -> None:
    """The model goes to zero and back: requests without an engine are counted, which an autoscaler reads, and then
    answered."""
    fake = await start_engine("vllm-0")
    document = settings(api, admission={"normalWaitSeconds": 0.05})
    document["models"][0]["wakeSeconds"] = 120

    async def waiting_requests() -> float:
        async with client.get(running.url + "/metrics") as reply:
            page = (await reply.text()).splitlines()
        (line,) = (line for line in page if line.startswith("spillway_gateway_admission_waiting_requests{"))
        return float(line.rpartition(" ")[2])

    async with running_gateway(document) as running, aiohttp.ClientSession() as client:
        for _ in range(2):
            requests = [asyncio.create_task(engine_of(client, running)) for _ in range(3)]
            await until(lambda: running.gateway.admissions["fake"].waiting_requests == 3)
            assert await waiting_requests() == 3
            async with client.get(running.url + "/ready") as reply:
                assert (reply.status, (await reply.json())["unavailable"]) == (200, ["fake"])
            await asyncio.sleep(0.1)  # longer than for room among engines
            put(api, fake)
            assert await asyncio.gather(*requests) == ["vllm-0"] * 3
            assert await waiting_requests() == 0
            api.delete("slice-of-vllm-0")
            await until(lambda: names(running) == [])


async def test_a_terminating_pod_keeps_its_streams_and_gets_no_request(api: FakeKubernetes, start_engine: Any) -> None:
    old, new = await start_engine("vllm-0"), await start_engine("vllm-1")
    put(api, old)
    release = asyncio.Event()
    old.fault = HoldInStream(2, release)
    async with running_gateway(settings(api)) as running, aiohttp.ClientSession() as client:
        await ready(running, "vllm-0")
        leaving = running.engine("vllm-0")
        async with client.post(running.url + "/v1/completions", json={**PROMPT, "stream": True}) as stream:
            begun = await stream.content.readany()
            put(api, old, ready=False, serving=True, terminating=True)
            put(api, new)
            await ready_only(running, "vllm-1")
            for _ in range(3):
                assert await engine_of(client, running) == "vllm-1"  # although the other holds the prefix
            async with client.get(running.url + "/spillway/config") as reply:
                report = (await reply.json())["discovered"]["fake"]
            states = {engine["name"]: engine["withheld"] for engine in report["engines"]}
            assert states == {"vllm-0": "its pod is terminating", "vllm-1": None}
            assert report["error"] is None and report["heardAt"] is not None
            async with client.get(running.url + "/metrics") as reply:
                page = await reply.text()
            assert 'spillway_gateway_discovered_engines{model="fake",state="withheld"} 1.0' in page
            assert 'spillway_gateway_engine_up{engine="vllm-0",model="fake"} 0.0' in page

            api.delete("slice-of-vllm-0")
            await until(lambda: names(running) == ["vllm-1"])
            assert leaving.running_requests == 1
            old.ready = (503, {"reason": "draining"})  # it is asked as long as it has requests
            await until(lambda: leaving.answer == "not ready: draining")
            release.set()
            assert (begun + await stream.read()).endswith(b"data: [DONE]\n\n")
        await until(lambda: leaving.running_requests == 0)
        engines = running.gateway.engines
        assert isinstance(engines, LocalEngines) and engines._tasks is not None
        tasks = engines._tasks
        await until(lambda: [engine.name for engine in tasks._polls] == ["vllm-1"])


async def ready_only(running: RunningGateway, name: str) -> None:
    fleet = running.gateway.fleets[0]
    await until(lambda: [engine.name for engine in fleet.engines.values() if engine.routable] == [name])


async def test_a_pod_that_is_not_ready_waits_and_keeps_what_is_known_of_it(
    api: FakeKubernetes, start_engine: Any
) -> None:
    fakes = [await start_engine(f"vllm-{number}", publisher=KvPublisher()) for number in (0, 1)]
    for fake in fakes:
        put(api, fake)
    document = settings(api, routing={"defaultBlockTokens": fakes[0].block_tokens})
    async with running_gateway(document) as running, aiohttp.ClientSession() as client:
        await ready(running, "vllm-0", "vllm-1")
        fleet = running.gateway.fleets[0]
        await until(lambda: all(engine.events_live for engine in fleet.engines.values()))
        holder = await engine_of(client, running)
        blocks = 192 // fakes[0].block_tokens
        await until(lambda: fleet.index.blocks == blocks)
        holding = next(fake for fake in fakes if fake.name == holder)
        other = next(fake for fake in fakes if fake is not holding)
        put(api, holding, ready=False)
        await ready_only(running, other.name)
        assert await engine_of(client, running, {**PROMPT, "prompt": list(range(100))}) == other.name
        put(api, holding, ready=True)
        await ready(running, "vllm-0", "vllm-1")
        assert await engine_of(client, running) == holder


async def test_what_is_known_of_a_pod_goes_with_it(
    api: FakeKubernetes, start_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spillway_gateway.roster.engine_tasks.METRICS_KEPT_SECONDS", 0.0)
    stays = await start_engine("vllm-0", publisher=KvPublisher())
    goes = await start_engine("vllm-1", publisher=KvPublisher())
    put(api, stays)
    async with running_gateway(settings(api)) as running:
        await ready(running, "vllm-0")
        fleet = running.gateway.fleets[0]
        put(api, goes)
        await ready(running, "vllm-0", "vllm-1")
        await until(lambda: running.engine("vllm-1").events_live)  # events of an engine that was added are followed
        goes.prefill(list(range(1_600)))
        await until(lambda: fleet.index.blocks == 1_600 // goes.block_tokens)

        # Another process at the same address and under the same name: nothing of the first may be believed.
        first = running.engine("vllm-1")
        goes.publisher._batches.clear()
        put(api, goes, uid="another")
        await until(lambda: running.engine("vllm-1") is not first and fleet.index.blocks == 0)
        await ready(running, "vllm-0", "vllm-1")
        await until(lambda: running.engine("vllm-1").events_live)
        goes.prefill(list(range(5_000, 6_600)))
        await until(lambda: fleet.index.blocks == 1_600 // goes.block_tokens)

        api.delete("slice-of-vllm-1")
        await until(lambda: names(running) == ["vllm-0"] and fleet.index.blocks == 0)
        assert fleet.index.estimated_bytes == 0 and len(fleet.index._held.slots) == 1
        goes.prefill(list(range(10_000, 10_160)))  # no subscriber any more
        stays.prefill(list(range(160)))
        await until(lambda: fleet.index.blocks == 160 // stays.block_tokens)
        await until(lambda: 'engine="vllm-1"' not in running.gateway.metrics.exposition().decode())


async def test_while_the_api_server_is_away_everything_goes_on(api: FakeKubernetes, start_engine: Any) -> None:
    first, second = await start_engine("vllm-0"), await start_engine("vllm-1")
    put(api, first)
    async with running_gateway(settings(api)) as running, aiohttp.ClientSession() as client:
        await ready(running, "vllm-0")
        status = running.gateway.sources["fake"]
        await api.stop()
        await until(lambda: status.failures["unreachable"] >= 2)
        assert await engine_of(client, running) == "vllm-0"
        async with client.get(running.url + "/metrics") as reply:
            page = await reply.text()
        assert 'spillway_gateway_discovery_failing{model="fake"} 1.0' in page
        assert 'spillway_gateway_discovery_failures_total{model="fake",reason="unreachable"}' in page
        put(api, second)
        api.delete("slice-of-vllm-0")
        await api.start()
        await ready(running, "vllm-1")
        assert await engine_of(client, running) == "vllm-1"


async def test_a_reload_changes_how_engines_are_found(api: FakeKubernetes, start_engine: Any, tmp_path: Path) -> None:
    listed, found = await start_engine("listed"), await start_engine("found")
    put(api, found)
    path = tmp_path / "gateway.yaml"
    no_poll = {"reload": {"periodSeconds": 0}}
    static = gateway_config([listed], **no_poll)
    path.write_text(yaml.safe_dump(static))
    async with running_gateway(static, config_path=path) as running, aiohttp.ClientSession() as client:
        follower = running.gateway.follower
        assert follower is not None

        async def load(document: dict[str, Any]) -> None:
            path.write_text(yaml.safe_dump(document))
            follower.read_soon()
            await until(lambda: follower.current.models == parse_config(document).models)

        await load(settings(api, **no_poll))
        await ready(running, "found")
        assert await engine_of(client, running) == "found"
        other = settings(api, **no_poll)
        other["models"][0]["discovery"]["kubernetes"]["service"] = "missing"
        await load(other)
        await until(lambda: names(running) == [])
        assert running.gateway.sources["fake"].description.startswith("EndpointSlices of Service missing")
        await load(static)
        await ready(running, "listed")
        assert running.gateway.sources == {}
        await until(lambda: not api.watches)


async def test_names_of_a_name_service_become_engines(start_engine: Any) -> None:
    fake = await start_engine()
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(NameServer, local_addr=("127.0.0.1", 0))
    server.records["engines.test.", "A"] = ["127.0.0.1"]
    dns = {"name": "engines.test.", "port": fake.port, "periodSeconds": 0.01, "timeoutSeconds": 30.0}
    dns["nameservers"] = [f"127.0.0.1:{server.port}"]
    document = {"models": [{"name": "fake", "discovery": {"dns": dns}}], **patient()}
    try:
        async with running_gateway(document) as running, aiohttp.ClientSession() as client:
            await ready(running, f"127.0.0.1:{fake.port}")
            assert await engine_of(client, running) == f"127.0.0.1:{fake.port}"
            server.records["engines.test.", "A"] = ["127.0.0.77"]
            await until(lambda: names(running) == [f"127.0.0.77:{fake.port}"])
    finally:
        transport.close()


def test_series_of_an_engine_that_is_gone_are_dropped() -> None:
    metrics = GatewayMetrics()
    for engine in ("stays", "goes"):
        metrics.request("m", engine, "prefix", "2xx").inc()
        metrics.first_byte("m", engine).observe(1.0)
        metrics.event_batches.labels(engine).inc()
    metrics.remove_engine("goes")

    page = metrics.exposition().decode()
    assert "goes" not in page and 'engine="stays"' in page
    metrics.request("m", "goes", "prefix", "2xx").inc()
    assert 'engine="goes"' in metrics.exposition().decode()


@pytest.mark.parametrize(("end", "status"), [("deleted", 200), ("terminating", 200), ("crash", 502)])
async def test_a_lone_request_goes_to_another_engine_where_the_pod_of_its_own_was_deleted(
    api: FakeKubernetes, start_engine: Any, end: str, status: int
) -> None:
    fakes = [await start_engine(name) for name in ("vllm-0", "vllm-1")]
    async with running_gateway(settings(api)) as running, aiohttp.ClientSession() as client:
        for fake in fakes:
            fake.fault = Hang()
            put(api, fake)
        await ready(running, "vllm-0", "vllm-1")
        asking = asyncio.create_task(client.post(running.url + "/v1/completions", json=PROMPT))
        await until(lambda: any(fake.seen for fake in fakes))
        its, other = sorted(fakes, key=lambda fake: not fake.seen)
        other.fault = None
        engines = running.gateway.fleets[0].engines
        engine = engines[its.name]
        if end == "deleted":
            api.delete(f"slice-of-{its.name}")
        else:
            put(api, its, ready=False, terminating=end == "terminating")
        await until(lambda: engine.withheld is not None or engines.get(its.name) is not engine)
        await its.stop()
        async with await asking as reply:
            assert reply.status == status, await reply.text()
