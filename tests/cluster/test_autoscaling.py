"""Scaling to zero and back by KEDA itself, and a Prometheus that scrapes the gateways: nothing here scales but they.

Only with WITH_KEDA=1, as compiling KEDA's operator takes minutes even with its Prometheus scaler alone. test_models.py
has the same case by the metric and a patch.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster.client_pod import ClientPod
from cluster.helm import Release
from cluster.kube import Kubernetes
from cluster.local_cluster import HOST, LocalCluster
from cluster.report import Row
from cluster.values import CLIENT_LABELS, MODEL, OPERATIONS_PORT, Values, simulated
from stack_driver.deadlines import eventually

pytestmark = [pytest.mark.own_cluster, pytest.mark.keda]
POLL_SECONDS = 30  # KEDA's default
ZERO_SECONDS = 6.0 * POLL_SECONDS


@pytest.fixture(scope="module")
def prometheus(kubernetes: Kubernetes, machine: LocalCluster) -> Iterator[str]:
    """Prometheus' URL; it is stopped with KEDA when the release has gone."""
    yield machine.run_keda()
    machine.stop_keda()


@pytest.fixture(scope="module", autouse=True)
def installed(
    prometheus: str, release: Release, namespace: Kubernetes, client: ClientPod, machine: LocalCluster
) -> None:
    release.install(values(prometheus))
    gateways = namespace.wait_for_pods("gateway", 2)
    machine.scrape(str(namespace.namespace), [f"{pod['status']['podIP']}:{OPERATIONS_PORT}" for pod in gateways])
    client.create()


def values(prometheus: str) -> Values:
    scaling = {
        "enabled": True,
        "minReplicas": 0,
        "maxReplicas": 2,
        "trigger": "gateway",
        "prometheusAddress": prometheus,
        "cooldownSeconds": POLL_SECONDS,
    }
    scrapers = [{"podSelector": {"matchLabels": CLIENT_LABELS}}, {"ipBlock": {"cidr": f"{HOST}/32"}}]
    chosen = simulated(engine={"autoscaling": scaling}, networkPolicy={"prometheusFrom": scrapers})
    del chosen["engine"]["replicas"]  # spillway check refuses what would not be read
    return chosen


def test_scale_to_zero(namespace: Kubernetes, client: ClientPod, case: Row) -> None:
    """KEDA: to zero without requests, back for the first request, which is answered, and to zero again"""
    eventually("no engine is left", lambda: not namespace.pods("engine"), ZERO_SECONDS)
    assert len(namespace.ready_pods("gateway")) == 2
    assert client.status_of(MODEL) == 200, "it waited for the engine"
    with client.load() as result:
        client.wait_for_requests(60)
    eventually("no engine is left again", lambda: not namespace.pods("engine"), ZERO_SECONDS)
    case.requests, case.failed, case.note = result.requests, result.failed, result.words()
    assert result.failed == 0, result.failures
