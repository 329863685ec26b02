"""A pod beside the service, from the gateway's own image: what clients see through the Service's name."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.commands import CommandFailed
from cluster.kube import Kubernetes, Object, is_ready
from cluster.values import CLIENT_LABELS, OPERATIONS_PORT
from stack_driver.deadlines import eventually

SCRIPTS = Path(__file__).resolve().parent / "client"
NAME = "client"
ASK_SECONDS = 300.0  # more than client/load.py takes to connect, and to wait for an engine that starts
SETTLED_REQUESTS = 20  # before anything is done to the service, and after it
SETTLED_REQUESTS_REAL = 6  # of real engines, which may take ten seconds for one
REQUESTS_SECONDS = 120.0  # until that many more have ended
REQUESTS_SECONDS_REAL = 900.0
WORKERS = 6  # that ask at once


@dataclass
class LoadResult:
    """Filled in when the load has ended. Times are those of the pod's clock, which is the cluster's."""

    requests: int = 0
    failed: int = 0
    reconnects: int = 0
    closed: int = 0
    failures: list[dict[str, Any]] = field(default_factory=list)
    engines: dict[str, int] = field(default_factory=dict)
    last_failure: float | None = None
    begun: float = 0.0
    ended: float = 0.0
    median_seconds: float = 0.0
    slowest_seconds: float = 0.0

    def words(self) -> str:
        parts = [f"{len(self.engines)} engines answered", f"slowest {self.slowest_seconds} s"]
        if self.reconnects:
            parts.append(f"{self.reconnects} connections tried again")
        if self.closed:
            parts.append(f"{self.closed} kept connections found closed")
        for failure in self.failures[:3]:
            parts.append(f"{failure['what'][:160]} ({failure['at'] - self.begun:.1f} s in)")
        return "; ".join(parts)

    def require_only_lost_ones(self, workers: int) -> None:
        """Failures are of requests that ran at one moment, whenever the kubelet killed a process, and no more than
        could: none was asked after another had failed."""
        assert self.failed <= workers, self.failures
        first = min((failure["at"] for failure in self.failures), default=0.0)
        later = [failure for failure in self.failures if failure["asked"] > first]
        assert not later, f"asked after the kill, and failed: {later}"


class ClientPod:
    def __init__(self, kubernetes: Kubernetes, service: str, model: str, image: str) -> None:
        self._kubernetes, self._image = kubernetes, image
        self.url = f"http://{service}"
        self.model = model
        self._runs = 0
        self._folder = ""
        self._requests_seconds = REQUESTS_SECONDS

    def create(self, node: str | None = None, key_secret: str | None = None) -> None:
        """key_secret: a Secret whose `api-key` the client sends."""
        files = {path.name: path.read_text() for path in SCRIPTS.glob("*.py")}
        scripts = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": NAME}, "data": files}
        self._kubernetes.apply(scripts, self._pod(node, key_secret))
        eventually("the client pod is ready", lambda: is_ready(self._kubernetes.get("pod", NAME)), 120.0)

    def remove(self) -> None:
        self._kubernetes.kubectl("delete", "pod,configmap", NAME, "--ignore-not-found", "--wait")

    def python(self, code: str, seconds: float = 60.0) -> str:
        return self._kubernetes.execute(NAME, "python3", "-c", code, seconds=seconds)

    def get(self, url: str) -> Any:
        return json.loads(self.get_text(url))

    def get_text(self, url: str) -> str:
        """Raises AssertionError for another status than 200."""
        reply = self._ask(url)
        assert reply["status"] == 200, reply
        return str(reply["body"])

    def chat(self) -> dict[str, Any]:
        """status, headers, body of one chat through the Service; under `streamed` those of the same one streamed."""
        return json.loads(self._kubernetes.execute(NAME, "python3", "/lane/load.py", "once", self.url, self.model))

    def status_of(self, model: str) -> int:
        """The status of one chat with this model, which may have to wait until an engine has started."""
        body = {
            "model": model,
            "max_tokens": 4,
            "messages": [{"role": "user", "content": "Name the capital of France."}],
        }
        return int(self._ask(f"{self.url}/v1/chat/completions", json.dumps(body))["status"])

    def complete(self, model: str, prompt: list[int], tokens: int = 4) -> dict[str, Any]:
        """status, headers and body (a text) of one completion with this model. prompt: token ids."""
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return self._ask(f"{self.url}/v1/completions", json.dumps(body))

    def counted(self, series: str, model: str) -> int:
        """The sum of a model's series over all gateways, as Prometheus would add them up. series: how they begin."""
        total = 0.0
        for pod in self._kubernetes.ready_pods("gateway"):
            page = self.get_text(f"http://{pod['status']['podIP']}:{OPERATIONS_PORT}/metrics")
            values = [
                line.rpartition(" ")[2]
                for line in page.splitlines()
                if line.startswith(series) and f'model="{model}"' in line
            ]
            total += sum(map(float, values))
        return int(total)

    @contextmanager
    def load(self, workers: int = WORKERS, real_engines: bool = False) -> Iterator[LoadResult]:
        """Requests run while the block does; afterwards the result holds what became of all of them.

        real_engines: they are slow, and may decide near ties either way; of others a different answer to the same
        prompt is a failure.
        """
        self._runs += 1
        self._folder = folder = f"/tmp/run-{self._runs}"
        result = LoadResult()
        words = ["python3", "/lane/load.py", "run", folder, self.url, self.model, str(workers)]
        words += ["real"] if real_engines else []
        settled = SETTLED_REQUESTS_REAL if real_engines else SETTLED_REQUESTS
        self._requests_seconds = REQUESTS_SECONDS_REAL if real_engines else REQUESTS_SECONDS
        self._shell(f"nohup {shlex.join(words)} </dev/null >{folder}.log 2>&1 &")
        try:
            self.wait_for_requests(settled)
            yield result
            self.wait_for_requests(self.progress() + settled)
        finally:
            self._shell(f"touch {folder}/stop")
        text = eventually("the load's result", lambda: self._read(f"{folder}/result.json"), self._requests_seconds)
        for name, value in json.loads(text).items():
            setattr(result, name, value)

    def start_following(self, gateways: list[str]) -> str:
        """Returns the folder that stop_following wants."""
        self._runs += 1
        folder = f"/tmp/follow-{self._runs}"
        words = shlex.join(["python3", "/lane/follow.py", folder, *gateways])
        self._shell(f"nohup {words} </dev/null >{folder}.log 2>&1 &")
        eventually("the gateways are followed", lambda: len(self.followed(folder)) >= len(gateways))
        return folder

    def followed(self, folder: str) -> list[dict[str, Any]]:
        """The whole lines so far."""
        return [json.loads(line) for line in self._read(f"{folder}/changes.jsonl").splitlines(True) if line[-1] == "\n"]

    def stop_following(self, folder: str) -> list[dict[str, Any]]:
        self._shell(f"touch {folder}/stop")
        return self.followed(folder)

    def progress(self) -> int:
        """Requests that have ended in the present run, well or not."""
        text = self._read(f"{self._folder}/progress")
        return int(text.split()[0]) if text.strip() else 0

    def wait_for_requests(self, count: int) -> None:
        """Wait until so many requests have ended in the present run."""
        try:
            eventually(f"{count} requests", lambda: self.progress() >= count, self._requests_seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self._read(f'{self._folder}.log')}") from None

    def _ask(self, *words: str) -> dict[str, Any]:
        """words: a URL, and the JSON to post to it."""
        line = self._kubernetes.execute(NAME, "python3", "/lane/load.py", "ask", *words, seconds=ASK_SECONDS)
        reply: dict[str, Any] = json.loads(line)
        return reply

    def _read(self, path: str) -> str:
        try:
            return self._shell(f"cat {path} 2>/dev/null || true")
        except CommandFailed:
            return ""  # the API server may be away; the caller asks again

    def _shell(self, line: str) -> str:
        return self._kubernetes.execute(NAME, "sh", "-c", line)

    def _pod(self, node: str | None, key_secret: str | None) -> Object:
        key = {"name": "SPILLWAY_CLIENT_KEY"}
        environment = (
            [{**key, "valueFrom": {"secretKeyRef": {"name": key_secret, "key": "api-key"}}}] if key_secret else []
        )
        container = {
            "name": "client",
            "image": self._image,
            "imagePullPolicy": "IfNotPresent",
            "command": ["python3", "-c", "import signal; signal.sigwait([signal.SIGTERM])"],
            "env": environment,
            "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "512Mi"}},
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            },
            "volumeMounts": [{"name": "lane", "mountPath": "/lane"}, {"name": "scratch", "mountPath": "/tmp"}],
        }
        spec: Object = {
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
            "securityContext": {"runAsNonRoot": True, "runAsUser": 10001, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [container],
            "volumes": [{"name": "lane", "configMap": {"name": NAME}}, {"name": "scratch", "emptyDir": {}}],
        }
        if node is not None:
            spec["nodeSelector"] = {"kubernetes.io/hostname": node}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": NAME, "labels": CLIENT_LABELS}, "spec": spec}
