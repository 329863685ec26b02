"""One CPU tier for a node: a pod of each node makes the rows that processes of other pods' user ask for, and they stay
when it ends."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from chart.helm_binaries import helms
from cluster.helm import Release
from cluster.kube import Kubernetes, name_of
from cluster.report import Row
from cluster.values import simulated
from stack_driver.deadlines import eventually

FOLDER = Path("/dev/shm/spillway-lane-node")
SIZE = "128MiB"
# As two engines do it, with rows of 1 MiB: what one stores is there for the other, in memory that the pod made.
TWO_ENGINES = """
from pathlib import Path
from spillway_connector.node.region import NodeRegion
from spillway_connector.plan.node_records import RowWords
from spillway_connector.tiers.disk.slab.writers import new_number
first, second = (NodeRegion(Path(PATH), 128, 1 << 20, new_number(), kept_seconds=60.0) for _ in range(2))
place = first.join(lambda: 1)
with first.changing() as index:
    known = RowWords(128)
    known.reserved[3] = index.reserve([3], place)[0]
    index.claim([3], known, b"n" * 16, [b"k" * 36], place, now_ms=5)
    index.publish([3], known, place)
print("rows ready:", second.index.count()[2], "of", second.num_rows)
"""


@pytest.fixture(scope="module")
def installed(new_namespace) -> Iterator[Release]:
    """A folder of the node needs more than restricted pods may."""
    namespace: Kubernetes = new_namespace("node-tier", "privileged")
    release = Release("chat", helms()[1], namespace)
    tier = {"nodeTier": {"enabled": True, "bytes": SIZE, "hostPath": str(FOLDER)}}
    try:
        release.install(simulated(engine={"replicas": 1, "offload": tier}, gateway={"replicas": 1}))
        yield release
    finally:
        release.uninstall_if_there()
        namespace.kubectl("delete", "namespace", str(namespace.namespace), "--wait", seconds=180)
        shutil.rmtree(FOLDER, ignore_errors=True)


@pytest.mark.own_cluster
def test_rows_of_the_node(installed: Release, case: Row) -> None:
    """a pod of each node makes the rows that engines ask for, as their user, and a new pod finds them"""
    namespace = installed.kubernetes
    kept = _keepers(namespace)
    pod, before = kept[0], {name_of(one) for one in kept}
    namespace.wait_for_pods("engine", 1)
    (mount,) = [each for each in pod["spec"]["containers"][0]["volumeMounts"] if each["name"] == "node"]
    script = TWO_ENGINES.replace("PATH", repr(mount["mountPath"]))
    assert namespace.execute(name_of(pod), "python3", "-c", script).strip().endswith("rows ready: 1 of 128")
    assert FOLDER.stat().st_uid == int(namespace.execute(name_of(pod), "id", "-u")) != 0

    namespace.kubectl("delete", "pod", name_of(pod), "--wait")
    new = eventually(
        "another pod has taken its place",
        lambda: next((one for one in _keepers(namespace) if name_of(one) not in before), None),
    )
    text = namespace.execute(
        name_of(new),
        "python3",
        "-c",
        "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8400/metrics').read().decode())",
    )
    assert 'spillway_node_tier_rows{row_bytes="1048576",state="ready"} 1' in text, text
    case.note = f"{len(kept)} pods; a row that was stored before one of them was replaced is ready after that"


def _keepers(namespace: Kubernetes) -> list[dict]:
    """The pods of the DaemonSet, once there is a ready one on each node that may have one."""

    def ready() -> list[dict] | None:
        (found,) = json.loads(namespace.kubectl("get", "daemonset", "-o", "json"))["items"]
        wanted, pods = found["status"]["desiredNumberScheduled"], namespace.ready_pods("node-tier")
        return pods if wanted and len(pods) == wanted else None

    try:
        return eventually("the DaemonSet has a ready pod on each of its nodes", ready, 180.0)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{namespace.describe_trouble()}") from None
