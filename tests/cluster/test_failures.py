"""Failures: pods killed, Valkey's password rotated, a node drained, a node lost, the API server away. The service goes
on.

A request that ran in a process which was killed without warning is lost with it. So after a kill at most the requests
that ran there fail, and none that was asked later.
"""

from __future__ import annotations

import time
from datetime import datetime

import pytest
from cluster.client_pod import WORKERS, ClientPod, LoadResult
from cluster.commands import CommandFailed
from cluster.discovery_watch import DiscoveryWatch
from cluster.helm import Release
from cluster.kube import Kubernetes, Object, name_of
from cluster.local_cluster import NODES, LocalCluster
from cluster.report import Report, Row
from cluster.valkey_password import (
    SECRET,
    passwords_held,
    refused_logins,
    takes_password,
    wait_for_logins,
    write_password,
)
from cluster.values import OPERATIONS_PORT, Values, simulated
from stack_driver.deadlines import eventually

ENGINES_SERVICE = "chat-spillway-engine-pods"
PASSWORDS = "a" * 32, "b" * 32


@pytest.fixture(scope="module", autouse=True)
def installed(release: Release, client: ClientPod, namespace: Kubernetes, machine: LocalCluster) -> None:
    write_password(namespace, PASSWORDS[0])
    release.install(values())
    client.create(node=NODES[0])


@pytest.fixture(autouse=True)
def everything_is_up(installed: None, namespace: Kubernetes) -> None:
    """A case that failed must not take the next ones with it."""
    namespace.wait_for_pods("engine", 2, 300.0)
    namespace.wait_for_pods("gateway", 2, 300.0)


def values(secrets_revision: str = "") -> Values:
    redis = {"enabled": True, "existingSecret": {"name": SECRET}, "nodeSelector": on_node(NODES[0])}
    return simulated(
        engine={"offload": {"sharedTier": {"type": "redis"}}},
        # The load repeats few prompts. One that was alone on an engine which is killed here would be refused for a
        # minute, each time at once (gateway/tests/upstream/test_suspects.py).
        gateway={"limits": {"suspectSeconds": 1}},
        redis={**redis, "secretsRevision": secrets_revision},
    )


def on_node(node: str) -> dict[str, str]:
    return {"kubernetes.io/hostname": node}


def kill(namespace: Kubernetes, pod: Object) -> None:
    """SIGKILL to its process, as if it had crashed. Even so it first gets SIGTERM, and serves on for some seconds."""
    namespace.kubectl("delete", "pod", name_of(pod), "--grace-period=0", "--force", "--wait=false")


def require_only_lost_ones(result: LoadResult, case: Row) -> None:
    case.requests, case.failed, case.note = result.requests, result.failed, result.words()
    result.require_only_lost_ones(WORKERS)


def test_engine_killed(namespace: Kubernetes, client: ClientPod, case: Row, report: Report) -> None:
    """engine pod killed"""
    victim = namespace.ready_pods("engine")[0]
    with client.load(WORKERS) as result, DiscoveryWatch(namespace, client, ENGINES_SERVICE) as watch:
        kill(namespace, victim)
        eventually("the engine is back", lambda: back(namespace, victim), 180.0)
        namespace.wait_for_pods("engine", 2)
        client.wait_for_requests(client.progress() + 40)
    require_only_lost_ones(result, case)
    watch.require_followed(report, "engine killed")


def test_gateway_killed(namespace: Kubernetes, client: ClientPod, case: Row) -> None:
    """gateway pod killed"""
    victim = namespace.ready_pods("gateway")[0]
    with client.load(WORKERS) as result:
        kill(namespace, victim)
        namespace.wait_for_pods("gateway", 2)
        client.wait_for_requests(client.progress() + 60)
    require_only_lost_ones(result, case)


def test_redis_killed(namespace: Kubernetes, client: ClientPod, case: Row) -> None:
    """Redis pod killed: a tier that is away costs no request"""
    victim = namespace.ready_pods("redis")[0]
    with client.load(WORKERS) as result:
        kill(namespace, victim)
        eventually("Valkey is back", lambda: back(namespace, victim, "redis"), 180.0)
        client.wait_for_requests(client.progress() + 40)
    case.requests, case.failed, case.note = result.requests, result.failed, result.words()
    assert result.failed == 0, result.failures


def test_password_rotated(namespace: Kubernetes, client: ClientPod, release: Release, case: Row) -> None:
    """the embedded Valkey's password rotated as docs/operations.md has it: no request fails, engines stay and log in"""
    old, new = PASSWORDS
    engines = {pod["metadata"]["uid"]: name_of(pod) for pod in namespace.ready_pods("engine")}
    (valkey,) = namespace.ready_pods("redis")
    assert refused_logins(namespace, engines.values()) == []
    with client.load(WORKERS) as result:
        write_password(namespace, new)
        eventually("the engines have it", lambda: passwords_held(namespace, engines.values()) == {new}, 180.0)
        assert takes_password(namespace, valkey, old), "Valkey reads it when its pod starts"
        release.upgrade(values(secrets_revision="2"))
        eventually("Valkey is back", lambda: back(namespace, valkey, "redis"), 180.0)
        wait_for_logins(namespace, engines.values())
        client.wait_for_requests(client.progress() + 40)
    (valkey,) = namespace.ready_pods("redis")
    assert takes_password(namespace, valkey, new) and not takes_password(namespace, valkey, old)
    assert {pod["metadata"]["uid"] for pod in namespace.ready_pods("engine")} == set(engines)
    case.requests, case.failed, case.note = result.requests, result.failed, result.words()
    assert result.failed == 0, result.failures


