"""One cluster for the whole lane, a namespace and a release for each module, a row of the report for each case.

Not part of the default tests: `make test-cluster` names this folder. KUBECONFIG= runs the same cases on another
cluster, whose nodes have the images already; those that need this machine's own are then left out and named.
KEEP_CLUSTER=1 leaves this machine's cluster up, and takes it as it is the next time, images included: for work on a
case. WITH_KEDA=1 adds the cases that need KEDA, which is compiled for them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chart.helm_binaries import ROOT, helms
from cluster.client_pod import ClientPod
from cluster.helm import VERSION, Release
from cluster.image_builder import ImageBuilder
from cluster.kube import Kubernetes, Object
from cluster.local_cluster import FOLDER, REAL_ENGINES_NODE, LocalCluster, require_machine
from cluster.report import Report, Row
from cluster.values import MODEL

HERE = Path(__file__).resolve().parent
REPORT = ROOT / "build" / "cluster" / "report.json"
ROW = pytest.StashKey[Row]()
CASE_SECONDS = 900
BUILD_SECONDS = 5400  # the first case of all may have to compile Kubernetes and build images
SMALL_IMAGES = (
    f"spillway-gateway:{VERSION}",
    f"spillway-tools:{VERSION}",
    "spillway-engine-simulated:lane",
    f"spillway-engine:{VERSION}-ascend",
    "valkey:lane",
)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "own_cluster: needs the cluster that runs on this machine")
    config.addinivalue_line("markers", "keda: needs KEDA, left out unless WITH_KEDA=1")
    config.addinivalue_line("markers", "real_engines: vLLM itself, from an image of gigabytes")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave this folder out, except if the command line names it, or something in it."""
    if collection_path == HERE:
        return None
    named = (
        Path(config.invocation_params.dir, word.split("::")[0]).resolve() for word in config.invocation_params.args
    )
    return None if any(path == HERE or HERE in path.parents for path in named) else True


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mine = [item for item in items if HERE in item.path.parents]
    real = {item for item in mine if "real_engine_image" in _fixtures(item)}
    # Last, so that the service has been proven before gigabytes of an image are built.
    items.sort(key=lambda item: item in real)
    mine.sort(key=lambda item: item in real)
    for index, item in enumerate(mine):
        builds = item in real or index == 0 or item.get_closest_marker("keda")
        item.add_marker(pytest.mark.timeout(BUILD_SECONDS if builds else CASE_SECONDS))
        if item in real:
            item.add_marker(pytest.mark.real_engines)
    impossible = {"own_cluster"} if os.environ.get("KUBECONFIG") else set()
    impossible |= set() if os.environ.get("WITH_KEDA") else {"keda"}
    left_out = [item for item in mine if any(item.get_closest_marker(name) for name in impossible)]
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)


def _fixtures(item: pytest.Item) -> list[str]:
    assert isinstance(item, pytest.Function)
    return item.fixturenames


@pytest.fixture(scope="session")
def report() -> Report:
    return Report(REPORT)


@pytest.fixture(scope="session")
def machine() -> LocalCluster:
    return LocalCluster(FOLDER)


@pytest.fixture(scope="session")
def builder() -> ImageBuilder:
    return ImageBuilder(FOLDER / "containers", VERSION)


@pytest.fixture(scope="session")
def kubernetes(machine: LocalCluster, builder: ImageBuilder, report: Report) -> Iterator[Kubernetes]:
    """A cluster with the small images on every node."""
    if os.environ.get("KUBECONFIG"):
        yield Kubernetes({})
        return
    keep = bool(os.environ.get("KEEP_CLUSTER"))
    if keep and machine.is_up():
        yield Kubernetes(machine.environment())
        return
    require_machine()
    with report.case("images built from the Dockerfiles") as row:
        archives = [builder.archive(name) for name in SMALL_IMAGES]
        row.note = ", ".join(f"{path.name.rsplit('-', 1)[0]} {path.stat().st_size / 1e6:.0f} MB" for path in archives)
    try:
        with report.case("cluster up") as row:
            machine.up()
            for archive in archives:
                machine.load(archive)
            kubernetes = Kubernetes(machine.environment())
            version = json.loads(kubernetes.kubectl("version", "-o", "json"))["serverVersion"]["gitVersion"]
            row.note = f"Kubernetes {version}, 2 nodes"
        yield kubernetes
    finally:
        if not keep:
            with report.case("cluster down: no process, link, namespace, mount or control group is left"):
                machine.down()
                assert not machine.left(), machine.left()


