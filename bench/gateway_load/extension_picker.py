"""The endpoint picker of Gateway API's Inference Extension itself, which llm-d's is built on, beside Spillway's.

Needs its source (a checkout or Go module of v1.5.0), Go, and the control plane of `make test-cluster` in
~/.cache/spillway-cluster/bin: an API server and etcd hold its InferencePool and one pod, whose ports are the engines'.
It has the extension's default plugins.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from gateway_load.processes import DidNotStart, free_ports

BIN = Path("~/.cache/spillway-cluster/bin").expanduser()
CRDS = "config/crd/bases"
START_SECONDS_MAX = 90.0
SETTLE_SECONDS = 5.0  # until it has seen the pod and polled the engines
_TOKEN = "bench"
_POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "engine", "namespace": "default", "labels": {"app": "engine"}},
    "spec": {"nodeName": "node", "containers": [{"name": "engine", "image": "none"}]},
}
_RUNNING = {
    "status": {
        "phase": "Running",
        "podIP": "127.0.0.1",
        "podIPs": [{"ip": "127.0.0.1"}],
        "conditions": [{"type": "Ready", "status": "True"}],
    }
}


@contextmanager
def extension_picker(
    source: Path, engines: Sequence[int], folder: Path
) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """The port of its gRPC, and its process. Raises DidNotStart."""
    epp = folder / "epp"
    build = {**os.environ, "GOWORK": "off", "CGO_ENABLED": "0"}
    subprocess.run(["go", "build", "-trimpath", "-o", str(epp), "./cmd/epp"], cwd=source, env=build, check=True)
    etcd, peers, api, port, health, metrics = free_ports(6)
    (folder / "tokens.csv").write_text(f"{_TOKEN},admin,admin,system:masters\n")
    key = folder / "key.pem"
    subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
    user = {"token": _TOKEN}
    cluster = {"server": f"https://127.0.0.1:{api}", "insecure-skip-tls-verify": True}
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "bench", "cluster": cluster}],
                "users": [{"name": "bench", "user": user}],
                "contexts": [{"name": "bench", "context": {"cluster": "bench", "user": "bench"}}],
                "current-context": "bench",
            }
        )
    )
    kubectl = [str(BIN / "kubectl"), "--kubeconfig", str(kubeconfig)]

    def apply(document: object, *more: str) -> None:
        subprocess.run([*kubectl, "apply", *more, "-f", "-"], input=json.dumps(document).encode(), check=True)

    client, peer = f"http://127.0.0.1:{etcd}", f"http://127.0.0.1:{peers}"
    store = ["--data-dir", str(folder / "etcd"), "--listen-client-urls", client, "--advertise-client-urls", client]
    store += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
    store += ["--initial-cluster", f"default={peer}"]
    server = ["--etcd-servers", client, "--bind-address", "127.0.0.1", "--secure-port", str(api)]
    server += ["--cert-dir", str(folder / "certs"), "--token-auth-file", str(folder / "tokens.csv")]
    server += ["--authorization-mode", "AlwaysAllow", "--disable-admission-plugins", "ServiceAccount"]
    server += ["--service-cluster-ip-range", "10.253.0.0/24", "--service-account-issuer", "https://bench"]
    server += ["--service-account-key-file", str(key), "--service-account-signing-key-file", str(key)]
    with ExitStack() as stack:
        stack.enter_context(_process([str(BIN / "etcd"), *store], folder / "etcd.log"))
        stack.enter_context(_process([str(BIN / "kube-apiserver"), *server], folder / "apiserver.log"))
        deadline = time.monotonic() + START_SECONDS_MAX
        while subprocess.run([*kubectl, "get", "--raw", "/readyz"], capture_output=True, check=False).returncode:
            if time.monotonic() > deadline:
                raise DidNotStart("the API server did not start")
            time.sleep(0.5)
        subprocess.run([*kubectl, "apply", "--server-side", "-f", str(source / CRDS)], check=True, capture_output=True)
        apply(_POD)
        patch = ["patch", "pod", "engine", "--subresource=status", "--type=merge", "-p", json.dumps(_RUNNING)]
        subprocess.run([*kubectl, *patch], check=True, capture_output=True)
        subprocess.run([*kubectl, "wait", "--for=condition=Established", "crd", "--all"], check=True)
        apply(
            {
                "apiVersion": "inference.networking.k8s.io/v1",
                "kind": "InferencePool",
                "metadata": {"name": "pool", "namespace": "default"},
                "spec": {
                    "selector": {"matchLabels": {"app": "engine"}},
                    "targetPorts": [{"number": engine} for engine in engines],
                    "endpointPickerRef": {"name": "epp", "port": {"number": port}},
                },
            }
        )
        command = [str(epp), "--pool-name", "pool", "--pool-namespace", "default", "--grpc-port", str(port)]
        command += ["--grpc-health-port", str(health), "--metrics-port", str(metrics), "--secure-serving=false"]
        command += ["--metrics-endpoint-auth=false", "--tracing=false", "--zap-log-level", "error"]
        process = stack.enter_context(_process(command, folder / "epp.log", KUBECONFIG=str(kubeconfig)))
        time.sleep(SETTLE_SECONDS)
        if process.poll() is not None:
            raise DidNotStart(f"the extension's picker ended: {(folder / 'epp.log').read_text()[-400:]}")
        yield port, process


@contextmanager
def _process(command: list[str], log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command, cwd=log.parent, stdout=output, stderr=output, env={**os.environ, **environment}
        ) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()
