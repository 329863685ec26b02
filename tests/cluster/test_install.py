"""An operator's first experience: the chart installs, its own test passes, a chat is answered, every value arrived,
nothing has more rights than it needs, and nothing is left afterwards."""

from __future__ import annotations

import json
import re
import time

import pytest
from chart.helm_binaries import helms
from cluster.client_pod import ClientPod
from cluster.commands import CommandFailed
from cluster.helm import VERSION, Release
from cluster.kube import Kubernetes, name_of
from cluster.report import Row
from cluster.values import MODEL, OPERATIONS_PORT, simulated
from stack_driver.deadlines import eventually

from spillway_settings.byte_sizes import parse_byte_count

LISTED_KINDS = (
    "pods,services,endpoints,endpointslices,configmaps,secrets,serviceaccounts,roles,rolebindings,deployments,"
    "replicasets,statefulsets,controllerrevisions,poddisruptionbudgets,networkpolicies,horizontalpodautoscalers,"
    "persistentvolumeclaims,ingresses"
)
# Engines show the names alone, as values may be secrets.
NOT_COMPARED = (".extraEnv", ".extraArgs")
KEPT_BY_KUBERNETES = {"configmap/kube-root-ca.crt", "serviceaccount/default"}
SECRET = {
    "apiVersion": "v1",
    "kind": "Secret",
    "metadata": {"name": "redis-password"},
    "stringData": {"password": "correct horse battery staple"},
}


_seconds: dict[str, float] = {}  # that helm install took, by release


def values() -> dict:
    """Two models, one on a claim that its pods share, one on a Valkey with a password: as much as the chart has."""
    claim = {"type": "nvme", "nvme": {"volume": {"type": "sharedClaim", "size": "1GiB", "storageClassName": "lane"}}}
    return simulated(
        engines={
            "main": {"replicas": 1, "offload": {"sharedTier": claim}},
            "other": {
                "replicas": 1,
                "model": {"servedName": "other"},
                "offload": {"numCpuBlocks": 40, "sharedTier": {"type": "redis"}},
            },
        },
        redis={"enabled": True, "existingSecret": {"name": "redis-password"}},
    )


# Of what is the same whichever Helm wrote it.
BY_ONE_HELM = pytest.mark.parametrize("installed", [helms()[1]], indirect=True, ids=["Helm 4"])


@pytest.fixture(scope="module", params=helms(), ids=lambda helm: f"Helm {helm.major}")
def installed(request: pytest.FixtureRequest, namespace: Kubernetes, volume: str) -> Release:
    """Installed by one major version of Helm; the last case takes it away again."""
    release = Release(f"chat{request.param.major}", request.param, namespace)
    namespace.apply(SECRET)
    started = time.monotonic()
    release.install(values())
    _seconds[release.name] = time.monotonic() - started
    yield release
    release.uninstall_if_there()


@pytest.fixture(scope="module")
def volume(kubernetes: Kubernetes) -> str:
    """Volumes that any node could hold, for the claims of this module."""
    names = ["lane-install-3", "lane-install-4"]
    for name in names:
        kubernetes.apply(
            {
                "apiVersion": "v1",
                "kind": "PersistentVolume",
                "metadata": {"name": name},
                "spec": {
                    "capacity": {"storage": "1Gi"},
                    "accessModes": ["ReadWriteMany"],
                    "storageClassName": "lane",
                    "hostPath": {"path": f"/var/tmp/spillway-lane/{name}", "type": "DirectoryOrCreate"},
                },
            }
        )
    yield "lane"
    kubernetes.kubectl("delete", "pv", *names, "--wait=false")


@pytest.fixture(scope="module")
def client(installed: Release, namespace: Kubernetes) -> ClientPod:
    service = f"{installed.name}-spillway-gateway.{namespace.namespace}.svc.cluster.local"
    pod = ClientPod(namespace, service, MODEL, f"spillway-gateway:{VERSION}")
    pod.create()
    yield pod
    pod.remove()


def test_installs(installed: Release, namespace: Kubernetes, case: Row) -> None:
    """install: every pod ready in a namespace that enforces restricted Pod Security."""
    namespace.wait_for_pods("engine", 2)
    namespace.wait_for_pods("gateway", 2)
    namespace.wait_for_pods("redis", 1)
    assert "http" in installed.notes()
    case.note = f"2 gateways, 2 simulated engines, Valkey; helm install --wait took {_seconds[installed.name]:.0f} s"


def test_own_test(installed: Release, case: Row) -> None:
    """helm test"""
    report = installed.test()
    words = [line for line in report.splitlines() if line.startswith("ok ")]
    assert re.search(r"Phase: +Succeeded", report), report
    own = [line for line in words if re.match(r"ok +(values|chat|tier), ", line)]
    assert len(own) == 7 and "FAILED" not in report, report
    case.requests, case.note = 2, "; ".join(words)


@BY_ONE_HELM
def test_chat(client: ClientPod, case: Row) -> None:
    """a chat through the Service"""
    with client.load() as result:
        client.wait_for_requests(60)
    case.requests, case.failed, case.note = result.requests, result.failed, result.words()
    assert result.failed == 0, result.failures