@pytest.fixture(scope="session")
def real_engine_image(kubernetes: Kubernetes, machine: LocalCluster, builder: ImageBuilder, report: Report) -> None:
    """The image of an engine on REAL_ENGINES_NODE."""
    with report.case("engine image built from docker/engine-cpu.Dockerfile") as row:
        archive = builder.archive(f"spillway-engine:{VERSION}-cpu")
        row.note = f"{archive.stat().st_size / 1e9:.1f} GB as an archive"
    with report.case("engine image on a node") as row:
        machine.load(archive, REAL_ENGINES_NODE)


@pytest.fixture(scope="module")
def leader_worker_sets(kubernetes: Kubernetes, machine: LocalCluster) -> Iterator[None]:
    """The kind, and its controller."""
    machine.run_groups()
    kubernetes.wait_for_kind("leaderworkersets", "leaderworkerset.x-k8s.io")
    yield
    machine.stop_groups()


@pytest.fixture
def case(request: pytest.FixtureRequest, report: Report) -> Row:
    """The row of this test; written when it has ended, well or not."""
    row = request.node.stash[ROW] = Row(_title(request.node))
    return row


def _title(item: pytest.Item) -> str:
    """The first line of the test's docstring, and its parameters."""
    assert isinstance(item, pytest.Function)
    words = (item.function.__doc__ or item.name).strip().splitlines()[0].rstrip(".")
    callspec = getattr(item, "callspec", None)
    return f"{words} [{callspec.id}]" if callspec is not None else words


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome = yield
    if "kubernetes" not in _fixtures(item):  # of the lane's own parts
        return outcome
    if call.when == "call" or (call.when == "setup" and outcome.failed):
        row = item.stash.get(ROW, None) or Row(_title(item))
        trouble = "" if outcome.passed else str(call.excinfo.value if call.excinfo else outcome.outcome)
        Report(REPORT).write(row, call.duration, trouble)
    return outcome


@pytest.fixture(scope="session")
def new_namespace(kubernetes: Kubernetes) -> Callable[..., Kubernetes]:
    def make(name: str, level: str = "restricted") -> Kubernetes:
        labels = {f"pod-security.kubernetes.io/{mode}": level for mode in ("enforce", "warn", "audit")}
        namespace: Object = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
        # That of an earlier run on a cluster that was kept may still be going.
        kubernetes.kubectl("delete", "namespace", name, "--ignore-not-found", "--wait", seconds=180)
        kubernetes.apply(namespace)
        return kubernetes.within(name)

    return make


@pytest.fixture(scope="module")
def namespace(request: pytest.FixtureRequest, kubernetes: Kubernetes, new_namespace) -> Iterator[Kubernetes]:
    """A namespace for the module, with restricted Pod Security enforced; removed with everything in it.

    It goes while the next module installs; test_install.py looks at what a release leaves.
    """
    name = request.module.__name__.rsplit(".", 1)[-1].removeprefix("test_").replace("_", "-")
    yield new_namespace(name)
    kubernetes.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture(scope="module")
def release(namespace: Kubernetes) -> Iterator[Release]:
    """A release that is not installed yet; uninstalled afterwards if it is."""
    release = Release("chat", helms()[1], namespace)
    yield release
    release.uninstall_if_there()


@pytest.fixture(scope="module")
def client(namespace: Kubernetes, release: Release) -> Iterator[ClientPod]:
    service = f"{release.name}-spillway-gateway.{namespace.namespace}.svc.cluster.local"
    yield ClientPod(namespace, service, MODEL, f"spillway-gateway:{VERSION}")
