"""One release of the chart, driven as an operator drives Helm."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml
from chart.helm_binaries import ROOT, Helm
from cluster.commands import run
from cluster.kube import Kubernetes

CHART = ROOT / "charts" / "spillway"
VERSION = str(yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"])
READY_SECONDS = 300.0
Values = Mapping[str, Any]


@dataclass(frozen=True)
class Release:
    name: str
    helm: Helm
    kubernetes: Kubernetes

    def install(self, values: Values, wait: bool = True) -> None:
        waiting = ["--wait", "--timeout", f"{READY_SECONDS:.0f}s"] if wait else []
        self._helm("install", self.name, str(CHART), *waiting, values=values)

    def upgrade(self, values: Values, wait: bool = True, *arguments: str) -> None:
        waiting = ["--wait", "--timeout", f"{READY_SECONDS:.0f}s"] if wait else []
        self._helm("upgrade", self.name, str(CHART), *waiting, *arguments, values=values)

    def rollback(self) -> None:
        self._helm("rollback", self.name, "--wait", "--timeout", f"{READY_SECONDS:.0f}s")

    def test(self) -> str:
        """Helm's report of the chart's own test, with the pod's log."""
        return self._helm("test", self.name, "--logs", "--timeout", f"{READY_SECONDS:.0f}s")

    def uninstall(self) -> None:
        self._helm("uninstall", self.name, "--wait", "--timeout", f"{READY_SECONDS:.0f}s")

    def uninstall_if_there(self) -> None:
        self._helm("uninstall", self.name, "--wait", "--ignore-not-found", "--timeout", f"{READY_SECONDS:.0f}s")

    def revision(self) -> int:
        history = json.loads(self._helm("history", self.name, "-o", "json"))
        return int(history[-1]["revision"])

    def manifests(self) -> list[dict[str, Any]]:
        """The objects that Helm reports as installed."""
        return [item for item in yaml.safe_load_all(self._helm("get", "manifest", self.name)) if item]

    def notes(self) -> str:
        return self._helm("get", "notes", self.name)

    def _helm(self, *arguments: str, values: Values | None = None) -> str:
        assert self.kubernetes.namespace is not None
        command = [str(self.helm.path), *arguments, "--namespace", self.kubernetes.namespace]
        given = None
        if values is not None:
            command += ["-f", "-"]
            given = yaml.safe_dump(dict(values))
        environment = {**os.environ, **self.kubernetes.environment}
        return run(*command, given=given, environment=environment, seconds=READY_SECONDS + 60)
