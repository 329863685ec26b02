"""The CPU tier of a node: who keeps it, with which rights and how much memory, and what its engines read and mount."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from chart.helm_binaries import Helm, helms
from chart.rendering import CHART, Render, pod_spec, quantity_bytes, render

from spillway_connector.config import ConnectorConfig
from spillway_ctl.options import parser
from spillway_engine.settings_reader import engine_settings
from spillway_engine.vllm_arguments import own_transfer_config

EXAMPLE = CHART / "examples" / "node-tier.yaml"
NODE = "/var/lib/spillway/node"
ON = {"enabled": True}


def keeper_of(rendered: Render) -> dict[str, Any]:
    (container,) = pod_spec(rendered.one("DaemonSet"))["containers"]
    return container


@pytest.mark.parametrize("helm", helms(), ids=lambda helm: f"helm{helm.major}")
def test_the_keeper_has_the_memory_of_the_rows_and_the_engines_have_none_of_it(helm: Helm):
    rendered = render(EXAMPLE, helm=helm)
    keeper = keeper_of(rendered)
    given = parser().parse_args(keeper["command"][1:] + keeper["args"])
    assert (given.path, given.bytes, given.sizes) == (Path(NODE), 256 << 30, 1)
    assert keeper["ports"] == [{"name": "http", "containerPort": given.port}]
    limit = quantity_bytes(keeper["resources"]["limits"]["memory"])
    assert given.bytes * 129 // 128 + (96 << 20) < limit < given.bytes * 65 // 64 + (1 << 30)
    assert keeper["resources"]["requests"]["memory"] == keeper["resources"]["limits"]["memory"]
    engine = pod_spec(rendered.one("StatefulSet", "engine"))
    (container,) = engine["containers"]
    assert quantity_bytes(container["resources"]["limits"]["memory"]) < 12 << 30
    folder = {"name": "node", "hostPath": {"path": "/dev/shm/spillway", "type": "DirectoryOrCreate"}}
    assert folder in engine["volumes"]
    assert folder in pod_spec(rendered.one("DaemonSet"))["volumes"]
    assert {"name": "node", "mountPath": NODE} in container["volumeMounts"]


def test_the_engine_service_hands_it_to_the_connector():
    files = render(EXAMPLE).one("ConfigMap", "engine")["data"]
    settings = engine_settings(yaml.safe_load(files["engine.yaml"]))
    options = own_transfer_config(settings)["kv_connector_extra_config"]
    node = ConnectorConfig.parse(options).node_tier
    assert node is not None
    assert (node.bytes, node.path, node.fallback, node.maker) == (256 << 30, NODE, "refuse", "keeper")


def test_the_keeper_runs_as_the_engines_user_without_rights_where_they_run():
    rendered = render(EXAMPLE)
    pod, keeper = pod_spec(rendered.one("DaemonSet")), keeper_of(rendered)
    assert pod["securityContext"]["runAsUser"] == 10001
    assert pod["nodeSelector"] == {"accelerator": "h100"}
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert pod["automountServiceAccountToken"] is False
    assert keeper["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    (owner,) = pod["initContainers"]
    assert owner["command"] == ["chown", "10001:10001", NODE]
    assert owner["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN"]}
    assert owner["securityContext"]["runAsUser"] == 0

    ascend = pod_spec(
        render(values={"engine": {"offload": {"nodeTier": ON}, "accelerator": {"preset": "hami"}}}).one("DaemonSet")
    )
    assert ascend.get("initContainers") is None  # the folder is root's, as the engines are
    assert ascend["containers"][0]["securityContext"]["runAsUser"] == 0
    assert ascend["nodeSelector"] == {"ascend": "on"}
    assert {"key": "huawei.com/npu", "operator": "Exists", "effect": "NoSchedule"} in ascend["tolerations"]


def test_groups_with_one_folder_have_one_keeper_for_all_sizes_of_their_rows():
    def keepers(**second: Any) -> list[list[str]]:
        engine = {"model": {"path": "Qwen/Qwen3-8B"}, "offload": {"nodeTier": ON}}
        values = {"engine": engine, "engines": {"a": {}, "b": {"model": {"servedName": "b"}, **second}}}
        found = render(values=values).of_kind("DaemonSet")
        return [pod_spec(each)["containers"][0]["args"][3:6] for each in found]

    one = ["68719476736", "--sizes", "1"]
    assert keepers() == [one]
    assert keepers(blockSize=64) == [["68719476736", "--sizes", "2"]]
    assert keepers(offload={"nodeTier": {"hostPath": "/dev/shm/other"}}) == [one, one]
    assert keepers(offload={"nodeTier": {"enabled": False}}) == [one]


def test_only_prometheus_reaches_it_and_nothing_is_there_without_the_tier():
    scraping = [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]
    on = {"engine": {"offload": {"nodeTier": ON}}, "monitoring": {"podMonitor": ON}}
    closed = render(values={**on, "networkPolicy": {**ON, "restrictEgress": True, "prometheusFrom": []}})
    policy = closed.one("NetworkPolicy", "node-tier")["spec"]
    assert (policy["ingress"], policy["policyTypes"]) == ([], ["Ingress", "Egress"])
    scraped = render(values={**on, "networkPolicy": {**ON, "prometheusFrom": scraping}})
    policy = scraped.one("NetworkPolicy", "node-tier")["spec"]
    assert policy["ingress"] == [{"from": scraping, "ports": [{"protocol": "TCP", "port": "http"}]}]
    monitor = scraped.one("PodMonitor", "node-tier")["spec"]
    labels = scraped.one("DaemonSet")["spec"]["template"]["metadata"]["labels"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()

    without = render(values={"monitoring": {"podMonitor": ON}, "engine": {"offload": {"enabled": False}}})
    assert without.of_kind("DaemonSet") == []
    assert len(without.of_kind("PodMonitor")) == 1
