"""The form of values, by the chart's values.schema.json: keys, types, words and bounds, in sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from spillway_ctl.check.chart_facts import schema
from spillway_ctl.check.finding import Finding, number, quoted, shown
from spillway_ctl.check.unknown_key import unknown_key

if TYPE_CHECKING:
    from jsonschema import Draft7Validator, ValidationError

_OWN_KEY = re.compile("^x-")
_NEEDED = re.compile(r"Needed: (.*)\.$")
_NOUNS = {
    "array": "a list",
    "boolean": "true or false",
    "integer": "a whole number",
    "null": "null",
    "number": "a number",
    "object": "a map",
    "string": "text",
}
_PRESETS = {"nvidia": "cuda", "gpu": "cuda", "ascend": "mindcluster", "npu": "mindcluster", "none": "cpu"}


def shape_findings(values: Mapping[str, Any]) -> list[Finding]:
    """Everything in the values as they were given that the schema refuses; nothing twice."""
    found = [finding for error in _validator().iter_errors(values) for finding in _findings(error, values)]
    return list(dict.fromkeys(found))


@cache
def _validator() -> Draft7Validator:
    from jsonschema import Draft7Validator  # noqa: PLC0415 - its import takes longer than most commands

    return Draft7Validator(schema())


def _findings(error: ValidationError, values: Mapping[str, Any]) -> Iterator[Finding]:
    path = _path(error)
    if (nameless := _nameless_group(error, values)) is not None:
        yield nameless
        return
    where = path or "the values"
    if error.validator in ("anyOf", "oneOf") and error.context:
        nearest = max(error.context, key=lambda inner: len(inner.absolute_path))
        yield from _findings(nearest, values)
    elif error.validator == "additionalProperties":
        known = error.schema.get("properties", {})
        forms = error.schema.get("patternProperties", {})
        for key in error.instance:
            if key not in known and not any(re.search(form, key) for form in forms):
                yield unknown_key(path, key, error.instance[key], error.schema)
    elif error.validator == "required":
        [missing] = [key for key in error.validator_value if f"'{key}' " in error.message] or [error.message]
        yield Finding(where, f"{missing} is missing", f"add {missing}")
    elif error.validator == "uniqueItems":
        yield Finding(where, "one entry is there twice", "remove one")
    else:
        given = _given(error.instance, path)
        yield Finding(where, f"{given} given, {needed(error.schema, error.instance)} needed", _remedy(error, path))


def _nameless_group(error: ValidationError, values: Mapping[str, Any]) -> Finding | None:
    """A setting where the name of a group belongs: `engines: {replicas: 2}`."""
    steps = list(error.absolute_path)
    settings = schema()["definitions"]["engine"]["properties"]
    if len(steps) < 2 or steps[0] != "engines" or steps[1] not in settings:
        return None
    key = steps[1]
    group = values["engines"][key]
    if isinstance(group, Mapping) and any(inner in settings for inner in group):
        return None
    return Finding(
        f"engines.{key}",
        f"{key} is a setting of a group of engines, and the name of the group is missing",
        f"write engines: {{NAME: {{{key}: ...}}}}, or engine.{key} for all groups",
    )


def _path(error: ValidationError) -> str:
    path = ""
    for step in error.absolute_path:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else str(step)
    return path


def _given(value: Any, path: str) -> str:
    if isinstance(value, str) and value != value.strip():
        return f"text of {len(value)} characters with a blank or a line break at its end"
    return str(value) if isinstance(value, float) else shown(value, path)


def needed(node: Mapping[str, Any], instance: Any = None) -> str:
    """What a setting takes, in words."""
    if described := _NEEDED.search(node.get("description", "")):
        words = described[1]
        return f"a map whose {words}" if words.startswith("keys are each ") else words
    if "default" not in node and "pattern" in node and node.get("description"):  # an entry of a map or a list
        return str(node["description"])
    if "$ref" in node:
        return needed(schema()["definitions"][node["$ref"].rsplit("/", 1)[1]], instance)
    if "enum" in node:
        words = list(dict.fromkeys(quoted(word) if word == "" else number(word) for word in node["enum"]))
        return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
    kinds = [node["type"]] if isinstance(node.get("type"), str) else list(node.get("type", []))
    texts = [_bounded(kind, node) for kind in kinds]
    if not texts:
        return "another value"
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"


def _bounded(kind: str, node: Mapping[str, Any]) -> str:
    noun = _NOUNS[kind]
    if kind == "object" and (keys := node.get("description", "").partition("keys are each ")[2]):
        return f"a map whose keys are each {keys}"
    if kind in ("integer", "number"):
        low, high = node.get("minimum"), node.get("maximum")
        if "multipleOf" in node:
            noun = f"a multiple of {number(node['multipleOf'])}"
        if "exclusiveMinimum" in node:
            noun += f" above {number(node['exclusiveMinimum'])}"
        if low is not None and high is not None:
            return f"{noun} from {number(low)} to {number(high)}"
        if high is not None:
            return f"{noun}, at most {number(high)}"
        return noun if low is None else f"{noun} of at least {number(low)}"
    if kind == "string":
        if "pattern" in node:
            return f"text of the form {node['pattern']}"
        if "maxLength" in node:
            return f"text of at most {node['maxLength']} characters"
        return "some text" if node.get("minLength") else noun
    if kind == "array" and "maxItems" in node:
        return f"{noun} of at most {node['maxItems']}"
    return noun


def _remedy(error: ValidationError, path: str) -> str:
    value, node = error.instance, error.schema
    kinds = [node["type"]] if isinstance(node.get("type"), str) else list(node.get("type", []))
    if error.validator == "type":
        if value is None:
            return "remove the line, and its default holds"
        if isinstance(value, bool) and "string" in kinds:
            word = "none" if path.endswith(".tokenizer") else "the word in quotes"
            return f"write {word}: YAML reads a bare on, off, yes or no as true or false"
        if isinstance(value, int | float) and "string" in kinds:
            return "write it in quotes as you mean it: YAML reads 1.10 as the number 1.1"
        if isinstance(value, dict) and "string" in kinds and path:
            return "write text; with --set, escape the dots of a key: kubernetes\\.io/arch=arm64"
        if isinstance(value, list) and "string" in kinds:
            return "write one text" + (", and further names as model.aliases" if path.endswith("servedName") else "")
        if isinstance(value, str) and {"integer", "number"} & set(kinds):
            return "write the number alone, without quotes or a unit"
        if "object" in kinds:
            return f"write a map: {_example(path, node)}"
        if "array" in kinds:
            return "write a list: [...]"
    if error.validator == "enum" and isinstance(value, str):
        if path.endswith("accelerator.preset") and value.lower() in _PRESETS:
            return f"set it to {_PRESETS[value.lower()]}"
        for word in node["enum"]:
            if isinstance(word, str) and word.lower() == value.lower():
                return f"write {word}"
    if isinstance(value, str) and value != value.strip():
        return "remove the blank or the line break"
    return "correct it"


def _example(path: str, node: Mapping[str, Any]) -> str:
    keys = [key for key in node.get("properties", {}) if not _OWN_KEY.match(key)]
    key = "enabled" if "enabled" in keys else keys[0] if keys else "key"
    return f"{path.rsplit('.', 1)[-1]}: {{{key}: ...}}"
