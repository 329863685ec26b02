"""The chart's NetworkPolicies with egress restricted, as the cluster's network plugin enforces them: who may talk to
what.

A port that a policy closes looks like one without a listener, so each port is also reached by those who may.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import pytest
from cluster.client_pod import NAME, ClientPod
from cluster.helm import VERSION, Release
from cluster.kube import Kubernetes, name_of
from cluster.report import Row
from cluster.values import MODEL, OPERATIONS_PORT, Values, over, simulated
from stack_driver.deadlines import eventually

API_SERVER = "kubernetes.default.svc.cluster.local."
PORTS = {  # of each pod, by component and by what the table below calls them
    "gateway": {"gateway": 8000, "operations": OPERATIONS_PORT},
    "engine": {"engine": 8100, "events": 8200, "replay": 8300},
    "redis": {"redis": 6379},
}
EVERYTHING = {"gateway", "operations", "engine", "events", "replay", "redis", "api server"}
ADMITTED: dict[str, set[str]] = {
    "pod of another namespace": {"gateway", "api server"},
    "Prometheus": {"gateway", "operations", "engine", "api server"},
    "gateway": {"engine", "events", "replay", "api server"},
    "engine": {"redis"},
    "redis": set(),
}
# kube-router 2.1 lets a pod out to another one of the same policy wherever that policy lets anyone in, and gateways may
# be reached by everyone.
NOT_ASKED = {("gateway", "gateway")}
# Of all addresses but the pod's own: those where a connection is accepted.
CODE = """
import concurrent.futures, json, os, socket, sys
own = socket.gethostbyname(socket.gethostname())
def accepted(address):
    try:
        socket.create_connection(address, timeout=5).close()
        return True
    except OSError:
        return False
with concurrent.futures.ThreadPoolExecutor(32) as pool:
    found = {
        name: list(pool.map(accepted, [address for address in map(tuple, addresses) if address[0] != own]))
        for name, addresses in json.loads(sys.stdin.read()).items()
    }
print(json.dumps(found))
"""


def values(enabled: bool = True) -> Values:
    """Everything that the chart can close is closed. The lane's name server lies outside of every namespace."""
    names = [{"ports": [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]}]
    base = simulated(engine={"offload": {"sharedTier": {"type": "redis"}}}, redis={"enabled": True})
    if not enabled:
        return over(base, {"networkPolicy": {"enabled": False}})
    return over(base, {"networkPolicy": {"restrictEgress": True, "engineEgress": names, "gatewayEgress": names}})


@pytest.fixture(scope="module", autouse=True)
def installed(release: Release, client: ClientPod) -> None:
    release.install(values())
    client.create()


@pytest.fixture(scope="module")
def stranger(kubernetes: Kubernetes, client: ClientPod, new_namespace) -> Iterator[Kubernetes]:
    """A namespace with the same pod under the same labels as the one that may read metrics."""
    elsewhere = new_namespace("network-stranger")
    ClientPod(elsewhere, client.url.removeprefix("http://"), MODEL, f"spillway-gateway:{VERSION}").create()
    yield elsewhere
    kubernetes.kubectl("delete", "namespace", "network-stranger", "--wait=false")


def test_served(namespace: Kubernetes, client: ClientPod, case: Row) -> None:
    """NetworkPolicies: with every way closed that the chart can close, clients are served"""
    with client.load() as result:
        client.wait_for_requests(60)
    case.requests, case.failed, case.note = result.requests, result.failed, result.words()
    assert result.failed == 0, result.failures
    assert len(result.engines) == 2


def test_enforced(namespace: Kubernetes, stranger: Kubernetes, case: Row) -> None:
    """NetworkPolicies: who must not connect cannot, who must can"""
    require_reached(namespace, stranger, ADMITTED)
    case.note = f"{len(ADMITTED)} kinds of pods to {len(EVERYTHING)} kinds of ports, of every pod there"


def test_taken_away(namespace: Kubernetes, stranger: Kubernetes, release: Release, case: Row) -> None:
    """NetworkPolicies: without them everybody reaches every port, so it was they that refused"""
    release.upgrade(values(enabled=False))
    require_reached(namespace, stranger, dict.fromkeys(ADMITTED, EVERYTHING))
    case.note = f"the same {len(ADMITTED)} and {len(EVERYTHING)}"


def require_reached(namespace: Kubernetes, stranger: Kubernetes, expected: Mapping[str, set[str]]) -> None:
    everywhere = addresses(namespace)
    for source, names in expected.items():
        asked = {name: found for name, found in everywhere.items() if (source, name) not in NOT_ASKED}
        given = json.dumps(asked)
        if source in PORTS:
            require_of(namespace, name_of(namespace.ready_pods(source)[0]), given, names)
        else:
            require_of(stranger if source == "pod of another namespace" else namespace, NAME, given, names)


def require_of(place: Kubernetes, pod: str, given: str, names: set[str]) -> None:
    """Wait until this pod reaches all of these ports and no other: a plugin follows pods and policies by itself."""
    found: dict[str, list[bool]] = {}

    def as_expected() -> bool:
        found.update(json.loads(place.execute(pod, "python3", "-c", CODE, given=given)))
        return all(accepted == (name in names) for name, each in found.items() for accepted in each)

    try:
        eventually(f"{pod} reaches {sorted(names)} alone", as_expected, 60.0)
    except AssertionError as error:
        raise AssertionError(f"{error}; accepted: {found}") from None


def addresses(namespace: Kubernetes) -> dict[str, list[tuple[str, int]]]:
    """Return addresses of every pod of the release, by the names of PORTS."""
    found: dict[str, list[tuple[str, int]]] = {"api server": [(API_SERVER, 443)]}
    for component, ports in PORTS.items():
        for name, port in ports.items():
            found[name] = [(pod["status"]["podIP"], port) for pod in namespace.ready_pods(component)]
    assert set(found) == EVERYTHING and all(found.values())
    return found
