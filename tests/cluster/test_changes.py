"""Changes that an operator makes while clients are served: none of them may cost a request."""

from __future__ import annotations

import dataclasses
import json

import pytest
from chart.helm_binaries import Helm, helms
from cluster.client_pod import ClientPod, LoadResult
from cluster.commands import CommandFailed
from cluster.discovery_watch import DiscoveryWatch
from cluster.helm import Release
from cluster.kube import Kubernetes, Object, name_of
from cluster.report import Report, Row
from cluster.values import SCALED_OBJECTS, Values, simulated
from stack_driver.deadlines import eventually

ENGINES_SERVICE = "chat-spillway-engine-pods"
CLIENT_SECRET, SALT_SECRET, ENGINE_SECRET = "client-key", "gateway-salt", "engine-key"


@pytest.fixture(scope="module", autouse=True)
def installed(release: Release, client: ClientPod) -> None:
    release.install(simulated())
    client.create()


def no_failure(result: LoadResult, case: Row, *more: str) -> None:
    case.requests, case.failed = result.requests, result.failed
    case.note = "; ".join([*more, result.words()])
    assert result.failed == 0, result.failures


def test_scale(release: Release, namespace: Kubernetes, client: ClientPod, case: Row, report: Report) -> None:
    """scale 2 -> 4 -> 1 with requests under way"""
    with client.load() as result, following(namespace, client) as watch:
        release.upgrade(simulated(engine={"replicas": 4}))
        namespace.wait_for_pods("engine", 4)
        client.wait_for_requests(client.progress() + 40)
        release.upgrade(simulated(engine={"replicas": 1}))
        namespace.wait_for_pods("engine", 1)
        client.wait_for_requests(client.progress() + 40)
    no_failure(result, case)
    assert len(result.engines) == 4, result.engines
    watch.require_followed(report, "scale 2 -> 4 -> 1")
    release.upgrade(simulated())
    namespace.wait_for_pods("engine", 2)


def test_turning_autoscaling_on(release: Release, namespace: Kubernetes, client: ClientPod, case: Row) -> None:
    """autoscaling turned on under load, of 3 engines and 3 gateways: all stay, and what it chose then stays too"""
    namespace.apply(SCALED_OBJECTS)
    # No metrics are served here, so the gateways' autoscaler changes nothing; kubectl does what KEDA does.
    scaling = {"autoscaling": {"enabled": True}}
    try:
        namespace.wait_for_kind("scaledobjects", "keda.sh")
        release.upgrade(simulated(engine={"replicas": 3}, gateway={"replicas": 3}))
        before = {part: uids(namespace.wait_for_pods(part, 3)) for part in ("engine", "gateway")}
        with client.load() as result:
            release.upgrade(simulated(engine=scaling, gateway=scaling))
            client.wait_for_requests(client.progress() + 40)
            assert {part: uids(namespace.wait_for_pods(part, 3)) for part in before} == before
            namespace.kubectl("scale", "statefulset", "chat-spillway-engine", "--replicas=2")
            namespace.wait_for_pods("engine", 2)
            release.upgrade(simulated(engine=scaling, gateway=scaling))
            client.wait_for_requests(client.progress() + 40)
            assert uids(namespace.wait_for_pods("engine", 2)) < before["engine"]
            assert uids(namespace.wait_for_pods("gateway", 3)) == before["gateway"]
        no_failure(result, case)
    finally:
        release.upgrade(simulated())
        namespace.kubectl("delete", "crd", SCALED_OBJECTS["metadata"]["name"], "--ignore-not-found")
    namespace.wait_for_pods("engine", 2)
    namespace.wait_for_pods("gateway", 2)


@pytest.mark.parametrize("helm", helms(), ids=lambda helm: f"Helm {helm.major}")
def test_mistake_is_refused_before_pods_change(
    release: Release, namespace: Kubernetes, client: ClientPod, helm: Helm, case: Row
) -> None:
    """values that contradict each other are refused by the chart's hook before any pod changes; right ones pass it"""
    checked = {"checks": {"hook": True}}
    operator = dataclasses.replace(release, helm=helm)
    before = uids(namespace.pods("engine") + namespace.pods("gateway"))
    wrong = {"engine": {"offload": {"numCpuBlocks": 40}}, "redis": {"enabled": True}, **checked}
    sentence = "redis.enabled: true, but no engine uses it"

    with client.load() as result, pytest.raises(CommandFailed) as refused:
        operator.upgrade(simulated(**wrong))
    seen = refused.value.error + refused.value.output
    log = namespace.kubectl("logs", "job/chat-spillway-check")
    assert "chat-spillway-check" in seen and f"- {sentence}" in log, seen + log
    assert helm.major == 3 or sentence in seen, seen  # Helm prints it from 3.18 on
    assert uids(namespace.pods("engine") + namespace.pods("gateway")) == before
    assert "job.batch/chat-spillway-check" in of_check(namespace)  # its log is there to be read
    operator.upgrade(simulated(**checked))
    assert uids(namespace.pods("engine") + namespace.pods("gateway")) == before
    assert of_check(namespace) == []
    no_failure(result, case, seen)


