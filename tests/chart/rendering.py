"""Renders the chart as an operator would and hands back objects; nothing here knows what they should be."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from chart.helm_binaries import ROOT, Helm, helms
from kubernetes_validate import utils as kubernetes_schemas
from referencing import Registry, Resource

CHART = ROOT / "charts" / "spillway"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
VALUES_FILES = [CHART / "values.yaml", CHART / "values-cpu.yaml", *EXAMPLES]
CUSTOM_KINDS = (
    "leaderworkerset.x-k8s.io/v1/LeaderWorkerSet",
    "monitoring.coreos.com/v1/PodMonitor",
    "monitoring.coreos.com/v1/ServiceMonitor",
    "monitoring.coreos.com/v1/PrometheusRule",
    "keda.sh/v1alpha1/ScaledObject",
    "gateway.networking.k8s.io/v1/HTTPRoute",
    "inference.networking.k8s.io/v1/InferencePool",
)
RENDER_SECONDS = 300  # only a Helm that hangs takes so long
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
MANY = """\
kind: Many
texts:
{{- range $name, $values := .Values.cases }}
{{- $root := dict "Values" $values "Release" $.Release "Chart" $.Chart "Files" $.Files "Capabilities" $.Capabilities
  "Template" $.Template }}
{{- $texts := list }}
{{- range $.Values.files }}{{ $texts = append $texts (include (print "spillway/templates/" .) $root) }}{{ end }}
{{- $text := toJson $texts }}
  {{ $name | quote }}: {{ $.Values.onlyHashes | ternary (sha256sum $text | quote) $text }}
{{- end }}
"""
_valid: set[str] = set()


class RenderRefused(Exception):
    """Helm's message."""


_CHECKED = re.compile(r"^  values\.yaml: \".*\"$", re.MULTILINE)


@dataclass(frozen=True)
class Render:
    text: str

    @property
    def effects(self) -> str:
        """The text without the values that the hook checks: every value is among them, read or not."""
        text, count = _CHECKED.subn("  values.yaml: (the values)", self.text)
        assert count <= 1
        return text

    @cached_property
    def objects(self) -> list[dict[str, Any]]:
        return [item for item in yaml.load_all(self.text, Loader=yaml.CSafeLoader) if item]

    def of_kind(self, kind: str, component: str | None = None) -> list[dict[str, Any]]:
        return [
            item
            for item in self.objects
            if item["kind"] == kind and component in (None, item["metadata"]["labels"]["app.kubernetes.io/component"])
        ]

    def one(self, kind: str, component: str | None = None) -> dict[str, Any]:
        found = self.of_kind(kind, component)
        assert len(found) == 1, f"{len(found)} objects of kind {kind} and component {component}"
        return found[0]

    def named(self, kind: str, name: str) -> dict[str, Any]:
        return next(item for item in self.of_kind(kind) if item["metadata"]["name"] == name)


def render(
    *files: Path,
    values: Mapping[str, Any] | None = None,
    helm: Helm | None = None,
    kubernetes: str = "1.32",
    kinds: Iterable[str] = CUSTOM_KINDS,
    release: str = "chat",
    chart: Path = CHART,
    arguments: Iterable[str] = (),
) -> Render:
    """`helm template`; equal questions are asked once. Raises RenderRefused."""
    command = [str((helm or helms()[1]).path), "template", release, str(chart), "-n", "llm"]
    command += ["--kube-version", kubernetes, *(word for kind in kinds for word in ("-a", kind))]
    command += [word for file in files for word in ("-f", str(file))]
    if values is not None:
        command += ["-f", "-"]
    status, text, errors = _run((*command, *arguments), json.dumps(values) if values is not None else None)
    if status != 0:
        raise RenderRefused(errors)
    return Render(text)


def render_many(
    cases: Mapping[str, Mapping[str, Any]], folder: Path, helm: Helm | None = None, kubernetes: str = "1.32"
) -> dict[str, Render]:
    """Name -> what the chart renders of these values, in one run of Helm, whose start takes longer than a render.

    The schema is not asked. NOTES is rendered too, and left out.

    Args:
        cases: name -> what is given over the chart's defaults.
        folder: one that is not there yet; a chart is made in it whose only template renders the others for each case.
        helm: which of the two.
        kubernetes: version of the cluster.
    """
    texts = _many(cases, folder, False, helm=helm, kubernetes=kubernetes)
    return {name: Render("\n---\n".join(texts[name][:-1])) for name in cases}


def digests_of_many(cases: Mapping[str, Mapping[str, Any]], folder: Path) -> dict[str, str]:
    """Name -> a hash of what `render_many` has."""
    return _many(cases, folder, True)


