"""One cluster: what an operator does goes through kubectl, what a test looks at through the client package. Objects are
dictionaries as the API spells them, waits have deadlines."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.commands import run
from kubernetes import config
from kubernetes.client import ApiClient, CoreV1Api
from stack_driver.deadlines import eventually

Object = dict[str, Any]
REQUEST_SECONDS = 60.0


@dataclass(frozen=True)
class Kubernetes:
    """environment: KUBECONFIG, and a PATH that finds kubectl. namespace: None for objects of the cluster.

    get() and pods_labelled() raise the package's ApiException.
    """

    environment: Mapping[str, str]
    namespace: str | None = None

    def within(self, namespace: str) -> Kubernetes:
        return Kubernetes(self.environment, namespace)

    def kubectl(self, *arguments: str, given: str | None = None, seconds: float = 60.0, check: bool = True) -> str:
        place = ["-n", self.namespace] if self.namespace else []
        environment = {**os.environ, **self.environment}
        return run("kubectl", *place, *arguments, given=given, seconds=seconds, environment=environment, check=check)

    def apply(self, *objects: Object) -> None:
        self.kubectl("apply", "-f", "-", given="\n---\n".join(json.dumps(item) for item in objects))

    def client(self) -> ApiClient:
        return _client(self.environment.get("KUBECONFIG"))

    def get(self, kind: str, name: str) -> Object:
        """kind: pod, configmap or node."""
        core = CoreV1Api(self.client())
        if kind == "node":
            return _document(core.read_node, name)
        read = {"pod": core.read_namespaced_pod, "configmap": core.read_namespaced_config_map}[kind]
        return _document(read, name, self.namespace)

    def pods_labelled(self, selector: str = "") -> list[Object]:
        listed = _document(
            CoreV1Api(self.client()).list_namespaced_pod, self.namespace, label_selector=selector or None
        )
        items: list[Object] = listed["items"]
        return items

    def pods(self, component: str) -> list[Object]:
        """The chart's pods of this component, without those being deleted."""
        found = self.pods_labelled(f"app.kubernetes.io/component={component}")
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def ready_pods(self, component: str) -> list[Object]:
        return [pod for pod in self.pods(component) if is_ready(pod)]

    def wait_for_pods(self, component: str, count: int, seconds: float = 180.0) -> list[Object]:
        """Exactly so many pods, all Ready."""

        def settled() -> list[Object] | None:
            pods = self.pods(component)
            return pods if len(pods) == count and all(map(is_ready, pods)) else None

        try:
            return eventually(f"{count} ready pods of {component}", settled, seconds)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.describe_trouble()}") from None

    def wait_for_kind(self, plural: str, group: str) -> None:
        """Wait until the API server serves what a CustomResourceDefinition has declared."""
        listed = "api-resources", f"--api-group={group}"
        eventually(f"{plural} are served", lambda: plural in self.kubectl(*listed, check=False), 60.0)

    def execute(self, pod: str, *command: str, given: str | None = None, seconds: float = 60.0) -> str:
        stdin = ["-i"] if given is not None else []
        return self.kubectl("exec", *stdin, pod, "--", *command, given=given, seconds=seconds)

    def can_i(self, account: str, verb: str, resource: str) -> bool:
        subject = f"--as=system:serviceaccount:{self.namespace}:{account}"
        answer = self.kubectl("auth", "can-i", verb, resource, subject, check=False).strip()
        assert answer in ("yes", "no"), answer
        return answer == "yes"

    def describe_trouble(self) -> str:
        """Return what a person would look at first: pods, the last events, the ends of the logs."""
        parts = [self.kubectl("get", "pods", "-o", "wide", check=False)]
        parts.append(self.kubectl("get", "events", "--sort-by=.lastTimestamp", check=False)[-3000:])
        for pod in self.pods_labelled():
            if not is_ready(pod):
                parts.append(self.kubectl("logs", pod["metadata"]["name"], "--tail=20", check=False))
        return "\n".join(parts)


def is_ready(pod: Object) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    return any(item["type"] == "Ready" and item["status"] == "True" for item in conditions)


def name_of(item: Object) -> str:
    return str(item["metadata"]["name"])


def _document(call: Any, *arguments: Any, **parameters: Any) -> Object:
    """The reply itself: as the API spells it, independent of the package's models."""
    reply = call(*arguments, _preload_content=False, _request_timeout=REQUEST_SECONDS, **parameters)
    found: Object = json.loads(reply.data)
    return found


@functools.cache
def _client(kubeconfig: str | None) -> ApiClient:
    """Return a client for the file; None: for the one that kubectl would take."""
    client: ApiClient = config.new_client_from_config(config_file=kubeconfig)
    return client