def test_rolling_upgrade(release: Release, namespace: Kubernetes, client: ClientPod, case: Row, report: Report) -> None:
    """rolling upgrade with a changed offload value under load"""
    gateways = {name_of(pod) for pod in namespace.pods("gateway")}
    before = {pod["metadata"]["uid"] for pod in namespace.pods("engine")}
    with client.load() as result, following(namespace, client) as watch:
        release.upgrade(changed_offload())
        eventually("both engines replaced", lambda: replaced(namespace, before), 240.0)
        client.wait_for_requests(client.progress() + 40)
    no_failure(result, case)
    assert offload_in_use(client, namespace) == {48}
    assert {name_of(pod) for pod in namespace.pods("gateway")} == gateways, "no gateway had a reason to restart"
    watch.require_followed(report, "rolling upgrade")


def test_rollback(release: Release, namespace: Kubernetes, client: ClientPod, case: Row, report: Report) -> None:
    """rollback under load"""
    before = {pod["metadata"]["uid"] for pod in namespace.pods("engine")}
    with client.load() as result, following(namespace, client) as watch:
        release.rollback()
        eventually("both engines replaced", lambda: replaced(namespace, before), 240.0)
    no_failure(result, case)
    assert offload_in_use(client, namespace) == {32}
    watch.require_followed(report, "rollback")


def test_gateway_upgrade(release: Release, namespace: Kubernetes, client: ClientPod, case: Row) -> None:
    """rolling upgrade of the gateways under load, with half of the clients on kept connections"""
    engines = {pod["metadata"]["uid"] for pod in namespace.pods("engine")}
    before = {pod["metadata"]["uid"] for pod in namespace.pods("gateway")}
    with client.load() as result:
        release.upgrade(simulated(gateway={"admission": {"waitingRequestsMax": 500}}))
        eventually("both gateways replaced", lambda: replaced(namespace, before, "gateway"), 240.0)
        client.wait_for_requests(client.progress() + 40)
    no_failure(result, case)
    assert {pod["metadata"]["uid"] for pod in namespace.pods("engine")} == engines, "no engine had a reason to restart"


def test_wrong_image(release: Release, namespace: Kubernetes, client: ClientPod, case: Row, report: Report) -> None:
    """an upgrade to images that do not exist does not take the service down, and a rollback mends it"""
    # From an address that refuses at once: nodes without a way out would first wait a minute for a name server.
    wrong = {"image": {"registry": "127.0.0.1:1", "tag": "no-such-tag"}}
    with client.load() as result, following(namespace, client) as watch:
        release.upgrade(simulated(engine=wrong, gateway=wrong), wait=False)
        eventually("a pod waits for its image", lambda: waiting_for_image(namespace), 120.0)
        client.wait_for_requests(client.progress() + 60)
        assert len(namespace.ready_pods("gateway")) == 2
        assert len(namespace.ready_pods("engine")) == 1, "one engine at a time is tried"
        release.rollback()
        namespace.wait_for_pods("engine", 2)
        namespace.wait_for_pods("gateway", 2)
    no_failure(result, case, "one engine stayed down until the rollback")
    watch.require_followed(report, "images that do not exist")


def test_secret_rotated(release: Release, namespace: Kubernetes, client: ClientPod, case: Row) -> None:
    """Secrets rotated: the clients' keys under load and without a restart, then the engines' key by secretsRevision"""
    first, second = "sk-first-" + "1" * 40, "sk-second-" + "2" * 40
    engine_keys = "sk-engine-" + "e" * 40, "sk-engine-" + "f" * 40
    write_secrets(namespace, first, keys_file(namespace, first), engine_keys[0])
    release.upgrade(guarded("1"))
    settled(namespace)
    client.remove()
    client.create(key_secret=CLIENT_SECRET)
    pods = {pod["metadata"]["uid"] for pod in namespace.pods("gateway") + namespace.pods("engine")}
    with client.load() as result:
        write_secrets(namespace, first, keys_file(namespace, first, second), engine_keys[0])
        eventually("the second key is taken", lambda: statuses_with(namespace, client, second) == {200}, 180.0)
    assert statuses_with(namespace, client, "sk-wrong" + "0" * 40) == {401}
    write_secrets(namespace, second, keys_file(namespace, second), engine_keys[0])
    eventually("the first key is refused", lambda: statuses_with(namespace, client, first) == {401}, 180.0)
    assert {pod["metadata"]["uid"] for pod in namespace.pods("gateway") + namespace.pods("engine")} == pods

    client.remove()
    write_secrets(namespace, second, keys_file(namespace, second), engine_keys[1])
    release.upgrade(guarded("2"))
    settled(namespace)
    client.create(key_secret=CLIENT_SECRET)
    assert client.chat()["status"] == 200
    case.requests, case.failed, case.note = result.requests, result.failed, result.words()
    for pod in namespace.pods_labelled():
        text = json.dumps(pod["spec"]) + namespace.kubectl("logs", name_of(pod))
        assert "sk-" not in text, f"{name_of(pod)} shows a key"
    assert result.failed == 0, result.failures


