"""The Ascend image, built by docker/engine-ascend.Dockerfile on a stand-in for vllm-ascend's own, in pods.

Devices, CANN and driver are pretended, and vLLM is a simulator; docs/ascend.md lists what is real. A real vLLM behind
the NPU transport, in another image, is what test_ascend.py has.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from cluster.client_pod import ClientPod
from cluster.helm import VERSION, Release
from cluster.kube import Kubernetes, Object, name_of
from cluster.local_cluster import NODES, LocalCluster
from cluster.report import Row
from cluster.values import DRIVER, MODEL, simulated_ascend
from stack_driver.deadlines import eventually

IMAGE = f"spillway-engine:{VERSION}-ascend"
NODE = NODES[1]  # test_ascend.py begins where no node has devices, and gives them to the other
START_SECONDS = 300.0

pytestmark = pytest.mark.own_cluster


def driver(version: str) -> Object:
    data = {"version.info": f"Version={version}\n"}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": DRIVER}, "data": data}


@pytest.fixture(scope="module")
def namespace(kubernetes: Kubernetes, machine: LocalCluster, new_namespace) -> Iterator[Kubernetes]:
    """Root with one capability is what a device needs, so Pod Security is `baseline` here."""
    namespace = new_namespace("ascend-image", "baseline")
    yield namespace
    kubernetes.kubectl("delete", "namespace", "ascend-image", "--wait", seconds=180)
    machine.give_devices(NODE, 0)


@pytest.fixture(scope="module", autouse=True)
def installed(namespace: Kubernetes, release: Release, client: ClientPod) -> None:
    namespace.apply(driver("25.2.0"))
    release.install(simulated_ascend(), wait=False)
    client.create()


def test_starts_on_a_device(
    namespace: Kubernetes, release: Release, machine: LocalCluster, client: ClientPod, case: Row
) -> None:
    """Ascend image: waits for a device, starts by the start script with CANN's environment, and answers"""

    def unscheduled() -> bool:
        conditions = [item for pod in namespace.pods("engine") for item in pod["status"].get("conditions", [])]
        return any("Insufficient huawei.com/Ascend910" in item.get("message", "") for item in conditions)

    eventually("the pod waits for a device", unscheduled, 60.0)
    machine.give_devices(NODE, 8)
    (pod,) = namespace.wait_for_pods("engine", 1, START_SECONDS)
    container = pod["spec"]["containers"][0]
    assert (pod["spec"]["nodeName"], container["image"]) == (NODE, IMAGE)

    namespace.wait_for_pods("gateway", 1, START_SECONDS)
    assert client.status_of(MODEL) == 200
    show = "tr '\\0' '\\n' </proc/1/environ; tr '\\0' ' ' </proc/1/cmdline; stat -c ' user %u' /proc/1"
    process = namespace.execute(name_of(pod), "/bin/bash", "-c", show)
    assert "ASCEND_HOME_PATH=/usr/local/Ascend/ascend-toolkit/latest\n" in process
    assert "python3 -m spillway_engine --config /etc/spillway/engine.yaml" in process
    assert " user 0\n" in process + "\n"
    # The chart's script is the image's own.
    namespace.execute(name_of(pod), "cmp", "/usr/local/bin/start-engine", "/etc/spillway/start-engine.sh")
    case.note = IMAGE


def test_refuses_a_driver_that_is_too_old(namespace: Kubernetes, release: Release, case: Row) -> None:
    """Ascend image: by the requirements of vllm-ascend's own distribution, in one sentence"""
    namespace.apply(driver("24.1.0"))
    pod = name_of(namespace.pods("engine")[0])
    namespace.kubectl("delete", "pod", pod, "--wait", seconds=120)

    def refusal() -> str:
        said = namespace.kubectl("logs", pod, "--tail=50", check=False)
        return next((line for line in said.splitlines() if "vllm-ascend 0.23.0.post1 needs" in line), "")

    refused = eventually("the engine refuses", refusal, START_SECONDS)
    assert "driver 25.2 or newer, CANN 9.1, torch_npu 2.10.0.post4" in refused
    assert "driver 24.1.0, CANN 9.1.0, torch_npu 2.10.0.post4" in refused
    case.note = refused[:300]


def test_starts_by_its_entry_point(namespace: Kubernetes, case: Row) -> None:
    """Ascend image: without a command its entry point is the start script, and asks for the chart's settings"""
    container = {"name": "engine", "image": IMAGE}
    spec = {"restartPolicy": "Never", "containers": [container], "nodeName": NODE}
    namespace.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "bare"}, "spec": spec})

    def ended() -> bool:
        return namespace.get("pod", "bare")["status"].get("phase") == "Failed"

    eventually("the bare container ends", ended, 120.0)
    said = namespace.kubectl("logs", "bare")
    assert said.startswith("spillway_engine: ") and "/etc/spillway/engine.yaml" in said
    case.note = said[:300]
