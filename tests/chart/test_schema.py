"""The schema itself: a valid one, strict at every level, complete, and open only where Kubernetes reads on.

The templates read it (templates/_schema.tpl), with the words that they know of JSON Schema.
"""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import yaml
from chart.rendering import CHART, VALUES_FILES
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

SCHEMA = json.loads((CHART / "files" / "values.schema.json").read_text())
KUBERNETES_TYPES = json.loads((CHART / "files" / "kubernetes-types.json").read_text())
# Read by Kubernetes or by vLLM, not by the chart.
OPEN = {
    *("affinity", "nodeSelector", "tolerations", "podSecurityContext", "securityContext", "sidecars", "initContainers"),
    *("extraVolumes", "extraVolumeMounts", "extraObjects", "extraTiers", "extraMetrics", "valueFrom", "parentRefs"),
    *("topologySpreadConstraints", "relabelings", "metricRelabelings", "extraConfig", "extraResources"),
    *("podSelector", "namespaceSelector", "ipBlock", "ports", "metadata", "global"),
    *("volume", "volumeMount", "container", "parentReference", "kubernetesObject"),
    *("podLabels", "podAnnotations", "commonLabels", "commonAnnotations", "annotations", "labels", "extraEnv"),
}


def objects(schema: Any, name: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, schema) of everything that may be a map."""
    if isinstance(schema, dict):
        kinds = schema.get("type", [])
        if "object" in ([kinds] if isinstance(kinds, str) else kinds):
            yield name, schema
        for key, inner in schema.get("properties", {}).items():
            yield from objects(inner, key)
        if "items" in schema:
            yield from objects(schema["items"], name)
    if "$defs" in (schema or {}):
        for key, inner in schema["$defs"].items():
            yield from objects(inner, key)


def test_schema_is_one():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_every_level_refuses_what_it_does_not_know():
    found = list(objects(SCHEMA))

    assert len(found) > 60
    loose = {name for name, schema in found if schema.get("additionalProperties") is not False}
    assert loose - OPEN == {"engines"}  # whose entries are engines


def test_schema_and_values_have_the_same_keys():
    """A key that values.yaml does not show is one that nobody finds; `global` belongs to parent charts."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def compare(schema: dict[str, Any], tree: dict[str, Any], path: str) -> None:
        assert set(schema["properties"]) - {"global"} == set(tree), path
        for key, value in tree.items():
            inner = SCHEMA["$defs"]["engine"] if path == "" and key == "engine" else schema["properties"][key]
            if isinstance(value, dict) and "properties" in inner:
                compare(inner, value, f"{path}.{key}")

    compare(SCHEMA, values, "")


def test_schema_has_only_words_that_the_templates_read():
    """Any other would be accepted and not enforced."""
    judging = {*("type", "enum", "pattern", "minLength", "maxLength", "multipleOf", "required", "properties", "items")}
    judging |= {
        *("minItems", "maxItems", "uniqueItems"),
        "minimum",
        "exclusiveMinimum",
        "maximum",
        "additionalProperties",
        "propertyNames",
        "allOf",
        "$ref",
    }
    template = (CHART / "templates" / "_schema.tpl").read_text()

    def words(schema: Any) -> Iterator[str]:
        if isinstance(schema, dict):
            yield from schema.keys() - {"description"}
            for key, inner in schema.items():
                if key in ("properties", "$defs"):
                    for each in inner.values():
                        yield from words(each)
                elif key in ("items", "additionalProperties", "propertyNames"):
                    yield from words(inner)
                elif key == "allOf":
                    for each in inner:
                        yield from words(each)

    assert set(words(SCHEMA)) <= judging | {"$schema", "title", "$defs"}
    assert all(word in template for word in judging)


def test_every_pattern_says_in_words_what_it_wants():
    def patterns(schema: Any) -> Iterator[dict[str, Any]]:
        if isinstance(schema, dict):
            if isinstance(schema.get("pattern"), str):
                yield schema
            for inner in schema.values():
                yield from patterns(inner)

    found = list(patterns(SCHEMA))
    assert len(found) > 20
    assert [schema["pattern"] for schema in found if not schema.get("description")] == []


def test_every_template_begins_with_the_checks():
    """Helm renders files in an order of its own, and each may read values only after they were judged."""
    files = [file for file in (CHART / "templates").rglob("*") if file.suffix in (".yaml", ".txt")]

    assert len(files) > 25
    for file in files:
        assert file.read_text().startswith('{{- include "spillway.requireValid" $ -}}\n'), file


def test_values_files_obey_the_schema():
    complete = yaml.safe_load((CHART / "values.yaml").read_text())
    types = Resource.from_contents(KUBERNETES_TYPES, default_specification=DRAFT202012)
    registry = Registry().with_resource("kubernetes-types.json", types)
    jsonschema.Draft202012Validator(SCHEMA, registry=registry).validate(complete)
    # Helm lays the others over these, so alone they only have to know no unknown key.
    partial = {**SCHEMA, "required": []}
    partial["properties"] = {**SCHEMA["properties"], "engine": {"$ref": "#/$defs/engine"}}
    validator = jsonschema.Draft202012Validator(partial, registry=registry)
    for file in VALUES_FILES[1:]:
        errors = [
            error.message
            for error in validator.iter_errors(yaml.safe_load(file.read_text()))
            if error.validator != "required"
        ]
        assert not errors, file
