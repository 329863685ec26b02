"""The gateway as an endpoint picker.

The kinds of the Inference Extension are as its release declares them, and a real Envoy on this machine connects to pods
through the chart's policies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import aiohttp
import pytest
from cluster.helm import Release
from cluster.kube import Kubernetes, Object, name_of
from cluster.local_cluster import HOST, LocalCluster
from cluster.report import Row
from cluster.values import MODEL, simulated
from stack_driver.deadlines import eventually

from spillway_gateway.testing.envoy import envoy_config, running_envoy

pytestmark = pytest.mark.own_cluster
POOL = "chat-spillway-engine"
PICKER_PORT = 9002
OBJECTIVES = {"batch": -1, "urgent": 5}
PROXY = [{"ipBlock": {"cidr": f"{HOST}/32"}}]


def objective(name: str, priority: int) -> Object:
    return {
        "apiVersion": "inference.networking.x-k8s.io/v1alpha2",
        "kind": "InferenceObjective",
        "metadata": {"name": name},
        "spec": {"priority": priority, "poolRef": {"name": POOL}},
    }


@pytest.fixture(scope="module")
def kinds(machine: LocalCluster, namespace: Kubernetes) -> Iterator[None]:
    machine.declare_inference_kinds()
    namespace.wait_for_kind("inferencepools", "inference.networking.k8s.io")
    namespace.wait_for_kind("inferenceobjectives", "inference.networking.x-k8s.io")
    yield
    machine.remove_inference_kinds()


@pytest.fixture(scope="module", autouse=True)
def installed(kinds: None, release: Release, namespace: Kubernetes) -> None:
    namespace.apply(*(objective(name, priority) for name, priority in OBJECTIVES.items()))
    release.install(
        simulated(gateway={"replicas": 1, "picker": {"enabled": True}}, networkPolicy={"engineFrom": PROXY})
    )


async def engine_of(picker: str, endpoint: str) -> str:
    """The engine that answers a chat through a proxy which wants this endpoint (IP:PORT)."""
    async with (
        running_envoy(envoy_config(PICKER_PORT, picker_host=picker, subset=[endpoint])) as url,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session,
    ):
        body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        async with session.post(f"{url}/v1/chat/completions", json=body) as reply:
            assert reply.status == 200, await reply.text()
            return reply.headers["x-spillway-engine"]


def test_a_proxy_reaches_the_pods_that_are_picked(namespace: Kubernetes, case: Row) -> None:
    """endpoint picker: a real Envoy reaches each pod that is picked"""
    (gateway,) = namespace.wait_for_pods("gateway", 1)
    engines = namespace.wait_for_pods("engine", 2)

    for pod in engines:
        endpoint = f"{pod['status']['podIP']}:8100"
        assert asyncio.run(engine_of(gateway["status"]["podIP"], endpoint)) == name_of(pod)

    case.requests, case.note = len(engines), f"{POOL} is what the definition of InferencePool allows"


def test_objectives_are_read_with_the_charts_rights(namespace: Kubernetes, case: Row) -> None:
    """endpoint picker: InferenceObjectives are read with the rights of the chart's Role"""
    (gateway,) = namespace.wait_for_pods("gateway", 1)
    found = "batch -1, urgent 5"

    def said() -> bool:
        lines = namespace.kubectl("logs", name_of(gateway)).splitlines()
        return any("InferenceObjectives of" in line and found in line for line in lines)

    eventually("the objectives are in the log", said, 60.0)
    case.note = found
