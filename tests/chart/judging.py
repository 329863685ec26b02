"""Helm's verdicts on many values at once by the chart's schema, in one run: a process for each would cost minutes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from chart.helm_binaries import Helm
from chart.rendering import CHART, RenderRefused, render

TABLE: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("mistakes.yaml").read_text())
TRIAL: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("trial.yaml").read_text())
MISTAKES = TABLE | TRIAL
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
# `- cases.NAME.engine: ...` of Helm 3, `- at '/cases/NAME/engine': ...` of Helm 4.
_REFUSED = re.compile(r"^ *- (?:cases\.(\d+)\.?([^:]*)|at '/cases/(\d+)([^']*)'): (.*)$")


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


def _without_removed(base: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `given` less each null that takes a default away: the schema sees the rest, which is valid in parts."""
    return {
        key: _without_removed(base[key], value)
        if isinstance(value, Mapping) and isinstance(base.get(key), Mapping)
        else value
        for key, value in given.items()
        if value is not None or key not in base
    }
