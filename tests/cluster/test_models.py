"""Several models behind one gateway: none of them may cost another one's clients a request, not even one at zero."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from cluster.client_pod import ClientPod, LoadResult
from cluster.helm import Release
from cluster.kube import Kubernetes, Object
from cluster.report import Row
from cluster.values import SCALED_OBJECTS, Values, over, simulated
from stack_driver.deadlines import eventually

WAITING = "spillway_gateway_admission_waiting_requests"
LEGS = "spillway_gateway_legs_total"


@pytest.fixture(scope="module", autouse=True)
def installed(release: Release, client: ClientPod) -> None:
    """One model, by `engine` alone."""
    release.install(simulated())
    client.create()


def three(scaling: Values | None = None, **fields: Any) -> Values:
    """The first model, one that is away, by its replicas or as its autoscaler decides, and one that rolls."""
    count = {"replicas": 0} if scaling is None else {"autoscaling": scaling}
    base = {
        "default": {},
        "away": {"model": {"servedName": "away"}, **count},
        "rolling": {"model": {"servedName": "rolling"}, "replicas": 1},
    }
    return simulated(engines=over(base, fields))


def engines_of(namespace: Kubernetes, model: str) -> list[Object]:
    return namespace.pods_labelled(f"spillway/engine={model}")


def uids(pods: list[Object]) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pods}


def no_failure(result: LoadResult, case: Row) -> None:
    case.requests, case.failed, case.note = result.requests, result.failed, result.words()
    assert result.failed == 0, result.failures


def test_further_models(release: Release, namespace: Kubernetes, client: ClientPod, case: Row) -> None:
    """from `engine` to `engines` under load: the running model's pods stay"""
    before = uids(engines_of(namespace, "default"))
    with client.load() as result:
        release.upgrade(three())
        eventually("the further model is served", lambda: client.status_of("rolling") == 200, 180.0)
        client.wait_for_requests(client.progress() + 40)
    no_failure(result, case)
    assert uids(engines_of(namespace, "default")) == before, "no engine of the first model had a reason to restart"


def test_one_model_away(release: Release, namespace: Kubernetes, client: ClientPod, case: Row) -> None:
    """one model at replicas: 0, one rolling with its only replica: the other one's requests all succeed"""
    before = uids(engines_of(namespace, "rolling"))
    with client.load() as result:
        release.upgrade(three(rolling={"offload": {"numCpuBlocks": 48}}))
        eventually("the rolling model's pod is another", lambda: not uids(engines_of(namespace, "rolling")) & before)
        client.wait_for_requests(client.progress() + 40)
        assert not engines_of(namespace, "away")
        assert len(namespace.ready_pods("gateway")) == 2, "a model that is away makes no gateway unready"
    no_failure(result, case)
    eventually("the rolling model is back", lambda: client.status_of("rolling") == 200, 180.0)
    assert client.status_of("away") == 503


def test_scale_to_zero(release: Release, namespace: Kubernetes, client: ClientPod, case: Row) -> None:
    """to zero and back by the gateways' own count: a request waits, is counted, and is answered by the new engine"""
    namespace.apply(SCALED_OBJECTS)
    scaling = {"enabled": True, "minReplicas": 0, "trigger": "gateway"}
    try:
        namespace.wait_for_kind("scaledobjects", "keda.sh")
        release.upgrade(three(scaling))
        scale(namespace, 0)
        eventually("the model is at zero", lambda: not engines_of(namespace, "away"), 120.0)
        assert waiting_requests(client) == 0
        with client.load() as result, ThreadPoolExecutor(1) as background:
            answer = background.submit(client.status_of, "away")
            eventually("the request is counted", lambda: waiting_requests(client) == 1, 60.0)
            scale(namespace, 1)
            assert answer.result() == 200
        assert waiting_requests(client) == 0
        no_failure(result, case)
    finally:
        # The number is the autoscaler's, and the values ask for another one (docs/operations.md, "Upgrade, rollback").
        release.upgrade(three(), True, "--force-conflicts")
        namespace.kubectl("delete", "crd", SCALED_OBJECTS["metadata"]["name"], "--ignore-not-found")


def test_prefill_and_decode_apart(release: Release, namespace: Kubernetes, client: ClientPod, case: Row) -> None:
    """two groups of one model with roles beside another model: prompts are handed over, and no request fails"""
    tier = {"sharedTier": {"type": "redis"}}
    groups = {
        role: {"role": role, "replicas": 1, "model": {"servedName": "apart"}, "offload": tier}
        for role in ("prefill", "decode")
    }
    terms = {"mode": "always", "uncachedTokensMin": 1}
    with client.load() as result:
        release.upgrade(
            simulated(engines={"default": {}, **groups}, redis={"enabled": True}, gateway={"disaggregation": terms})
        )
        eventually("the model is served", lambda: client.status_of("apart") == 200, 180.0)
        numbers = itertools.count()

        def handed_over() -> bool:
            """The gateways must have found both roles and the store in common, which they learn from events. They have
            no tokenizer."""
            answer = client.complete("apart", [100 + next(numbers), *range(1000, 1400)])
            assert answer["status"] == 200, answer
            return client.counted(f'{LEGS}{{decision="two"', "apart") >= 1

        eventually("a prompt is handed over", handed_over, 120.0)
        client.wait_for_requests(client.progress() + 40)
    no_failure(result, case)
    assert not client.counted(LEGS, "default"), "engines without roles count no legs"


def scale(namespace: Kubernetes, replicas: int) -> None:
    """Scale the engine, as KEDA does."""
    namespace.kubectl("scale", "statefulset", "chat-spillway-engine-away", f"--replicas={replicas}")


def waiting_requests(client: ClientPod) -> int:
    """Waiting requests of the model that is away."""
    return client.counted(WAITING, "away")