@pytest.mark.own_cluster
def test_api_server_restarted(
    namespace: Kubernetes, client: ClientPod, machine: LocalCluster, release: Release, case: Row, report: Report
) -> None:
    """API server restarted: requests go on, and gateways follow changes again"""
    with client.load(WORKERS) as result:
        begun = time.time()
        machine.restart_api_server()
        restarted = time.time()
        # The nodes' proxies follow it too, with pauses of their own: until then no gateway has a way there.
        heard = eventually("every gateway has heard from it", lambda: heard_since(namespace, client, begun), 240.0)
        client.wait_for_requests(client.progress() + 40)
        victim = namespace.ready_pods("engine")[1]
        with DiscoveryWatch(namespace, client, ENGINES_SERVICE) as watch:
            namespace.kubectl("delete", "pod", name_of(victim), "--wait=false")
            eventually("the engine is back", lambda: back(namespace, victim), 180.0)
            namespace.wait_for_pods("engine", 2)
            client.wait_for_requests(client.progress() + 40)
    case.requests, case.failed = result.requests, result.failed
    case.note = f"gateways heard from it {max(0.0, heard - restarted):.1f} s after it was ready; {result.words()}"
    assert result.failed == 0, result.failures
    watch.require_followed(report, "API server restarted")


@pytest.mark.own_cluster
def test_node_drained(namespace: Kubernetes, client: ClientPod, case: Row, report: Report) -> None:
    """node drained: the disruption budgets let pods go one at a time, and no request is lost"""
    node = NODES[1]
    with client.load(WORKERS) as result, DiscoveryWatch(namespace, client, ENGINES_SERVICE) as watch:
        namespace.kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=240s", seconds=300)
        namespace.wait_for_pods("engine", 2)
        namespace.wait_for_pods("gateway", 2)
        client.wait_for_requests(client.progress() + 40)
        assert {pod["spec"]["nodeName"] for pod in pods_of_service(namespace)} == {NODES[0]}
    namespace.kubectl("uncordon", node)
    case.requests, case.failed, case.note = result.requests, result.failed, result.words()
    assert result.failed == 0, result.failures
    rebalance(namespace)
    watch.require_followed(report, "node drained")


@pytest.mark.own_cluster
def test_node_lost(namespace: Kubernetes, client: ClientPod, machine: LocalCluster, case: Row, report: Report) -> None:
    """node lost and back: the other node serves on, and both serve afterwards"""
    node = NODES[1]
    lost = [pod for pod in pods_of_service(namespace) if pod["spec"]["nodeName"] == node]
    assert lost, "something of the service runs there"
    try:
        with client.load(WORKERS) as result, DiscoveryWatch(namespace, client, ENGINES_SERVICE) as watch:
            at = time.time()
            machine.lose_node(node)
            eventually("the node counts as lost", lambda: not node_ready(namespace, node), 120.0)
            noticed = time.time() - at
            client.wait_for_requests(client.progress() + 60)
            machine.bring_back(node)
            eventually("the node is back", lambda: node_ready(namespace, node), 120.0)
            namespace.wait_for_pods("engine", 2, 300.0)
            namespace.wait_for_pods("gateway", 2, 300.0)
            client.wait_for_requests(client.progress() + 60)
    finally:
        if not node_ready(namespace, node):
            machine.bring_back(node)
    # Until the control plane has noticed, the Service still offers the lost gateway's address: connections to it are
    # tried again, and a request that was being answered there is lost.
    case.requests, case.failed = result.requests, result.failed
    case.note = f"Kubernetes noticed after {noticed:.0f} s; {result.words()}"
    late = [failure for failure in result.failures if failure["asked"] > at + noticed]
    assert not late, [failure["what"] for failure in late]
    assert result.failed <= 2 * WORKERS, [failure["what"] for failure in result.failures]
    watch.require_followed(report, "node lost and back")


def heard_since(namespace: Kubernetes, client: ClientPod, at: float) -> float | None:
    """Return when the last gateway's discovery was confirmed, by its own clock; None while one fails or was not since
    `at`."""
    urls = [f"http://{pod['status']['podIP']}:{OPERATIONS_PORT}/spillway/config" for pod in namespace.pods("gateway")]
    try:
        models = [model for url in urls for model in client.get(url)["discovered"].values()]
    except CommandFailed:
        return None  # of the way into the pod
    heard = [datetime.fromisoformat(model["heardAt"]).timestamp() for model in models]
    return max(heard) if min(heard) > at and not any(model["error"] for model in models) else None


def back(namespace: Kubernetes, victim: Object, component: str = "engine") -> bool:
    """Another pod is ready in its place."""
    ready = [pod for pod in namespace.ready_pods(component) if name_of(pod) == name_of(victim)]
    return bool(ready) and ready[0]["metadata"]["uid"] != victim["metadata"]["uid"]


def pods_of_service(namespace: Kubernetes) -> list[Object]:
    return namespace.pods("engine") + namespace.pods("gateway")


def rebalance(namespace: Kubernetes) -> None:
    """One engine and one gateway to the node that is back, by ending one of each."""
    for component in ("engine", "gateway"):
        pod = namespace.ready_pods(component)[-1]
        namespace.kubectl("delete", "pod", name_of(pod))
        namespace.wait_for_pods(component, 2)


def node_ready(namespace: Kubernetes, node: str) -> bool:
    conditions = namespace.get("node", node)["status"]["conditions"]
    return any(item["type"] == "Ready" and item["status"] == "True" for item in conditions)
