"""The lane's own cluster on this machine: machine/cluster.sh, asked to do one thing at a time.

`python -m cluster.local_cluster` says what this machine lacks for one, and exits with 1 if it lacks anything.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from cluster.commands import run

SCRIPT = Path(__file__).resolve().parent / "machine" / "cluster.sh"
BUILD_SECONDS = 5400.0
STEP_SECONDS = 300.0
LOAD_SECONDS = 1200.0  # the engine image has gigabytes
NODES = ("node1", "node2")
REAL_ENGINES_NODE = NODES[0]  # all of them: their image is on this node alone, as it has gigabytes
PACKAGES = (
    "containernetworking-plugins iptables iproute2 conntrack openssl libseccomp-dev pkg-config gcc buildah debootstrap"
)
PROGRAMS = ("go", "gcc", "pkg-config", "openssl", "ip", "iptables", "conntrack", "buildah", "debootstrap")


def require_machine() -> None:
    """Raises RuntimeError naming what this machine lacks, and where to get it."""
    if os.geteuid() != 0:
        raise RuntimeError("a cluster of one's own needs root; set KUBECONFIG= to run the lane on another one")
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        raise RuntimeError(
            f"{', '.join(missing)} missing; install Go 1.26 from https://go.dev/dl and the rest with "
            f"apt-get install -y --no-install-recommends {PACKAGES}"
        )
    unshare = ["unshare", "--net", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    refused = subprocess.run(unshare, capture_output=True, text=True, check=False, timeout=STEP_SECONDS)
    if refused.returncode != 0:
        raise RuntimeError(f"no network and mount namespaces of one's own here: {refused.stderr.strip()}")


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
        """Of kubectl and Helm."""
        exports = self._do("env").removeprefix("export ")
        return dict(word.split("=", 1) for word in shlex.split(exports.replace("$PATH", os.environ["PATH"])))

    def down(self) -> None:
        self._do("down")

    def load(self, archive: Path, node: str = "") -> None:
        """Into one node, or into all of them."""
        self._do("load", str(archive), *([node] if node else []), seconds=LOAD_SECONDS)

    def give_devices(self, node: str, count: int) -> None:
        self._do("npus", node, str(count))

    def lose_node(self, node: str) -> None:
        self._do("stop", node)

    def bring_back(self, node: str) -> None:
        self._do("start", node)

    def restart_api_server(self) -> None:
        self._do("restart-apiserver")

    def _do(self, *words: str, seconds: float = STEP_SECONDS) -> str:
        return run(str(SCRIPT), *words, environment=self._environment, seconds=seconds)


if __name__ == "__main__":
    try:
        require_machine()
    except RuntimeError as lack:
        sys.exit(str(lack))
