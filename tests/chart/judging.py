"""What the chart says of many values at once: one run of Helm for its schema and one for its templates.

A process for each would cost minutes. Helm judges by values.schema.json before it renders anything, so templates see
only what passed.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from chart.helm_binaries import Helm
from chart.rendering import CHART, RenderRefused, render

VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
# Helm's own merge of values is `spillway.overlay`: keys win, maps are merged, null removes a default.
JUDGE = """\
kind: Judged
verdicts:
{{- range $name, $values := .Values.cases }}
{{- $root := dict "Values" $values "Release" $.Release "Chart" $.Chart "Files" $.Files "Capabilities" $.Capabilities }}
{{- $plan := dict }}
{{- include "spillway.makePlan" (dict "root" $root "plan" $plan) }}
  {{ $name | quote }}: {{ values $plan.problems | toJson }}
{{- end }}
"""
# `- cases.NAME.engine: ...` of Helm 3, `- at '/cases/NAME/engine': ...` of Helm 4.
_REFUSED = re.compile(r"^ *- (?:cases\.(\d+)\.?([^:]*)|at '/cases/(\d+)([^']*)'): (.*)$")


def laid_out(given: Mapping[str, Any]) -> dict[str, Any]:
    """The values that the chart sees."""
    return _overlaid(VALUES, given)


def refused_by_schema(cases: Mapping[str, Mapping[str, Any]], helm: Helm, folder: Path) -> dict[str, list[str]]:
    """Name -> what Helm says of the values, each with the setting's path in dots; empty: the schema takes them."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    definitions = schema.pop("definitions") | {"values": schema}
    whole = {"type": "object", "additionalProperties": {"$ref": "#/definitions/values"}}
    (folder / "templates").mkdir(parents=True)
    (folder / "Chart.yaml").write_text((CHART / "Chart.yaml").read_text())
    (folder / "values.schema.json").write_text(
        json.dumps({"$schema": schema["$schema"], "properties": {"cases": whole}, "definitions": definitions})
    )
    verdicts: dict[str, list[str]] = {name: [] for name in cases}
    names = list(cases)
    try:
        given = {str(at): _without_removed(VALUES, case) for at, case in enumerate(cases.values())}
        render(values={"cases": given}, chart=folder, helm=helm)
    except RenderRefused as refused:
        for line in str(refused).splitlines():
            if found := _REFUSED.match(line):
                path = found[2] or (found[4] or "").strip("/").replace("/", ".").replace("~1", "/")
                verdicts[names[int(found[1] or found[3])]].append(f"{path or 'the values'}: {found[5]}")
    return verdicts


def refused_by_templates(cases: Mapping[str, Mapping[str, Any]], helm: Helm, folder: Path) -> dict[str, list[str]]:
    """Name -> every problem that the chart's templates find in values that its schema takes."""
    (folder / "templates").mkdir(parents=True)
    for file in (CHART / "templates").glob("_*.tpl"):
        shutil.copy(file, folder / "templates")
    shutil.copytree(CHART / "files", folder / "files")
    shutil.copy(CHART / "Chart.yaml", folder)
    (folder / "templates" / "judged.yaml").write_text(JUDGE)
    laid = {name: laid_out(case) for name, case in cases.items()}
    return render(values={"cases": laid}, chart=folder, helm=helm).objects[0]["verdicts"]


def _without_removed(base: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What was given, less each null that takes a default away: the schema sees the rest, which is valid in parts."""
    return {
        key: _without_removed(base[key], value)
        if isinstance(value, Mapping) and isinstance(base.get(key), Mapping)
        else value
        for key, value in given.items()
        if value is not None or key not in base
    }


def _overlaid(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = copy.deepcopy(dict(base))
    for key, value in over.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = _overlaid(merged[key], value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged
