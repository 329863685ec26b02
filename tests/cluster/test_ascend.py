"""The Ascend preset: pods that ask for huawei.com/Ascend910 run where there are devices, start as they would on one,
and move KV blocks through the NPU transport.

The devices are pretended and the ACL library is the emulator; vLLM is the CPU build. So this proves placement, start
script and transport, and proves nothing about an NPU's speed.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from acl_emulator import build
from cluster import real_engines
from cluster.client_pod import ClientPod
from cluster.commands import CommandFailed
from cluster.helm import Release
from cluster.kube import Kubernetes, name_of
from cluster.local_cluster import REAL_ENGINES_NODE, LocalCluster
from cluster.real_engines import EMULATOR, TOOLKIT
from cluster.report import Row
from cluster.values import MODEL
from reference_answers.margins import REQUEST, differences, scored
from stack_driver.deadlines import eventually

DEVICES = 8
PROMPTS = 5
START_SECONDS = 900.0
SET_ENV = f"export LD_LIBRARY_PATH={TOOLKIT}:${{LD_LIBRARY_PATH:-}}\n"
HERE = Path(__file__).resolve().parent


def library(without: tuple[str, ...]) -> dict:
    """The emulator as a node's CANN installation would appear in the pod."""
    binary = base64.b64encode(build.library(without).read_bytes()).decode()
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": EMULATOR},
        "data": {"set_env.sh": SET_ENV, "sitecustomize.py": (HERE / "ascend" / "sitecustomize.py").read_text()},
        "binaryData": {"libascendcl.so": binary},
    }


@pytest.fixture(scope="module")
def namespace(kubernetes: Kubernetes, real_engine_image: None, new_namespace) -> Iterator[Kubernetes]:
    """Root with one capability is what a device needs, so Pod Security is `baseline` here."""
    namespace = new_namespace("ascend", "baseline")
    namespace.apply(library(build.EVERYTHING))
    yield namespace
    kubernetes.kubectl("delete", "namespace", "ascend", "--wait", seconds=180)


@pytest.fixture(scope="module", autouse=True)
def installed(namespace: Kubernetes, release: Release, client: ClientPod) -> None:
    release.install(real_engines.ascend("auto"), wait=False)
    client.create(node=REAL_ENGINES_NODE)


@pytest.mark.own_cluster
def test_waits_for_devices(namespace: Kubernetes, machine: LocalCluster, case: Row) -> None:
    """Ascend preset: a pod waits until a node has devices, then runs there"""

    def unscheduled() -> bool:
        conditions = [item for pod in namespace.pods("engine") for item in pod["status"].get("conditions", [])]
        return any("Insufficient huawei.com/Ascend910" in item.get("message", "") for item in conditions)

    eventually("the pod waits for a device", unscheduled, 60.0)
    machine.give_devices(REAL_ENGINES_NODE, DEVICES)
    (pod,) = namespace.wait_for_pods("engine", 1, START_SECONDS)
    assert pod["spec"]["nodeName"] == REAL_ENGINES_NODE
    limits = pod["spec"]["containers"][0]["resources"]["limits"]
    assert limits["huawei.com/Ascend910"] == "1"
    case.note = f"1 of {DEVICES} pretended devices"


@pytest.mark.own_cluster
@pytest.mark.parametrize(("mode", "path"), [("auto", "batch"), ("on", "batch"), ("off", "loop")])
def test_copies(namespace: Kubernetes, release: Release, client: ClientPod, case: Row, mode: str, path: str) -> None:
    """Ascend preset: a real engine spills and loads through the NPU transport, by the way that batchMemcpy selects"""
    release.upgrade(real_engines.ascend(mode), wait=False)
    eventually("the engine runs with this setting", lambda: mode_in_use(namespace, client) == mode, START_SECONDS)
    require_spilled_and_loaded(namespace, client, path)
    case.requests, case.note = 2 * PROMPTS, f"device copies go by {path}"


