"""InferenceObjectives of an API server that speaks the protocol, and the requests that name them."""

from __future__ import annotations

import asyncio
import itertools
import logging
from pathlib import Path

import aiohttp
import pytest

from gateway.tests.conftest import StartEngine, auth_files
from gateway.tests.roster.test_discovery import put, ready, settings
from spillway_gateway.access.gatekeeper import Gatekeeper
from spillway_gateway.access.keys import Priority, Tenant, hash_key
from spillway_gateway.config.discovery import DiscoveryConfig, KubernetesDiscovery
from spillway_gateway.config.settings import AuthConfig, ModelConfig, RoutingConfig
from spillway_gateway.fleet.model_fleet import ModelFleet
from spillway_gateway.fleet.prefix_index import PrefixIndex
from spillway_gateway.roster.objectives import Objectives
from spillway_gateway.testing.fake_kubernetes import FakeKubernetes
from spillway_gateway.testing.faults import HoldInStream
from spillway_gateway.testing.running import running_gateway, until


def fleet_in(config: KubernetesDiscovery | None) -> ModelFleet:
    index = PrefixIndex("m", bytes_max=1 << 20, orphans_max=10, default_block_tokens=16, clock=lambda: 0.0)
    discovery = None if config is None else DiscoveryConfig(kubernetes=config)
    return ModelFleet(ModelConfig("m", discovery=discovery), RoutingConfig(), index, lambda: 0.0)


class Followed:
    """Objectives of these fleets, listed once whenever look() is called."""

    def __init__(self, *fleets: ModelFleet) -> None:
        self._looks: asyncio.Queue[asyncio.Event] = asyncio.Queue()
        self._done: asyncio.Event | None = None
        self.objectives = Objectives(fleets, pause=self._pause)
        self._task = asyncio.create_task(self.objectives.run())

    async def _pause(self, seconds: float) -> None:
        if self._done is not None:
            self._done.set()
        self._done = await self._looks.get()

    async def look(self) -> None:
        done = asyncio.Event()
        self._looks.put_nowait(done)
        await done.wait()

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def test_what_is_there_is_known_and_stays_while_the_api_server_is_away(
    api: FakeKubernetes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    fleet = fleet_in(KubernetesDiscovery("engines", namespace="spillway", api_server=api.url, timeout_seconds=5.0))
    followed = Followed(fleet, fleet_in(None))

    def known() -> list[int | None]:
        return [followed.objectives.priority(fleet, name) for name in ("batch", "chat", "urgent")]

    await followed.look()
    assert known() == [None] * 3 and not caplog.records, "a cluster may not know the kind"
    api.objectives = {"batch": -10, "chat": None, "urgent": 7}
    await followed.look()
    assert known() == [-10, 0, 7]
    assert followed.objectives.priority(fleet_in(None), "urgent") is None, "its engines are not in a cluster"
    for api.status in (503, 503, 403):
        await followed.look()
    assert known() == [-10, 0, 7]
    api.status = None
    api.objectives = {"urgent": 8}
    await followed.look()
    assert known() == [None, None, 8]
    await followed.stop()
    said = [record.getMessage() for record in caplog.records if record.name.endswith("objectives")]
    assert [line.partition(": ")[2][:24] for line in said] == [
        "batch -10, chat 0, urgen",
        "the API server answers 5",
        "the API server answers 4",
        "urgent 8",
    ]
    assert "allow list of inferenceobjectives.inference.networking.x-k8s.io in a Role" in said[2]


@pytest.mark.parametrize("key", list(Priority))
def test_with_keys_an_objective_only_lowers_the_priority_of_the_key(tmp_path: Path, key: Priority) -> None:
    tenant = Tenant("a", priority=key)
    files = auth_files(tmp_path, [{"name": "a", "keys": [hash_key("a" * 24)]}])
    keyed = Gatekeeper(AuthConfig(keys_file=files["keysFile"], salt_secret_file=files["saltSecretFile"]))
    anonymous = Gatekeeper(AuthConfig())
    for objective, asked in ((None, key), (1, Priority.HIGH), (0, Priority.NORMAL), (-1, Priority.LOW)):
        assert anonymous.priority(tenant, objective) is asked
        assert keyed.priority(tenant, objective) is max(asked, key)


@pytest.mark.parametrize("header", ["x-llm-d-inference-objective", "x-gateway-inference-objective"])
async def test_requests_wait_in_the_order_of_their_objectives(
    api: FakeKubernetes, start_engine: StartEngine, header: str
) -> None:
    api.objectives = {"batch": -1, "chat": 0, "urgent": 1}
    engine = await start_engine("vllm-0")
    put(api, engine)
    listen = {"port": 0, "pickerPort": 0}
    document = settings(api, listen=listen, admission={"requestsPerEngineMax": 1})
    async with running_gateway(document) as running, aiohttp.ClientSession() as client:
        await ready(running, "vllm-0")
        (fleet,) = running.gateway.fleets
        await until(lambda: running.gateway.objectives.priority(fleet, "batch") == -1)
        queue = running.gateway.admissions["fake"]
        order: list[str | None] = []

        async def ask(objective: str | None) -> None:
            headers = {} if objective is None else {header: objective}
            body = {"model": "fake", "prompt": "hi", "stream": objective is None}
            async with client.post(running.url + "/v1/completions", json=body, headers=headers) as reply:
                assert reply.status == 200
                await reply.read()
            order.append(objective)

        release = asyncio.Event()
        engine.fault = HoldInStream(2, release)
        tasks = [asyncio.create_task(ask(None))]
        await until(lambda: len(engine.seen) == 1)
        for waiting, objective in zip(itertools.count(1), ("batch", "chat", "unknown", "urgent"), strict=False):
            tasks.append(asyncio.create_task(ask(objective)))
            await until(lambda waiting=waiting: queue.waiting_requests == waiting)
        engine.fault = None
        release.set()
        await asyncio.gather(*tasks)
    assert order == [None, "urgent", "chat", "unknown", "batch"]
