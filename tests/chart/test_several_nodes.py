"""A replica over several pods: a LeaderWorkerSet, of which the leader alone is an endpoint."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from chart.rendering import CHART, laid_over, render

from spillway_ctl.check.chart_facts import Cluster
from spillway_ctl.check.judgement import findings

ASCEND, CUDA = (
    yaml.safe_load((CHART / "examples" / f"several-nodes-{name}.yaml").read_text()) for name in ("ascend-a3", "cuda")
)
LEADS = "leaderworkerset.sigs.k8s.io/worker-index"


def gateway_model(values: dict[str, Any]) -> dict[str, Any]:
    text = render(values=values).one("ConfigMap", "gateway")["data"]["gateway.yaml"]
    return yaml.safe_load(text)["models"][0]


def group(values: dict[str, Any]) -> dict[str, Any]:
    return render(values=values).one("LeaderWorkerSet", "engine")["spec"]["leaderWorkerTemplate"]


def container(template: dict[str, Any]) -> dict[str, Any]:
    (engine,) = template["spec"]["containers"]
    return engine


def test_every_pod_has_an_equal_part_of_the_ranks_and_their_memory() -> None:
    one = yaml.safe_load("engine: {nodesPerReplica: 1, dataParallelSize: 2}")
    alone = container(render(values=laid_over(ASCEND, one)).one("StatefulSet", "engine")["spec"]["template"])
    pods = group(ASCEND)

    for template in (pods["leaderTemplate"], pods["workerTemplate"]):
        assert container(template)["resources"] == alone["resources"]
        assert container(template)["resources"]["limits"]["huawei.com/Ascend910"] == 16
    assert pods["size"] == 2 and pods["restartPolicy"] == "RecreateGroupOnPodRestart"


def test_the_leader_alone_serves_and_is_asked() -> None:
    pods = group(CUDA)
    leader, worker = container(pods["leaderTemplate"]), container(pods["workerTemplate"])

    assert leader["args"] == worker["args"]
    assert leader["args"][-3:] == ["nodeRank=$(LWS_WORKER_INDEX)", "--set", "leader=$(LWS_LEADER_ADDRESS)"]
    assert {"ports", "startupProbe", "readinessProbe", "livenessProbe"} == leader.keys() - worker.keys()


def test_services_pools_and_the_gateway_take_leaders_alone() -> None:
    values = laid_over(ASCEND, yaml.safe_load("gateway: {picker: {enabled: true}}"))
    rendered = render(values=values)

    assert rendered.one("Service", "engine")["spec"]["selector"][LEADS] == "0"
    assert rendered.one("InferencePool", "engine")["spec"]["selector"]["matchLabels"][LEADS] == "0"
    found = gateway_model(values)["discovery"]["kubernetes"]
    assert (found["dataParallelRanks"], found["nodesPerReplica"]) == (4, 2)


def test_a_list_of_engines_names_the_pods_of_all_ranks() -> None:
    static = yaml.safe_load("gateway: {discovery: {type: static}}")

    engines = gateway_model(laid_over(ASCEND, static))["engines"]

    assert engines[1]["url"] == "http://chat-spillway-engine-1.chat-spillway-engine.llm.svc.cluster.local:8100"
    assert engines[1]["workers"] == ["chat-spillway-engine-1-1.chat-spillway-engine.llm.svc.cluster.local"]


@pytest.mark.parametrize(("replicas", "pods"), [(1, 1), (2, 3), ("50%", "50%")])
def test_a_budget_counts_replicas(replicas: int | str, pods: int | str) -> None:
    budget = {"engine": {"podDisruptionBudget": {"maxUnavailable": replicas}}}

    rendered = render(values=laid_over(CUDA, budget)).one("PodDisruptionBudget", "engine")

    assert rendered["spec"]["maxUnavailable"] == pods


def test_scaling_asks_the_group() -> None:
    scaled = render(values=laid_over(CUDA, yaml.safe_load("engine: {autoscaling: {enabled: true}}")))

    assert scaled.one("ScaledObject", "engine")["spec"]["scaleTargetRef"] == {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "name": "chat-spillway-engine",
    }


def test_ranks_reach_each_other_and_the_gateway_gets_no_further_right() -> None:
    rendered = render(values=CUDA)
    own = rendered.one("LeaderWorkerSet", "engine")["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["metadata"]

    peers = rendered.one("NetworkPolicy", "engine")["spec"]["ingress"][1]

    assert "ports" not in peers
    labels = peers["from"][0]["podSelector"]["matchLabels"]
    assert labels.items() <= own["labels"].items() and "spillway/engine" in labels
    roles = [rule["resources"] for rule in rendered.one("Role", "gateway")["rules"]]
    assert roles == [["endpointslices"]]


def test_a_claim_of_each_pod_is_the_groups() -> None:
    nvme = yaml.safe_load("engine: {offload: {sharedTier: {type: nvme, nvme: {volume: {type: perPodClaim}}}}}")

    assert group(laid_over(ASCEND, nvme))["volumeClaimTemplates"][0]["metadata"]["name"] == "kv"


def test_a_cluster_without_the_kind_is_named() -> None:
    (found,) = findings(CUDA, Cluster(kinds=frozenset()))

    assert found.setting == "engine.nodesPerReplica"
    assert "LeaderWorkerSet" in found.problem and "install the LeaderWorkerSet controller" in found.remedy


def test_the_longest_name_leaves_room_for_the_numbers_of_replica_and_pod() -> None:
    long = {"fullnameOverride": "n" * 40, "engines": {"k" * 20: CUDA["engine"]}}

    name = render(values=long).one("LeaderWorkerSet", "engine")["metadata"]["name"]

    assert len(f"{name}-9999") + len("-0123456789") <= 63
