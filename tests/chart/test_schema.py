"""values.schema.json: made from the model of values.yaml, current, strict, and what Helm and editors take."""

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import jsonschema
import msgspec
import pytest
import yaml
from chart.helm_binaries import ROOT, Helm, helms
from chart.kubernetes_types import fields_since
from chart.rendering import CHART, VALUES_FILES, render
from chart.test_documented_values import PAGES, fragments

from spillway_ctl.check.chart_facts import facts
from spillway_settings.values.__main__ import generated
from spillway_settings.values.release import Values

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALIDATOR = jsonschema.Draft7Validator(SCHEMA)
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
# Read by Kubernetes or by vLLM, not by the chart.
OPEN = {"extraObjects", "extraTiers", "extraConfig", "metadata", "global", "filters"}


def objects(schema: Any, name: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, schema) of everything that may be a map, types of Kubernetes apart."""
    kinds = schema.get("type", [])
    if "object" in ([kinds] if isinstance(kinds, str) else kinds):
        yield name, schema
    for key, inner in (schema.get("properties", {}) | schema.get("patternProperties", {})).items():
        yield from objects(inner, key)
    if "items" in schema:
        yield from objects(schema["items"], name)


def test_what_is_checked_in_is_what_the_model_makes() -> None:
    for name, text in generated(CHART).items():
        assert (CHART / name).read_text() == text, f"{name} is not current: run make schema"


def test_defaults_are_those_of_the_model() -> None:
    assert msgspec.to_builtins(Values()) == VALUES


def test_schema_is_one() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)


def test_every_level_refuses_what_it_does_not_know() -> None:
    found = [*objects(SCHEMA), *objects(SCHEMA["definitions"]["engine"])]

    assert len(found) > 60
    assert {name for name, schema in found if schema.get("additionalProperties") is not False} == OPEN


def test_every_setting_is_described_or_its_section_is() -> None:
    described = json.dumps(SCHEMA["definitions"]["engine"]["properties"]["offload"]["properties"]["storing"])

    assert "auto: once the CPU tier is full, a block is copied to it when" in described


@pytest.mark.parametrize("file", VALUES_FILES, ids=lambda file: file.name)
def test_an_editor_finds_no_mistake_in_the_charts_own_values(file: Any) -> None:
    assert [error.message for error in VALIDATOR.iter_errors(yaml.safe_load(file.read_text()))] == []


@pytest.mark.parametrize("page", PAGES)
def test_an_editor_finds_no_mistake_in_documented_values(page: str) -> None:
    for values in fragments((ROOT / page).read_text()):
        assert [error.message for error in VALIDATOR.iter_errors(values)] == [], values


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"engine": {"model": {"path": "/m"}}},
        {"engine": {"offload": {"numCpuBlocks": None, "cpuBytes": "1GiB"}}},
        {"gateway": {"opsPort": None, "resources": {"limits": {"memory": None}}}},
        {"engine": {"podSecurityContext": None, "affinity": {}}},
        {"global": {"storageClass": "fast"}},
        {"x-small": {"replicas": 1}, "engine": {"x-note": "text", "model": {"x-a": [1]}}},
        {"engines": {"a": {"replicas": 0}}},
        {
            "engine": {
                "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "a", "whenUnsatisfiable": "ScheduleAnyway"}]
            }
        },
    ],
)
def test_a_part_of_the_values_is_valid(values: dict[str, Any]) -> None:
    assert [error.message for error in VALIDATOR.iter_errors(values)] == []


@pytest.mark.parametrize("helm", helms(), ids=lambda helm: f"helm{helm.major}")
def test_own_keys_and_anchors_change_nothing(helm: Helm, tmp_path: Any) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(
        "x-labels: &labels {team: a}\nengine: {x-note: b, podLabels: *labels}\n"
        "gateway: {podLabels: *labels, timeouts: {x-why: c}, limits: {x-d: {e: 1}}}\n"
    )

    labels = {"podLabels": {"team": "a"}}
    assert render(file, helm=helm).text == render(values={"engine": labels, "gateway": labels}, helm=helm).text


@pytest.mark.parametrize("helm", helms(), ids=lambda helm: f"helm{helm.major}")
def test_helm_lint_refuses_a_misspelt_setting(helm: Helm, tmp_path: Any) -> None:
    file = tmp_path / "values.yaml"
    file.write_text('engine: {replcas: 3, offload: {numCpuBlocks: "lots"}}')

    done = subprocess.run([helm.path, "lint", "-f", file, CHART], capture_output=True, text=True, check=False)

    assert done.returncode != 0 and "replcas" in done.stdout and "numCpuBlocks" in done.stdout


def test_every_template_begins_with_the_plan() -> None:
    """Helm renders files in an order of its own, and each may read values only after the few rules of _rules.tpl."""
    files = [file for file in (CHART / "templates").rglob("*") if file.suffix in (".yaml", ".txt")]

    assert len(files) > 20
    for file in files:
        assert file.read_text().startswith('{{- include "spillway.plan" $ -}}'), file


def test_the_check_knows_since_when_fields_of_kubernetes_are_there() -> None:
    known = facts("kubernetes-since.yaml")["fields"]

    for (name, field), since in fields_since().items():
        # `(mis)?matchLabelKeys` stands for two.
        ends = [key for key in known if field in key or field.removeprefix("mis") in key]
        assert any(known[key] == since for key in ends), (name, field, since)
