"""kubectl for one cluster: objects as dictionaries, waits with deadlines."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.commands import CommandFailed, run
from stack_driver.deadlines import eventually

Object = dict[str, Any]


@dataclass(frozen=True)
class Kubernetes:
    """environment: KUBECONFIG, and a PATH that finds kubectl. namespace: None for objects of the cluster."""

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

    def get(self, kind: str, name: str) -> Object:
        found: Object = json.loads(self.kubectl("get", kind, name, "-o", "json"))
        return found

    def list(self, kind: str, selector: str = "") -> list[Object]:
        chosen = ["-l", selector] if selector else []
        items: list[Object] = json.loads(self.kubectl("get", kind, *chosen, "-o", "json"))["items"]
        return items

    def pods(self, component: str) -> list[Object]:
        """Of the chart, those being deleted left out."""
        found = self.list("pods", f"app.kubernetes.io/component={component}")
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

    def execute(self, pod: str, *command: str, given: str | None = None, seconds: float = 60.0) -> str:
        stdin = ["-i"] if given is not None else []
        return self.kubectl("exec", *stdin, pod, "--", *command, given=given, seconds=seconds)

    def can_i(self, account: str, verb: str, resource: str) -> bool:
        subject = f"--as=system:serviceaccount:{self.namespace}:{account}"
        answer = self.kubectl("auth", "can-i", verb, resource, subject, check=False).strip()
        assert answer in ("yes", "no"), answer
        return answer == "yes"

    def describe_trouble(self) -> str:
        """What somebody would look at first: pods, the last events, the ends of the logs."""
        parts = [self.kubectl("get", "pods", "-o", "wide", check=False)]
        parts.append(self.kubectl("get", "events", "--sort-by=.lastTimestamp", check=False)[-3000:])
        for pod in self.list("pods"):
            if not is_ready(pod):
                parts.append(self.kubectl("logs", pod["metadata"]["name"], "--tail=20", check=False))
        return "\n".join(parts)


def is_ready(pod: Object) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    return any(item["type"] == "Ready" and item["status"] == "True" for item in conditions)


def name_of(item: Object) -> str:
    return str(item["metadata"]["name"])


def gone(what: Callable[[], object]) -> bool:
    """Whether asking for it fails because it does not exist."""
    try:
        what()
    except CommandFailed as failure:
        if "NotFound" in failure.error:
            return True
        raise
    return False
