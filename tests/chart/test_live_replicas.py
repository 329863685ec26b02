"""Turning autoscaling on leaves the running pods alone: their number is read from the live object (Helm's `lookup`).

A small API server stands in for the cluster, so that what Helm asks and what it renders from the answer are seen
without one; tests/cluster/test_turning_autoscaling_on.py changes a real one.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart.helm_binaries import Helm, helms
from chart.rendering import render

SCALED = yaml.safe_load("engine: {autoscaling: {enabled: true}}\ngateway: {autoscaling: {enabled: true}}")
WORKLOADS = {"StatefulSet": "chat-spillway-engine", "Deployment": "chat-spillway-gateway"}
# What the cluster serves: Helm 4 finds each rendered object's kind there.
KINDS = {
    "v1": "Service ConfigMap ServiceAccount Pod Secret",
    "apps/v1": "StatefulSet Deployment",
    "autoscaling/v2": "HorizontalPodAutoscaler",
    "networking.k8s.io/v1": "NetworkPolicy",
    "policy/v1": "PodDisruptionBudget",
    "rbac.authorization.k8s.io/v1": "Role RoleBinding",
    "keda.sh/v1alpha1": "ScaledObject",
}
MANAGED = {"app.kubernetes.io/managed-by": "Helm"}
OWNED = {"meta.helm.sh/release-name": "chat", "meta.helm.sh/release-namespace": "llm"}


def _plural(kind: str) -> str:
    return f"{kind.lower()}s" if not kind.endswith("y") else f"{kind.lower()[:-1]}ies"


def _group(name: str, version: str) -> dict[str, Any]:
    served = {"groupVersion": f"{name}/{version}", "version": version}
    return {"name": name, "versions": [served], "preferredVersion": served}


def _resources(version: str, kinds: str) -> dict[str, Any]:
    resources = [
        {"name": _plural(kind), "singularName": kind.lower(), "kind": kind, "namespaced": True, "verbs": ["get"]}
        for kind in kinds.split()
    ]
    return {"kind": "APIResourceList", "groupVersion": version, "resources": resources}


class ApiServer(ThreadingHTTPServer):
    """Answers discovery, and GET of the objects in `live`: (kind, name) -> spec.replicas."""

    def __init__(self, live: dict[tuple[str, str], int]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        documents: dict[str, Any] = {
            "/version": {"major": "1", "minor": "36", "gitVersion": "v1.36.0"},
            "/api": {"kind": "APIVersions", "versions": ["v1"]},
            "/apis": {"kind": "APIGroupList", "groups": [_group(*each.split("/")) for each in KINDS if "/" in each]},
        }
        for version, kinds in KINDS.items():
            documents[f"/{'apis' if '/' in version else 'api'}/{version}"] = _resources(version, kinds)
        for (kind, name), replicas in live.items():
            documents[f"/apis/apps/v1/namespaces/llm/{_plural(kind)}/{name}"] = {
                "apiVersion": "apps/v1",
                "kind": kind,
                "metadata": {"name": name, "namespace": "llm", "labels": MANAGED, "annotations": OWNED},
                "spec": {"replicas": replicas},
            }
        self.documents = documents


class _Handler(BaseHTTPRequestHandler):
    server: ApiServer

    def do_GET(self) -> None:
        document = self.server.documents.get(self.path.partition("?")[0])
        body = json.dumps(document or {"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404})
        self.send_response(200 if document else 404)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *message: Any) -> None:
        """Nothing."""


@pytest.fixture
def running() -> Iterator[ApiServer]:
    live = {("StatefulSet", WORKLOADS["StatefulSet"]): 6, ("Deployment", WORKLOADS["Deployment"]): 5}
    server = ApiServer(live)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def replicas(rendered: Any) -> dict[str, int | None]:
    return {kind: rendered.named(kind, name)["spec"].get("replicas") for kind, name in WORKLOADS.items()}


@pytest.mark.parametrize("helm", helms(), ids=lambda helm: f"helm{helm.major}")
def test_what_runs_is_kept(helm: Helm, running: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = {"name": "here", "cluster": {"server": f"http://127.0.0.1:{running.server_port}"}}
    context = {"name": "here", "context": {"cluster": "here", "user": ""}}
    config = tmp_path / "config"
    config.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [cluster],
                "contexts": [context],
                "current-context": "here",
            }
        )
    )
    # What Helm remembers of an API server it files under the address, whose port may be used again.
    monkeypatch.setenv("KUBECACHEDIR", str(tmp_path))
    asked = ("--dry-run=server", "--disable-openapi-validation", "--kubeconfig", str(config))

    assert replicas(render(values=SCALED, helm=helm, arguments=asked)) == {"StatefulSet": 6, "Deployment": 5}
    assert replicas(render(values={"engine": {"replicas": 3}}, helm=helm, arguments=asked)) == {
        "StatefulSet": 3,
        "Deployment": 2,
    }


@pytest.mark.parametrize("helm", helms(), ids=lambda helm: f"helm{helm.major}")
def test_a_new_release_and_a_render_without_a_cluster_leave_the_number_to_the_autoscaler(helm: Helm) -> None:
    assert replicas(render(values=SCALED, helm=helm)) == {"StatefulSet": None, "Deployment": None}
