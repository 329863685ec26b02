"""The form of values, by the chart's values.schema.json: keys, types, words and bounds, in sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from spillway_ctl.check.chart_facts import schema
from spillway_ctl.check.finding import Finding, foreign_letter, number, quoted, shown
from spillway_ctl.check.unknown_key import unknown_key

if TYPE_CHECKING:
    from jsonschema import Draft7Validator, ValidationError

_OWN_KEY = re.compile("^x-")
# Texts that other programs read, in which a line break has a meaning.
_FREE_TEXT = re.compile(
    r"[aA]nnotations$|\.(extraEnv|extraConfig|extraTiers|selfCheckText)$|^extraObjects$|^global$"
    r"|\.(extraEnvVars|env)\[\d+\]\.value$|\.(initContainers|sidecars)\[\d+\]\..*\b(command|args)$"
)
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
_PRESETS = {
    **dict.fromkeys(("nvidia", "gpu", "a100", "h100", "h200"), "cuda"),
    **dict.fromkeys(("ascend", "npu", "910b", "910c"), "mindcluster"),
    "none": "cpu",
}
# Other names for the words of a setting.
_SYNONYMS = {
    **dict.fromkeys(("half", "fp16", "f16"), "float16"),
    **dict.fromkeys(("bf16", "bfloat"), "bfloat16"),
    **dict.fromkeys(("fp32", "f32", "single"), "float32"),
    **dict.fromkeys(("pvc", "persistentvolumeclaim", "claim"), "existingClaim"),
    **dict.fromkeys(("s3", "disk", "ssd", "file", "filesystem"), "nvme"),
    "valkey": "redis",
    "k8s": "kubernetes",
    "host": "hostPath",
}
_WORDS = {**dict.fromkeys(("true", "yes", "on", "1"), "true"), **dict.fromkeys(("false", "no", "off", "0"), "false")}


def shape_findings(values: Mapping[str, Any]) -> list[Finding]:
    """Everything in the values as they were given that the schema refuses; nothing twice."""
    breaks = {finding.setting: finding for finding in _line_breaks(values, "")}
    found = [finding for error in _validator().iter_errors(values) for finding in _findings(error, values)]
    return list(dict.fromkeys([*breaks.values(), *(each for each in found if each.setting not in breaks)]))


def _line_breaks(value: Any, path: str) -> Iterator[Finding]:
    """A text or key that ends or begins with a line break: no setting means it, and few readers take it away."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            at = f"{path}.{key}" if path else str(key)
            if str(key).strip("\r\n") != str(key):
                yield _line_break(path or "the values", f"the key {str(key).strip()!r}")
            elif not _OWN_KEY.match(str(key)) and not _FREE_TEXT.search(at):
                yield from _line_breaks(entry, at)
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            at = f"{path}[{index}]"
            if not _FREE_TEXT.search(at):
                yield from _line_breaks(entry, at)
    elif isinstance(value, str) and value.strip("\r\n") != value and not value.rstrip().endswith(("}", "]")):
        yield _line_break(path, f"text of {len(value)} characters")


def _line_break(path: str, what: str) -> Finding:
    return Finding(
        path,
        f"{what} given with a blank or a line break at its end, text without one needed",
        "remove the line break; a block that begins with |- or >- has none",
    )


@cache
def _validator() -> Draft7Validator:
    from jsonschema import Draft7Validator, ValidationError, validators  # noqa: PLC0415 - longer than most commands

    def pattern(_: Any, form: str, instance: Any, __: Any) -> Iterator[ValidationError]:
        if isinstance(instance, str) and not _matches(form, instance):
            yield ValidationError(f"{instance!r} does not match {form!r}")

    return validators.extend(Draft7Validator, {"pattern": pattern})(schema())


def _matches(form: str, text: str) -> bool:
    """Helm's `$` is at the end of a text. Python's is before a last line break too: here, before one more."""
    return re.search(form, f"{text}\n" if text.endswith("\n") else text) is not None


def _findings(error: ValidationError, values: Mapping[str, Any]) -> Iterator[Finding]:
    path = _path(error)
    if (nameless := _nameless_group(error, values)) is not None:
        yield nameless
        return
    where = path or "the values"
    if (
        error.validator == "oneOf"
        and isinstance(error.instance, Mapping)
        and (names := _alternatives(error.validator_value))
    ):
        several = [name for name in names if error.instance.get(name) is not None]
        yield Finding(
            where,
            f"{' and '.join(several) or 'none of them'} given, exactly one of {', '.join(names)} needed",
            "keep one" if several else "add one",
        )
    elif error.validator == "oneOf" and not isinstance(error.instance, Mapping):
        return  # its type is said already
    elif error.validator in ("anyOf", "oneOf") and error.context:
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
        given = _given(error.instance, "" if "enum" in error.schema else path)
        yield Finding(where, f"{given} given, {needed(error.schema, error.instance)} needed", _remedy(error, path))


def _alternatives(forms: list[Mapping[str, Any]]) -> list[str]:
    """The fields of a type of Kubernetes of which it takes exactly one."""
    return [each["required"][0] for each in forms if each.keys() == {"required"}]


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
    """Return the values that a setting accepts, in words."""
    if described := _NEEDED.search(node.get("description", "")):
        words = described[1]
        return f"a map whose {words}" if words.startswith("keys are each ") else words
    if "default" not in node and "pattern" in node and node.get("description"):  # an entry of a map or a list
        return str(node["description"])
    if "$ref" in node:
        return needed(schema()["definitions"][node["$ref"].rsplit("/", 1)[1]], instance)
    if "enum" in node:
        # A bare on or off is a boolean in YAML, and is taken for the word.
        said = [word for word in node["enum"] if not (isinstance(word, bool) and "off" in node["enum"])]
        words = list(dict.fromkeys(quoted(word) if word == "" else number(word) for word in said))
        return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
    kinds = [node["type"]] if isinstance(node.get("type"), str) else list(node.get("type", []))
    texts = [_bounded(kind, node, instance) for kind in kinds]
    if not texts:
        return "another value"
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"


