"""Turning autoscaling on leaves the running pods alone: their number is read from the live object (Helm's `lookup`).

A small API server stands in for the cluster, so that what Helm asks and what it renders from the answer are seen
without one; tests/cluster/test_changes.py changes a real one.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
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
    """Answers discovery, and GET of the workloads in `live`, one by one or as a list."""

    def __init__(self, live: list[dict[str, Any]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        documents: dict[str, Any] = {
            "/version": {"major": "1", "minor": "36", "gitVersion": "v1.36.0"},
            "/api": {"kind": "APIVersions", "versions": ["v1"]},
            "/apis": {"kind": "APIGroupList", "groups": [_group(*each.split("/")) for each in KINDS if "/" in each]},
        }
        for version, kinds in KINDS.items():
            documents[f"/{'apis' if '/' in version else 'api'}/{version}"] = _resources(version, kinds)
        for kind in WORKLOADS:
            path = f"/apis/apps/v1/namespaces/llm/{_plural(kind)}"
            objects = [each for each in live if each["kind"] == kind]
            documents[path] = {"apiVersion": "apps/v1", "kind": f"{kind}List", "metadata": {}, "items": objects}
            documents |= {f"{path}/{each['metadata']['name']}": each for each in objects}
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
        """Log nothing."""


def live(kind: str, name: str, replicas: int, component: str, engine: str | None = None) -> dict[str, Any]:
    """A workload that runs in the cluster."""
    labels = {
        "app.kubernetes.io/instance": "chat",
        "app.kubernetes.io/component": component,
        **({"spillway/engine": engine} if engine else {}),
    }
    metadata = {"name": name, "namespace": "llm", "labels": MANAGED | labels, "annotations": OWNED}
    return {"apiVersion": "apps/v1", "kind": kind, "metadata": metadata, "spec": {"replicas": replicas}}


ENGINE, GATEWAY = WORKLOADS.values()
MODEL = "default"
ENGINES = live("StatefulSet", ENGINE, 6, "engine", MODEL)
GATEWAYS = live("Deployment", GATEWAY, 5, "gateway")
ANOTHER_RELEASE = live("Deployment", "other-spillway-engine", 9, "engine", MODEL)
ANOTHER_RELEASE["metadata"]["labels"]["app.kubernetes.io/instance"] = "other"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[list[dict[str, Any]]], list[str]]]:
    """The live workloads -> Helm's arguments for a cluster that has them."""
    servers: list[tuple[ApiServer, threading.Thread]] = []
    # What Helm remembers of an API server it files under the address, whose port may be used again.
    monkeypatch.setenv("KUBECACHEDIR", str(tmp_path))

    def serve(workloads: list[dict[str, Any]]) -> list[str]:
        server = ApiServer(workloads)
        servers.append((server, threading.Thread(target=server.serve_forever)))
        servers[-1][1].start()
        config = tmp_path / f"config-{len(servers)}"
        place = {"name": "here", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}
        context = {"name": "here", "context": {"cluster": "here", "user": ""}}
        document = {"apiVersion": "v1", "kind": "Config", "clusters": [place], "contexts": [context]}
        config.write_text(json.dumps(document | {"current-context": "here"}))
        return ["--dry-run=server", "--disable-openapi-validation", "--kubeconfig", str(config)]

    yield serve
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


def replicas(rendered: Any) -> dict[str, int | None]:
    """spec.replicas of each workload, by kind and name."""
    return {
        f"{each['kind']}/{each['metadata']['name']}": each["spec"].get("replicas")
        for each in rendered.objects
        if each["kind"] in WORKLOADS
    }


def scaled(**engine: Any) -> dict[str, Any]:
    """Values with autoscaling on, and these of the engine."""
    return SCALED | {"engine": SCALED["engine"] | engine}


CASES = {
    "what runs is kept": (SCALED, [ENGINES, GATEWAYS], {f"StatefulSet/{ENGINE}": 6, f"Deployment/{GATEWAY}": 5}),
    "without autoscaling the values decide": (
        {"engine": {"replicas": 3}},
        [ENGINES, GATEWAYS],
        {f"StatefulSet/{ENGINE}": 3, f"Deployment/{GATEWAY}": 2},
    ),
    "another controller starts with as many": (
        scaled(controller="Deployment"),
        [ENGINES, GATEWAYS],
        {f"Deployment/{ENGINE}": 6, f"Deployment/{GATEWAY}": 5},
    ),
    "and back": (
        SCALED,
        [live("Deployment", ENGINE, 6, "engine", MODEL), GATEWAYS],
        {f"StatefulSet/{ENGINE}": 6, f"Deployment/{GATEWAY}": 5},
    ),
    "the object itself counts before one that is left of another kind": (
        SCALED,
        [live("StatefulSet", ENGINE, 0, "engine", MODEL), live("Deployment", ENGINE, 6, "engine", MODEL), GATEWAYS],
        {f"StatefulSet/{ENGINE}": 0, f"Deployment/{GATEWAY}": 5},
    ),
    "another name starts with as many": (
        SCALED | {"fullnameOverride": "new"},
        [ENGINES, GATEWAYS],
        {"StatefulSet/new-engine": 6, "Deployment/new-gateway": 5},
    ),
    "scaled to zero": (
        scaled(controller="Deployment"),
        [live("StatefulSet", ENGINE, 0, "engine", MODEL), GATEWAYS],
        {f"Deployment/{ENGINE}": 0, f"Deployment/{GATEWAY}": 5},
    ),
    "a new release starts with the least; others' objects do not count": (
        scaled(autoscaling={"enabled": True, "minReplicas": 3}),
        [ANOTHER_RELEASE],
        {f"StatefulSet/{ENGINE}": 3, f"Deployment/{GATEWAY}": 2},
    ),
    "a new release that may scale to zero starts with one": (
        scaled(autoscaling={"enabled": True, "minReplicas": 0, "trigger": "gateway"}),
        [],
        {f"StatefulSet/{ENGINE}": 1, f"Deployment/{GATEWAY}": 2},
    ),
}


@pytest.mark.parametrize("helm", helms(), ids=lambda helm: f"helm{helm.major}")
def test_no_object_is_left_without_a_number_of_pods(
    helm: Helm, cluster: Callable[[list[dict[str, Any]]], list[str]]
) -> None:
    for case, (values, workloads, expected) in CASES.items():
        assert replicas(render(values=values, helm=helm, arguments=cluster(workloads))) == expected, case


@pytest.mark.parametrize("helm", helms(), ids=lambda helm: f"helm{helm.major}")
def test_a_render_without_a_cluster_leaves_the_number_to_the_autoscaler(helm: Helm) -> None:
    expected = {f"StatefulSet/{ENGINE}": None, f"Deployment/{GATEWAY}": None}
    assert replicas(render(values=SCALED, helm=helm)) == expected
