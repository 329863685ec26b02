"""The lane's own cluster on this machine: machine/cluster.sh, asked to do one thing at a time.

`python -m cluster.local_cluster` prints what this machine lacks for one, and exits with 1 if it lacks anything;
`... packages` lists Debian's packages with the programs that it needs.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from cluster.commands import run

MACHINE = Path(__file__).resolve().parent / "machine"
SCRIPT = MACHINE / "cluster.sh"
FOLDER = Path(os.environ.get("SPILLWAY_CLUSTER", Path.home() / ".cache" / "spillway-cluster"))
CGROUPS = Path("/sys/fs/cgroup")
CONTROLLERS = ("cpu", "memory", "pids")  # of cgroup v1, with which alone cluster.sh has been proven
BUILD_SECONDS = 5400.0
STEP_SECONDS = 300.0
LOAD_SECONDS = 1200.0  # the engine image has gigabytes
HOST = "10.250.0.1"  # this machine, as nodes and pods see it
NODES = ("node1", "node2")
REAL_ENGINES_NODE = NODES[0]  # all of them: their image is on this node alone, as it has gigabytes
PACKAGES = (
    "containernetworking-plugins iptables ipset iproute2 conntrack openssl libseccomp-dev pkg-config gcc buildah "
    "debootstrap"
)
FILES = (Path("/usr/lib/cni/bridge"), Path("/usr/include/seccomp.h"))
PROGRAMS = ("go", "gcc", "pkg-config", "openssl", "ip", "iptables", "ipset", "conntrack", "buildah", "debootstrap")


def require_machine() -> None:
    """Raises RuntimeError naming what this machine lacks, and where to get it."""
    if os.geteuid() != 0:
        raise RuntimeError("a cluster of one's own needs root; set KUBECONFIG= to run the lane on another one")
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    missing += [str(path) for path in FILES if not path.exists()]
    if missing:
        raise RuntimeError(
            f"{', '.join(missing)} missing; install Go 1.26 from https://go.dev/dl and the rest with "
            f"apt-get install -y --no-install-recommends {PACKAGES}"
        )
    unshare = ["unshare", "--net", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    refused = subprocess.run(unshare, capture_output=True, text=True, check=False, timeout=STEP_SECONDS)
    if refused.returncode != 0:
        raise RuntimeError(f"no network and mount namespaces of one's own here: {refused.stderr.strip()}")
    for controller in CONTROLLERS:
        mine = CGROUPS / controller / f"spillway-{os.getpid()}"
        try:
            mine.mkdir()
            mine.rmdir()
        except OSError as error:
            raise RuntimeError(f"no cgroups (v1) of one's own here: {error}") from None
    if not any(FOLDER.glob("bin/built-*")):
        download = ["go", "mod", "download", "k8s.io/kubernetes"]
        folder = MACHINE / "control-plane"
        missed = subprocess.run(
            download, cwd=folder, capture_output=True, text=True, check=False, timeout=BUILD_SECONDS
        )
        if missed.returncode != 0:
            raise RuntimeError(f"Kubernetes' sources cannot be downloaded here: {missed.stderr.strip()}")


class LocalCluster:
    """Two nodes. Needs root, Go, gcc and the Debian packages that cluster.sh lists."""

    def __init__(self, folder: Path) -> None:
        """folder: binaries, images and what runs; its path is short, as sockets lie in it."""
        self.folder = folder
        self._environment = {**os.environ, "SPILLWAY_CLUSTER": str(folder)}

    def up(self) -> None:
        self._do("build", seconds=BUILD_SECONDS)
        self.down()  # what an interrupted run may have left
        self._do("up", str(len(NODES)))

    def is_up(self) -> bool:
        return (self.folder / "run" / "admin.kubeconfig").exists()

    def environment(self) -> dict[str, str]:
        """The environment of kubectl and Helm."""
        exports = self._do("env").removeprefix("export ")
        return dict(word.split("=", 1) for word in shlex.split(exports.replace("$PATH", os.environ["PATH"])))

    def down(self) -> None:
        self._do("down")

    def left(self) -> list[str]:
        """List what is on this machine because of a cluster; empty once it is down."""
        run_folder = str(self.folder / "run")
        namespaces = [line.split()[0] for line in run("ip", "netns", "list").splitlines()]
        links = [link.name for link in Path("/sys/class/net").iterdir()]
        found = [f"network namespace {name}" for name in namespaces if name.startswith("sw-node")]
        found += [f"link {name}" for name in links if re.fullmatch(r"swbr0|sw\d+", name)]
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        found += [f"mount {path}" for path in mounts if path.startswith(f"{self.folder.resolve()}/")]
        found += [f"control group {path}" for path in CGROUPS.glob("*/spillway-node*")]
        for command in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                words = command.read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if run_folder in words:
                    found.append(f"process {command.parent.name} {words.strip()}")
        return found

    def load(self, archive: Path, node: str = "") -> None:
        """Load an image into one node, or into all of them."""
        self._do("load", str(archive), *([node] if node else []), seconds=LOAD_SECONDS)

    def give_devices(self, node: str, count: int) -> None:
        self._do("npus", node, str(count))

    def lose_node(self, node: str) -> None:
        self._do("stop", node)

    def bring_back(self, node: str) -> None:
        self._do("start", node)

    def restart_api_server(self) -> None:
        self._do("restart-apiserver")

    def run_keda(self) -> str:
        """KEDA's operator, and a Prometheus that scrapes what `scrape` names; returns the latter's url."""
        self._do("keda", seconds=BUILD_SECONDS)
        return f"http://{HOST}:9090"

    def stop_keda(self) -> None:
        self._do("keda-down")

    def run_groups(self) -> None:
        """The controller of LeaderWorkerSets."""
        self._do("groups", seconds=BUILD_SECONDS)

    def stop_groups(self) -> None:
        self._do("groups-down")

    def declare_inference_kinds(self) -> None:
        """InferencePool and InferenceObjective, as the Inference Extension declares them."""
        self._do("inference")

    def remove_inference_kinds(self) -> None:
        self._do("inference-down")

    def scrape(self, namespace: str, targets: list[str]) -> None:
        """Let Prometheus scrape these gateways from now on. targets: ADDRESS:PORT of the namespace's gateways."""
        groups = [{"targets": targets, "labels": {"namespace": namespace}}]
        (self.folder / "run" / "gateways" / f"{namespace}.json").write_text(json.dumps(groups))

    def _do(self, *words: str, seconds: float = STEP_SECONDS) -> str:
        return run(str(SCRIPT), *words, environment=self._environment, seconds=seconds)


if __name__ == "__main__":
    if sys.argv[1:] == ["packages"]:
        print(PACKAGES)
        sys.exit()
    try:
        require_machine()
    except RuntimeError as lack:
        sys.exit(str(lack))
