"""Replicas of two pods each, made by the controller of LeaderWorkerSets itself.

A replica has one endpoint. What is announced to one of its pods costs no request; ranks that are lost end the answers
that they were computing.
"""

from __future__ import annotations

import json

import pytest
from cluster.client_pod import WORKERS, ClientPod, LoadResult
from cluster.helm import Release
from cluster.kube import Kubernetes, name_of
from cluster.local_cluster import NODES
from cluster.report import Row
from cluster.values import simulated_over_two_pods
from stack_driver.deadlines import eventually

pytestmark = pytest.mark.own_cluster
SET = "chat-spillway-engine"
LEADERS = {f"{SET}-0", f"{SET}-1"}
PODS = {*LEADERS, f"{SET}-0-1", f"{SET}-1-1"}
RESTART_SECONDS = 240.0


@pytest.fixture(scope="module", autouse=True)
def installed(leader_worker_sets: None, release: Release, namespace: Kubernetes, client: ClientPod) -> None:
    release.install(simulated_over_two_pods())
    namespace.wait_for_pods("engine", len(PODS))
    client.create()


def test_one_endpoint_for_each_replica(namespace: Kubernetes, client: ClientPod, case: Row) -> None:
    """replicas of two pods: the Service, and so the gateway, has their leaders alone"""
    assert {name_of(pod) for pod in namespace.pods("engine")} == PODS
    slices = json.loads(
        namespace.kubectl("get", "endpointslices", "-l", f"kubernetes.io/service-name={SET}-pods", "-o", "json")
    )
    endpoints = [endpoint["targetRef"]["name"] for piece in slices["items"] for endpoint in piece["endpoints"]]
    assert sorted(endpoints) == sorted(LEADERS)
    with client.load() as result:
        client.wait_for_requests(40)
    no_failure(result, case)
    assert set(result.engines) == LEADERS


def test_own_test(release: Release, case: Row) -> None:
    """replicas of two pods: helm test counts replicas"""
    report = release.test()
    assert "2 of 2 engines ready, all with the settings of these values" in report, report
    case.requests, case.note = 1, "; ".join(line for line in report.splitlines() if line.startswith("ok "))


def test_a_replica_loses_a_pod(namespace: Kubernetes, client: ClientPod, case: Row) -> None:
    """replicas of two pods: a pod that is killed costs its replica a restart, and no request"""
    before = uids(namespace)
    with client.load() as result:
        client.wait_for_requests(20)
        namespace.kubectl("delete", "pod", f"{SET}-0-1", "--grace-period=1")
        eventually("the whole replica is new", lambda: are_new(namespace, before, 0), RESTART_SECONDS)
        client.wait_for_requests(client.progress() + 40)
    no_failure(result, case)
    assert replica(uids(namespace), 1) == replica(before, 1), "the other replica had no reason to restart"


def test_a_pod_that_is_lost_unseen(namespace: Kubernetes, client: ClientPod, case: Row) -> None:
    """replicas of two pods: a pod deleted with --force, which the controller does not see, costs begun answers"""
    before = uids(namespace)
    with client.load() as result:
        client.wait_for_requests(20)
        namespace.kubectl("delete", "pod", f"{SET}-1-1", "--force", "--grace-period=0")
        eventually("the whole replica is new", lambda: are_new(namespace, before, 1), RESTART_SECONDS)
        client.wait_for_requests(client.progress() + 40)
    only_lost_answers(result, case)


def test_a_process_of_a_further_pod_ends(namespace: Kubernetes, client: ClientPod, case: Row) -> None:
    """replicas of two pods: a process of the second pod that is killed costs its replica a restart and its answers"""
    before = uids(namespace)
    with client.load() as result:
        client.wait_for_requests(20)
        kill = "import os, signal; os.kill(1, signal.SIGTERM); os.kill(1, signal.SIGTERM)"
        namespace.execute(f"{SET}-1-1", "python3", "-c", kill)
        eventually("the whole replica is new", lambda: are_new(namespace, before, 1), RESTART_SECONDS)
        client.wait_for_requests(client.progress() + 40)
    only_lost_answers(result, case)


def test_a_node_is_drained(namespace: Kubernetes, client: ClientPod, case: Row) -> None:
    """replicas of two pods: a node is drained under load, one replica at a time"""
    chosen = "--pod-selector=app.kubernetes.io/component=engine"
    with client.load() as result:
        client.wait_for_requests(20)
        try:
            namespace.kubectl("drain", NODES[1], chosen, "--delete-emptydir-data", "--timeout=400s", seconds=420)
            eventually("all pods run elsewhere", lambda: are_ready(namespace), RESTART_SECONDS)
        finally:
            namespace.kubectl("uncordon", NODES[1])
        client.wait_for_requests(client.progress() + 40)
    no_failure(result, case)


def test_rolling_upgrade(release: Release, namespace: Kubernetes, client: ClientPod, case: Row) -> None:
    """replicas of two pods: a rolling upgrade under load"""
    before = uids(namespace)
    with client.load() as result:
        release.upgrade(simulated_over_two_pods(model={"maxLength": 1024}, deviceBlocks=40))
        eventually(
            "both replicas are new", lambda: all(are_new(namespace, before, each) for each in (0, 1)), RESTART_SECONDS
        )
        client.wait_for_requests(client.progress() + 40)
    no_failure(result, case)


def test_scaling(namespace: Kubernetes, client: ClientPod, case: Row) -> None:
    """replicas of two pods: one more and one less by the scale subresource, as KEDA does it"""
    with client.load() as result:
        namespace.kubectl("scale", "leaderworkerset", SET, "--replicas=3")
        namespace.wait_for_pods("engine", len(PODS) + 2)
        client.wait_for_requests(client.progress() + 40)
        namespace.kubectl("scale", "leaderworkerset", SET, "--replicas=2")
        namespace.wait_for_pods("engine", len(PODS))
        client.wait_for_requests(client.progress() + 40)
    no_failure(result, case)
    assert set(result.engines) == {*LEADERS, f"{SET}-2"}


def no_failure(result: LoadResult, case: Row) -> None:
    case.requests, case.failed, case.note = result.requests, result.failed, result.words()
    assert result.failed == 0, result.failures


def only_lost_answers(result: LoadResult, case: Row) -> None:
    case.requests, case.failed, case.note = result.requests, result.failed, result.words()
    assert all(failure["streamed"] for failure in result.failures), "an answer that had not begun comes from elsewhere"
    result.require_only_lost_ones(WORKERS)


def uids(namespace: Kubernetes) -> dict[str, str]:
    return {name_of(pod): pod["metadata"]["uid"] for pod in namespace.pods("engine")}


def replica(pods: dict[str, str], index: int) -> set[str]:
    return {uid for name, uid in pods.items() if f"{name}-".startswith(f"{SET}-{index}-")}


def are_ready(namespace: Kubernetes) -> bool:
    return {name_of(pod) for pod in namespace.ready_pods("engine")} == PODS


def are_new(namespace: Kubernetes, before: dict[str, str], index: int) -> bool:
    return are_ready(namespace) and not replica(uids(namespace), index) & replica(before, index)