def _many(cases: Mapping[str, Mapping[str, Any]], folder: Path, only_hashes: bool, **options: Any) -> dict[str, Any]:
    (folder / "templates").mkdir(parents=True)
    names = []
    for file in (CHART / "templates").rglob("*.*"):
        # What begins with an underscore is there to be included.
        name = file.name if file.name.startswith("_") else f"_{file.name}"
        shutil.copy(file, folder / "templates" / name)
        if file.suffix == ".yaml":
            names.append(name)
    shutil.copytree(CHART / "files", folder / "files")
    shutil.copy(CHART / "Chart.yaml", folder)
    (folder / "templates" / "many.yaml").write_text(MANY)
    laid = {name: laid_out(case) for name, case in cases.items()}
    values = {"cases": laid, "files": [*sorted(names), "_NOTES.txt"], "onlyHashes": only_hashes}
    return render(values=values, chart=folder, **options).objects[0]["texts"]


@cache
def _run(command: tuple[str, ...], values: str | None) -> tuple[int, str, str]:
    """Exit status, output and errors. Keeping the output, not its objects, lets a test change what it was given."""
    done = subprocess.run(
        command,
        input=values,
        env={**os.environ, "GOGC": "400"},  # a quarter less processor time for 30 MB more
        capture_output=True,
        text=True,
        check=False,
        timeout=RENDER_SECONDS,
    )
    return done.returncode, done.stdout, done.stderr


def require_valid(rendered: Render, version: str) -> None:
    """Every object against Kubernetes' own schema, unknown fields refused; equal objects are checked once."""
    assert rendered.objects
    for item in rendered.objects:
        if any(f"{item['apiVersion']}/{item['kind']}" == kind for kind in CUSTOM_KINDS):
            continue
        key = hashlib.sha256(f"{version}{json.dumps(item, sort_keys=True)}".encode()).hexdigest()
        if key not in _valid:
            _validator(item["apiVersion"], item["kind"], version).validate(item)
            _valid.add(key)


@cache
def _validator(api_version: str, kind: str, version: str) -> jsonschema.Draft202012Validator:
    """Return kubernetes_validate's validator, built once: reading the definitions takes longer than using them."""
    group = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
    schema = _schema_file(f"{kind.lower()}-{group}.json", version)
    registry = Resource.from_contents(schema) @ _definitions(version)
    return jsonschema.Draft202012Validator(schema, registry=registry)


@cache
def _definitions(version: str) -> Registry:
    return (Resource.from_contents(_schema_file("_definitions.json", version)) @ Registry()).crawl()


def kubernetes_definitions(version: str) -> dict[str, Any]:
    """Full name of a type -> its schema."""
    return _schema_file("_definitions.json", version)["$defs"]


def _schema_file(name: str, version: str) -> Any:
    full = next(known for known in kubernetes_schemas.all_versions() if known.startswith(f"{version}."))
    return kubernetes_schemas.schema_contents(f"kubernetes-json-schema/v{full}-local-strict/{name}", version)


def nested(path: str, value: Any) -> dict[str, Any]:
    """`a.b`, 1 -> {"a": {"b": 1}}"""
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


def laid_over(base: Mapping[str, Any], *overs: Mapping[str, Any]) -> dict[str, Any]:
    """Maps merged, everything else replaced: what several -f files do."""
    merged = copy.deepcopy(dict(base))
    for over in overs:
        for key, value in over.items():
            both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
            merged[key] = laid_over(merged[key], value) if both else copy.deepcopy(value)
    return merged


def laid_out(given: Mapping[str, Any]) -> dict[str, Any]:
    """The values that the chart sees: Helm merges what is given into the defaults, and null removes one."""
    return _merged(VALUES, given)


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = copy.deepcopy(dict(base))
    for key, value in over.items():
        if value is None and key in merged and merged[key] is not None:
            merged.pop(key)
        elif isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = _merged(merged[key], value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged


def pod_spec(workload: Mapping[str, Any]) -> dict[str, Any]:
    """The pod of a workload; of a replica over several nodes its leader."""
    spec = workload["spec"]
    return spec["template"]["spec"] if "template" in spec else spec["leaderWorkerTemplate"]["leaderTemplate"]["spec"]


def environment(workload: Mapping[str, Any]) -> dict[str, Any]:
    """The variables of the first container: name -> value, or the source of the value."""
    entries = pod_spec(workload)["containers"][0].get("env", [])
    assert len({entry["name"] for entry in entries}) == len(entries), "one name twice"
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in entries}


def quantity_bytes(text: str) -> int:
    assert text.endswith("Mi"), text
    return int(text[:-2]) << 20
