"""Turns the structs into JSON Schema, draft 7, which Helm, editors and Artifact Hub read.

Any part of the values may be left out, as Helm lays them over the defaults. `null` is valid if it is a default, or
if the installation can do without the setting. Keys that begin with `x-` are the operator's own, for YAML anchors.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

import msgspec
import yaml
from msgspec import inspect as types

from spillway_settings.typed import LARGEST
from spillway_settings.values.comments import comments_by_setting
from spillway_settings.values.engine import Engine
from spillway_settings.values.release import Values

Schema = dict[str, Any]
OWN_KEYS = "^x-"
_LINE_CHARACTERS_MAX = 120
_NAMES = {
    types.StrType: "string",
    types.IntType: "integer",
    types.FloatType: "number",
    types.BoolType: "boolean",
    types.NoneType: "null",
}
_BOUNDS = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
    "multiple_of": "multipleOf",
    "min_length": "minLength",
    "max_length": "maxLength",
    "pattern": "pattern",
}
# Settings with a default that an installation can do without: null removes it.
REMOVABLE = frozenset(
    {
        "engine.cpu.request",
        "engine.offload.numCpuBlocks",
        "gateway.opsPort",
        "gateway.resources.limits.memory",
        "gateway.resources.requests.cpu",
        "redis.cpu.request",
    }
)


def values_schema(values_text: str) -> Schema:
    """The schema of the chart's values.

    Args:
        values_text: values.yaml, whose comments become the descriptions.
    """
    comments = comments_by_setting(values_text)
    kubernetes: Schema = json.loads(resources.files(__package__).joinpath("kubernetes.json").read_text())
    defaults = Values()
    root = _section(Values, "", comments, defaults)
    engine = _section(Engine, "engine", comments, defaults.engine)
    root["properties"]["engine"] = engine
    _put_in_order(root, yaml.safe_load(values_text))
    root["properties"]["engine"] = {"$ref": "#/definitions/engine"}
    root["properties"]["global"] = {"type": "object", "description": "Of a parent chart."}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the Spillway chart",
        **root,
        "definitions": {"engine": engine, **kubernetes},
    }


@functools.cache
def needed_settings() -> dict[str, list[str]]:
    """Section -> the keys that no installation can do without, which Helm's null removes."""
    needed: dict[str, list[str]] = {}

    def add(section: msgspec.Struct, path: str) -> None:
        for field in msgspec.structs.fields(section):
            value, at = getattr(section, field.name), _below(path, field.encode_name)
            if value is not None and at not in REMOVABLE:
                needed.setdefault(path, []).append(field.encode_name)
            if isinstance(value, msgspec.Struct):
                add(value, at)

    add(Values(), "")
    return needed


def written(schema: Any, indent: str = "") -> str:
    """JSON in which everything that fits stands in one line."""
    line = json.dumps(schema)
    if len(indent) + len(line) <= _LINE_CHARACTERS_MAX or not isinstance(schema, dict | list):
        return line
    inner = f"{indent}  "
    if isinstance(schema, list):
        return "[\n" + ",\n".join(inner + written(entry, inner) for entry in schema) + f"\n{indent}]"
    entries = (f"{inner}{json.dumps(key)}: {written(value, inner)}" for key, value in schema.items())
    return "{\n" + ",\n".join(entries) + f"\n{indent}}}"


def _section(
    kind: type[msgspec.Struct], path: str, comments: Mapping[str, str], default: msgspec.Struct | None
) -> Schema:
    node = types.type_info(kind)
    assert isinstance(node, types.StructType)
    properties, required = {}, []
    for field in node.fields:
        at = _below(path, field.encode_name)
        value = getattr(default, field.name, msgspec.UNSET)
        if field.required:
            required.append(field.encode_name)
        properties[field.encode_name] = _setting(field.type, at, comments, value)
    schema: Schema = {"type": "object"}
    if path in comments:
        schema["description"] = comments[path]
    schema |= {"additionalProperties": False, "patternProperties": {OWN_KEYS: {}}, "properties": properties}
    return {**schema, "required": required} if required else schema