@pytest.mark.own_cluster
def test_old_cann(namespace: Kubernetes, release: Release, client: ClientPod, case: Row) -> None:
    """Ascend preset: with a CANN too old for it `on` is refused in words, and `auto` does without"""
    namespace.apply(library(build.CANN_8_3))
    release.upgrade(real_engines.ascend("on"), wait=False)

    def refusal() -> str:
        logs = [namespace.kubectl("logs", name_of(pod), check=False) for pod in namespace.pods("engine")]
        found = re.search(r"batch_memcpy: 'on' cannot work here: [^\n]*", "\n".join(logs))
        return found[0] if found else ""

    refused = eventually("the engine refuses", refusal, START_SECONDS)
    release.upgrade(real_engines.ascend("auto"), wait=False)
    # A StatefulSet does not replace a pod that never became ready.
    namespace.kubectl("delete", "pod", "-l", "app.kubernetes.io/component=engine", "--wait")
    eventually("the engine runs with auto", lambda: mode_in_use(namespace, client) == "auto", START_SECONDS)
    require_spilled_and_loaded(namespace, client, "loop")
    case.requests, case.note = 2 * PROMPTS, refused[:300]


def address_of(namespace: Kubernetes) -> str:
    pods = namespace.ready_pods("engine")
    return f"http://{pods[0]['status']['podIP']}:8100" if len(pods) == 1 else ""


def mode_in_use(namespace: Kubernetes, client: ClientPod) -> str:
    """The copy mode of the one ready engine; empty while there is none, or if it ends just now."""
    address = address_of(namespace)
    try:
        return client.get(f"{address}/spillway/config")["settings"]["offload"]["batchMemcpy"] if address else ""
    except CommandFailed:
        return ""


def require_spilled_and_loaded(namespace: Kubernetes, client: ClientPod, path: str) -> None:
    """Prompts that evict one another from the device, asked twice: the same answers, loaded from the CPU tier."""
    body = {"model": MODEL, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **REQUEST}
    code = (
        "import json, re, urllib.request as u\n"
        f"base = {address_of(namespace)!r}\n"
        "def ask(seed):\n"
        "  text = ' '.join(f'{(seed * 7919 + i) % 9973} houses by the river' for i in range(190))\n"
        f"  body = dict({body!r}, prompt=text)\n"
        "  r = u.Request(base + '/v1/completions', json.dumps(body).encode(), {'content-type': 'application/json'})\n"
        "  return json.loads(u.urlopen(r, timeout=180).read())['choices'][0]\n"
        f"first = [ask(seed) for seed in range({PROMPTS})]\n"
        f"again = [ask(seed) for seed in range({PROMPTS})]\n"
        "text = u.urlopen(base + '/metrics', timeout=30).read().decode()\n"
        "def read(pattern): return sum(float(x) for x in re.findall(pattern, text, re.M))\n"
        "print(json.dumps(dict(first=first, again=again,\n"
        "  path=re.findall(r'^spillway_device_copy_path\\{[^}]*path=\"(\\w+)\"[^}]*\\} 1', text, re.M),\n"
        "  stored=read(r'^spillway_device_copy_bytes_total\\{[^}]*store[^}]*\\} (\\S+)'),\n"
        "  loaded=read(r'^spillway_device_copy_bytes_total\\{[^}]*load[^}]*\\} (\\S+)'),\n"
        "  failed=read(r'^spillway_device_copy_failures_total\\{[^}]*\\} (\\S+)'))))\n"
    )
    outcome = json.loads(client.python(code, seconds=400))
    first, again = ([scored(choice) for choice in outcome.pop(name)] for name in ("first", "again"))
    assert differences(first, again) == {}
    assert outcome["path"] == [path] and outcome["failed"] == 0, outcome
    assert outcome["stored"] > 0 and outcome["loaded"] > 0, outcome