@BY_ONE_HELM
def test_values_arrived(installed: Release, namespace: Kubernetes, client: ClientPod, case: Row) -> None:
    """every value that the chart wrote is what each gateway and each engine reports"""
    compared = 0
    expected = json.loads(namespace.get("configmap", f"{installed.name}-spillway-test")["data"]["release.json"])
    for pod in namespace.ready_pods("gateway"):
        resolved = client.get(f"http://{pod['status']['podIP']}:{OPERATIONS_PORT}/spillway/config")
        compared += require_equal(expected["gateway"]["settings"], resolved["settings"])
    for pod in namespace.ready_pods("engine"):
        resolved = client.get(f"http://{pod['status']['podIP']}:8100/spillway/config")
        settings = resolved["settings"]
        model = next(model for model in expected["models"] if model["name"] == settings["model"]["servedName"])
        compared += require_equal(model["settings"], settings)
        assert settings["name"] == name_of(pod)
        assert settings["offload"]["numCpuBlocks"] == {MODEL: 32, "other": 40}[model["name"]]
    case.note = f"{compared} values of 4 processes compared"


def require_equal(expected: object, actual: object, path: str = "") -> int:
    """Every leaf of `expected`; returns how many."""
    if isinstance(expected, dict):
        assert isinstance(actual, dict), path
        compared = {name: value for name, value in expected.items() if f"{path}.{name}" not in NOT_COMPARED}
        return sum(require_equal(value, actual.get(name), f"{path}.{name}") for name, value in compared.items())
    if isinstance(expected, list):
        assert isinstance(actual, list) and len(expected) == len(actual), f"{path}: {actual!r}, not {expected!r}"
        return sum(require_equal(*pair, f"{path}[{index}]") for index, pair in enumerate(zip(expected, actual)))
    if isinstance(expected, str) and type(actual) is int:  # a size, as the values write it
        expected = parse_byte_count(expected)
    assert expected == actual, f"{path}: {actual!r}, not {expected!r}"
    return 1


def test_restricted(namespace: Kubernetes, case: Row) -> None:
    """restricted Pod Security is enforced: a pod that asks for more is refused"""
    container = {"name": "c", "image": "x", "securityContext": {"privileged": True}}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "too-much"}, "spec": {"containers": [container]}}
    with pytest.raises(CommandFailed) as refusal:
        namespace.apply(pod)
    assert 'violates PodSecurity "restricted' in refusal.value.error
    case.note = "and every pod of the chart was admitted"


@BY_ONE_HELM
def test_rights(installed: Release, namespace: Kubernetes, case: Row) -> None:
    """RBAC can-i, allowed and refused, for each ServiceAccount"""
    accounts = {name_of(pod): pod["spec"]["serviceAccountName"] for pod in namespace.pods_labelled("!lane")}
    gateway = f"{installed.name}-spillway-gateway"
    parts = ("gateway", "engine-main", "engine-other", "redis")
    assert {f"{installed.name}-spillway-{part}" for part in parts} <= set(accounts.values())
    asked = 0
    slices = "endpointslices.discovery.k8s.io"
    for account in sorted(set(accounts.values())):
        watches = account == gateway
        for verb in ("get", "list", "watch"):
            assert namespace.can_i(account, verb, slices) == watches, f"{account} {verb} {slices}"
            asked += 1
        for verb, resource in (
            ("create", slices),
            ("delete", slices),
            ("get", "secrets"),
            ("list", "pods"),
            ("create", "pods/exec"),
            ("get", "configmaps"),
            ("patch", "deployments.apps"),
        ):
            assert not namespace.can_i(account, verb, resource), f"{account} {verb} {resource}"
            asked += 1
    elsewhere = namespace.within("kube-system")
    subject = f"--as=system:serviceaccount:{namespace.namespace}:{gateway}"
    assert elsewhere.kubectl("auth", "can-i", "list", slices, subject, check=False).strip() == "no"
    for pod in namespace.pods_labelled():
        mounts = [mount for item in pod["spec"]["containers"] for mount in item.get("volumeMounts", [])]
        has_token = any(mount["mountPath"].startswith("/var/run/secrets/kubernetes.io") for mount in mounts)
        assert has_token == (pod["spec"]["serviceAccountName"] == gateway), name_of(pod)
    case.requests, case.note = asked + 1, "asked of the API server; only gateways hold a token"


def test_uninstalls(installed: Release, namespace: Kubernetes, client: ClientPod, case: Row) -> None:
    """uninstall: nothing is left but the claim and the pod of the last `helm test`, until the operator removes them"""
    client.remove()
    installed.uninstall()
    kept = {
        f"persistentvolumeclaim/{installed.name}-spillway-engine-main-kv",
        f"pod/{installed.name}-spillway-test",
    }
    foreign = KEPT_BY_KUBERNETES | {"secret/redis-password"}

    def left() -> set[str]:
        return plain(set(namespace.kubectl("get", LISTED_KINDS, "-o", "name").split()))

    eventually("only what is kept is left", lambda: left() == kept | foreign, 90.0)
    namespace.kubectl("delete", "pvc,pod", "-l", f"app.kubernetes.io/instance={installed.name}", "--wait")
    assert left() == foreign
    case.note = f"kept until removed by label: {', '.join(sorted(kept))}"


def plain(names: set[str]) -> set[str]:
    """kind.group/name -> kind/name"""
    return {f"{name.split('/')[0].split('.')[0]}/{name.split('/', 1)[1]}" for name in names}
