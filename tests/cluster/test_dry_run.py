"""The API server takes every configuration of the chart's tests, without a pod being started: what its schemas leave to
code, such as names, ranges and what may be there once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chart.helm_binaries import helms
from chart.rendering import CUSTOM_KINDS, VALUES_FILES, Render, render
from chart.test_kubernetes_settings import VALUES as KUBERNETES_VALUES
from chart.test_unusual import UNUSUAL
from cluster.commands import CommandFailed
from cluster.kube import Kubernetes, Object

CONFIGURATIONS: dict[str, tuple[list[Path], dict[str, Any] | None]] = {
    **{file.stem: ([file], None) for file in VALUES_FILES},
    "everything that Kubernetes reads": ([], KUBERNETES_VALUES),
    **{name: ([], values) for name, values in UNUSUAL.items()},
}
_CUSTOM = {kind.rpartition("/")[2] for kind in CUSTOM_KINDS}


def objects(rendered: Render, namespace: str) -> list[Object]:
    """Return the objects in one namespace that there is; without kinds whose definitions this cluster lacks, and
    without IPv6, which its API server takes from no one."""
    return [
        {**item, "metadata": {**item["metadata"], "namespace": namespace}, **_of_ipv4(item)}
        for item in rendered.objects
        if item["kind"] not in _CUSTOM
    ]


def _of_ipv4(item: Object) -> Object:
    """The spec of a Service that asks for another family, without that."""
    spec = item.get("spec", {})
    if item["kind"] != "Service" or "IPv6" not in spec.get("ipFamilies", []):
        return {}
    return {"spec": {key: value for key, value in spec.items() if not key.startswith("ipFamil")}}


def dry_run(namespace: Kubernetes, items: list[Object]) -> str:
    """Raises CommandFailed with the server's words."""
    # Not ASCII alone: kubectl reads several documents as YAML, which has no escapes of surrogates.
    given = "\n---\n".join(json.dumps(item, ensure_ascii=False) for item in items)
    return namespace.kubectl("create", "--dry-run=server", "-o", "name", "-f", "-", given=given, seconds=120)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_server_takes_it(name: str, namespace: Kubernetes) -> None:
    files, values = CONFIGURATIONS[name]
    number = list(CONFIGURATIONS).index(name)
    items = objects(render(*files, values=values, helm=helms()[number % 2]), namespace.namespace)

    taken = dry_run(namespace, items)

    assert len(taken.splitlines()) == len(items) > 5


def test_the_server_refuses_what_no_schema_sees(namespace: Kubernetes) -> None:
    """The cases above can fail."""
    [engine] = [item for item in objects(render(), namespace.namespace) if item["kind"] == "StatefulSet"]
    engine["spec"]["template"]["spec"]["tolerations"] = [{"key": "a", "operator": "Exists", "value": "b"}]

    with pytest.raises(CommandFailed) as refused:
        dry_run(namespace, [engine])

    assert "tolerations" in str(refused.value)