def of_check(namespace: Kubernetes) -> list[str]:
    """Return the names of the Secrets and Jobs that the hook left."""
    return namespace.kubectl("get", "secrets,jobs", "-l", "app.kubernetes.io/component=check", "-o", "name").split()


def following(namespace: Kubernetes, client: ClientPod) -> DiscoveryWatch:
    return DiscoveryWatch(namespace, client, ENGINES_SERVICE)


def settled(namespace: Kubernetes) -> None:
    namespace.wait_for_pods("engine", 2)
    namespace.wait_for_pods("gateway", 2)


def changed_offload() -> Values:
    return simulated(engine={"offload": {"numCpuBlocks": 48}})


def guarded(revision: str) -> Values:
    return simulated(
        engine={"apiKeySecret": {"name": ENGINE_SECRET}, "secretsRevision": revision},
        gateway={
            "auth": {
                "keysSecret": {"name": "gateway-keys"},
                "saltSecret": {"name": SALT_SECRET},
                "engineKeySecret": {"name": ENGINE_SECRET},
            },
            "secretsRevision": revision,
        },
    )


def keys_file(namespace: Kubernetes, *keys: str) -> str:
    """Return the file that docs/operations.md has an operator write, made with the product's own command."""
    pod = name_of(namespace.ready_pods("gateway")[0])
    command = ("python3", "-m", "spillway_gateway", "--hash-key")
    hashes = [namespace.execute(pod, *command, given=key).strip() for key in keys]
    return json.dumps({"tenants": [{"name": "lane", "keys": hashes}]})


def write_secrets(namespace: Kubernetes, client_key: str, keys: str, engine_key: str) -> None:
    for name, data in (
        (CLIENT_SECRET, {"api-key": client_key}),
        ("gateway-keys", {"keys.yaml": keys}),
        (SALT_SECRET, {"secret": "s" * 64}),
        (ENGINE_SECRET, {"api-key": engine_key}),
    ):
        namespace.apply({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": data})


def statuses_with(namespace: Kubernetes, client: ClientPod, key: str) -> set[int]:
    """Return the statuses with which the gateways answer to this key."""
    addresses = [pod["status"]["podIP"] for pod in namespace.ready_pods("gateway")]
    code = (
        "import urllib.request as u, urllib.error as e\n"
        f"for address in {addresses!r}:\n"
        f"  r = u.Request(f'http://{{address}}:8000/v1/models', headers={{'authorization': 'Bearer {key}'}})\n"
        "  try: print(u.urlopen(r, timeout=10).status)\n"
        "  except e.HTTPError as x: print(x.code)"
    )
    return {int(word) for word in client.python(code).split()}


def uids(pods: list[Object]) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pods}


def replaced(namespace: Kubernetes, before: set[str], component: str = "engine") -> bool:
    ready = namespace.ready_pods(component)
    settled = len(ready) == len(namespace.pods(component)) == 2
    return settled and not before & {pod["metadata"]["uid"] for pod in ready}


def offload_in_use(client: ClientPod, namespace: Kubernetes) -> set[int]:
    addresses = [pod["status"]["podIP"] for pod in namespace.ready_pods("engine")]
    resolved = [client.get(f"http://{address}:8100/spillway/config") for address in addresses]
    return {answer["settings"]["offload"]["numCpuBlocks"] for answer in resolved}


def waiting_for_image(namespace: Kubernetes) -> bool:
    reasons = [
        status.get("state", {}).get("waiting", {}).get("reason")
        for pod in namespace.pods("engine") + namespace.pods("gateway")
        for status in pod["status"].get("containerStatuses", [])
    ]
    return sum(reason in ("ErrImagePull", "ImagePullBackOff") for reason in reasons) >= 2