def _bounded(kind: str, node: Mapping[str, Any], instance: Any) -> str:
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
    if kind == "array" and isinstance(instance, list) and len(instance) < node.get("minItems", 0):
        return f"{noun} of at least {node['minItems']}"
    if kind == "array" and "maxItems" in node:
        return f"{noun} of at most {node['maxItems']}"
    return noun


def _remedy(error: ValidationError, path: str) -> str:
    value, node = error.instance, error.schema
    kinds = [node["type"]] if isinstance(node.get("type"), str) else list(node.get("type", []))
    if error.validator == "type":
        if value is None and path.endswith("]"):
            return "remove the entry; with --set, a list begins at [0]"
        if value is None and path.startswith("engines."):
            return "remove the line, or write {} for a group that differs in nothing"
        if value is None:
            return "remove the line, and its default holds"
        if isinstance(value, bool) and "string" in kinds:
            word = "none" if path.endswith(".tokenizer") else "the word in quotes"
            return f"write {word}: YAML reads a bare on, off, yes or no as true or false"
        if isinstance(value, int | float) and "string" in kinds:
            return "write it in quotes as you mean it: YAML reads 1.10 as the number 1.1, and 0123 as 83"
        if isinstance(value, dict) and "string" in kinds and path:
            return "write text; with --set, escape the dots of a key: kubernetes\\.io/arch=arm64"
        if isinstance(value, list) and "string" in kinds:
            return "write one text" + (", and further names as model.aliases" if path.endswith("servedName") else "")
        if isinstance(value, str) and {"integer", "number"} & set(kinds):
            return "write the number alone, without quotes or a unit"
        if isinstance(value, str | int) and kinds == ["boolean"] and str(value).lower() in _WORDS:
            return f"write {_WORDS[str(value).lower()]}, without quotes"
        if "object" in kinds:
            return f"write a map: {_example(path, node)}"
        if "array" in kinds:
            keys = node.get("items", {}).get("required") or [*node.get("items", {}).get("properties", {})][:1]
            entry = f"{{{keys[0]}: ...}}" if keys else "..."
            return f"write a list: [{entry}]"
    if error.validator == "enum" and isinstance(value, str):
        if path.endswith("accelerator.preset") and value.lower() in _PRESETS:
            return f"set it to {_PRESETS[value.lower()]}"
        if (meant := _SYNONYMS.get(value.lower(), "")) and meant in node["enum"]:
            return f"write {meant}"
        for word in node["enum"]:
            if (
                isinstance(word, str)
                and value == value.strip()
                and _plain(value)
                and (_plain(word) == _plain(value) or word.startswith(value.lower()))
            ):
                return f"write {word}"
        if value.lower() in _WORDS and "on" in node["enum"]:
            return f"write {'on' if _WORDS[value.lower()] == 'true' else 'off'}"
        if value.lower() in _WORDS and _WORDS[value.lower()] in map(number, node["enum"]):
            return f"write {_WORDS[value.lower()]}, without quotes"
        if value == value.strip() and value.isascii():
            return "write one of these"
    if isinstance(value, str) and value != value.strip():
        return "remove the blank or the line break"
    if isinstance(value, str) and (letter := foreign_letter(value)):
        return f"type it again: {letter} is in it"
    if path.endswith(".repository") and isinstance(value, str) and (tagged := re.fullmatch("(.+):([^:/@]+)", value)):
        return f"write {tagged[1]}, and {quoted(tagged[2])} as tag"
    if (
        error.validator == "pattern"
        and (form := _meant(value, error.validator_value, path))
        and "text of" not in _given(value, path)
    ):
        return f"write {form}"
    return "correct it"


def _plain(word: str) -> str:
    return re.sub("[^a-z0-9]", "", word.lower())


def _meant(text: str, form: str, path: str) -> str | None:
    """The text without a scheme, capitals, a path or a unit, if that is of the form."""
    bare = re.sub(r"^[a-z]+://", "", text)
    host = re.sub(":[0-9]+$", "", bare.split("/", maxsplit=1)[0])
    is_plain = not re.search(r"[/:*]", text)
    candidates = (
        bare,
        *([] if path.endswith(".file") else [bare.rstrip("/.")]),
        bare.lower(),
        *([bare.upper()] if path.startswith("gateway.cors.methods") else []),
        bare.removeprefix("CAP_"),
        *([host, host.lower()] if "." in host else []),
        *([re.sub("[^a-z0-9.-]", "-", text.lower()), re.sub("[^a-z0-9-]", "-", text.lower())] if is_plain else []),
        *re.findall(r"^([0-9.]+[KMGTPE]i?)[bB]$", text),  # a quantity of Kubernetes has no B
        *re.findall(r"^([0-9.]+) [a-z]+$", text),
    )
    return next((each for each in candidates if each and each != text and _matches(form, each)), None)


def _example(path: str, node: Mapping[str, Any]) -> str:
    keys = [key for key in node.get("properties", {}) if not _OWN_KEY.match(key)]
    key = next((each for each in ("enabled", "name", "model", *keys) if each in keys), "key")
    return f"{path.rsplit('.', 1)[-1]}: {{{key}: ...}}"