def _put_in_order(section: Schema, values: Mapping[str, Any]) -> None:
    """The settings in the order of values.yaml, which is that of its explanations."""
    properties: Schema = section["properties"]
    for key in [*(key for key in values if key in properties), *(key for key in properties if key not in values)]:
        properties[key] = setting = properties.pop(key)
        if "properties" in setting and isinstance(values.get(key), Mapping):
            _put_in_order(setting, values[key])


def _setting(node: types.Type, path: str, comments: Mapping[str, str], default: Any) -> Schema:
    if isinstance(node, types.StructType):
        return _section(node.cls, path, comments, default if isinstance(default, msgspec.Struct) else None)
    schema = {**_kind(node, path, comments)}
    needed = schema.pop("description", "")
    if needed == comments.get(path):  # of a section that may be null, which has it already
        needed = ""
    if path in REMOVABLE and "null" not in schema["type"]:
        schema = _or_null(schema)
    words = [comments.get(path, ""), f"Needed: {needed}." if needed else ""]
    if text := " ".join(word for word in words if word):
        schema = {**schema, "description": text}
    if "$ref" in schema:
        schema["allOf"] = [{"$ref": schema.pop("$ref")}]  # draft 7 reads nothing beside a reference
    if default is not msgspec.UNSET:
        schema["default"] = msgspec.to_builtins(default)
    return schema


def _kind(node: types.Type, path: str, comments: Mapping[str, str]) -> Schema:
    if isinstance(node, types.Metadata):
        further = node.extra_json_schema or {}
        return further if "$ref" in further else {**_kind(node.type, path, comments), **further}
    if isinstance(node, types.StructType):
        return _section(node.cls, path, comments, None)
    if isinstance(node, types.UnionType):
        return _union(node, path, comments)
    if isinstance(node, types.LiteralType):
        return {"enum": list(node.values)}
    if isinstance(node, types.ListType):
        return {"type": "array", "items": _kind(node.item_type, f"{path}[]", comments), **_lengths(node)}
    if isinstance(node, types.DictType):
        if isinstance(node.value_type, types.AnyType):
            return {"type": "object"}
        names = _kind(node.key_type, path, comments)
        values = {"$ref": "#/definitions/engine"} if path == "engines" else _kind(node.value_type, path, comments)
        # Helm 4 names the map of a key that matches no pattern, and not that of a wrong `propertyNames`.
        keys = {"patternProperties": {names["pattern"]: values}, "additionalProperties": False}
        return {"type": "object", **keys, "description": f"keys are each {names['description']}"}
    if isinstance(node, types.AnyType):
        return {}
    bounds = {word: getattr(node, name, None) for name, word in _BOUNDS.items()}
    given = {word: bound for word, bound in bounds.items() if bound not in (None, LARGEST)}
    return {"type": _NAMES[type(node)], **given}


def _union(node: types.UnionType, path: str, comments: Mapping[str, str]) -> Schema:
    """Bounds of a number and the form of a text each judge their own type, so they can stand side by side."""
    members = [_kind(member, path, comments) for member in node.types]
    is_nullable = {"type": "null"} in members
    members = [member for member in members if member != {"type": "null"}]
    [schema, *others] = members
    for other in others:
        schema = {**schema, **other, "type": [schema["type"], other["type"]]}
    if isinstance(schema.get("type"), list) and "enum" in schema:
        del schema["type"]
    return _or_null(schema) if is_nullable else schema


def _or_null(schema: Schema) -> Schema:
    if "$ref" in schema:
        return schema  # a type of Kubernetes that may be null says so itself
    if "enum" in schema:
        return {**schema, "enum": [*schema["enum"], None]}
    given = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return {**schema, "type": [*given, "null"]}


def _lengths(node: types.ListType) -> Schema:
    bounds = {"minItems": node.min_length, "maxItems": node.max_length}
    return {word: bound for word, bound in bounds.items() if bound is not None}


def _below(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
