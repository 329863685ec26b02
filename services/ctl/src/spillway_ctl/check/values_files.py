"""Values as Helm reads them: several files over each other, then --set and --set-string."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from spillway_ctl.errors import CommandError
from spillway_ctl.named_text import read_named

_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_STEP = re.compile(r"((?:\\.|[^\\.\[\]])+)((?:\[[0-9]+\])*)(?:\.|$)")


class _HelmLoader(yaml.CSafeLoader):
    """YAML as Helm takes it: no dates, no numbers to base 60, exponents without a point, and no key twice."""


_HelmLoader.yaml_implicit_resolvers = {
    letter: [(tag, form) for tag, form in resolvers if not tag.endswith((":timestamp", ":int", ":float", ":bool"))]
    for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_HelmLoader.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"[-+]?(0|[1-9][0-9_]*|0o?[0-7_]+|0b[01]+|0x[0-9a-fA-F]+)$"),
    list("-+0123456789"),
)
_HelmLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE])|0[0-9]*[89][0-9]*)([eE][-+]?[0-9]+)?$|[-+]?\.inf$|\.nan$"
    ),
    list("-+.0123456789"),
)
_TRUE, _FALSE = ("y", "yes", "true", "on"), ("n", "no", "false", "off")
_HelmLoader.add_implicit_resolver(
    "tag:yaml.org,2002:bool",
    re.compile(f"({'|'.join(form for word in _TRUE + _FALSE for form in (word, word.title(), word.upper()))})$"),
    list("yYnNtTfFoO"),
)


def _bool(loader: _HelmLoader, node: yaml.ScalarNode) -> bool:
    return loader.construct_scalar(node).lower() in _TRUE


def _mapping(loader: _HelmLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen = set()
    for key_node, _ in node.value:
        if key_node.value in seen:
            line = key_node.start_mark.line + 1
            raise CommandError(f"{key_node.value}: given twice (line {line}); keep one of the two")
        seen.add(key_node.value)
    loader.flatten_mapping(node)
    keys_and_values = [(loader.construct_object(key, deep=True), value) for key, value in node.value]
    return {_text(key): loader.construct_object(value, deep=True) for key, value in keys_and_values}


def _text(key: Any) -> str:
    """Helm makes JSON of YAML, whose keys are text."""
    return key if isinstance(key, str) else json.dumps(key)


_HelmLoader.add_constructor("tag:yaml.org,2002:map", _mapping)
_HelmLoader.add_constructor("tag:yaml.org,2002:bool", _bool)


def read_values(text: str, name: str) -> dict[str, Any]:
    """The values of one file. Raises CommandError."""
    try:
        found = yaml.load(text, Loader=_HelmLoader)  # noqa: S506 - a safe loader
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or error
        remedy = "indent with blanks, as YAML takes no tabs" if "\t" in text else "correct it"
        raise CommandError(f"{name}{where}: no YAML ({problem}); {remedy}") from error
    except CommandError as error:
        raise CommandError(f"{name}: {error}") from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        given = "a list" if isinstance(found, list) else "text alone"
        raise CommandError(f"{name}: {given} given, a map of settings needed; write KEY: VALUE")
    return found


def merged_values(files: Sequence[Path | str], sets: Iterable[tuple[str, bool]]) -> dict[str, Any]:
    """Return the values that the files and settings give together.

    Args:
        files: paths, of which the last one wins; `-` is standard input.
        sets: each `KEY=VALUE` of --set with False, and of --set-string with True, in the order given.

    Raises:
        CommandError: a file that cannot be read, is no YAML or gives a key twice; a setting that cannot be read.
    """
    values: dict[str, Any] = {}
    for file in files:
        values = laid_over(values, read_values(read_named(file), str(file)))
    for assignment, is_text in sets:
        for one in _split(assignment, ","):
            _set(values, one, is_text)
    return values


def laid_over(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of `over` win and maps are merged; a null stays, as it removes a default later."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = laid_over(merged[key], value) if both else copy.deepcopy(value)
    return merged


def _set(values: dict[str, Any], assignment: str, is_text: bool) -> None:
    key, equals, text = _partition(assignment)
    if not equals or not key:
        raise CommandError(
            f"--set {key or assignment}: no value given; write KEY=VALUE, and \\, for a comma in a value"
        )
    here: Any = values
    steps = list(_steps(key))
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        value: Any = _value(text, is_text) if following is None else ([] if isinstance(following, int) else {})
        if isinstance(step, int):
            here.extend([None] * (step + 1 - len(here)))
        elif not isinstance(here, dict):
            raise CommandError(
                f"--set {key}: {step} lies below a value that is no map; escape the dots of a key by \\."
            )
        kept = here[step] if isinstance(step, int) else here.get(step)
        if following is None or not isinstance(kept, type(value)):
            here[step] = value
        here = here[step]


def _partition(assignment: str) -> tuple[str, str, str]:
    found = re.match(r"((?:\\.|[^\\=])*)(=?)(.*)$", assignment, re.DOTALL)
    return (found[1], found[2], found[3]) if found else (assignment, "", "")


def _steps(key: str) -> Iterable[str | int]:
    at = 0
    while at < len(key):
        found = _STEP.match(key, at)
        if found is None:
            raise CommandError(f"--set {key}: no path of a setting; write a.b.c, a[0].b, and \\. for a dot in a key")
        yield re.sub(r"\\(.)", r"\1", found[1])
        yield from (int(index) for index in re.findall(r"[0-9]+", found[2]))
        at = found.end()


def _value(text: str, is_text: bool) -> Any:
    if text.startswith("{") and text.endswith("}"):
        return [_value(item.strip(), is_text) for item in _split(text[1:-1], ",")] if text[1:-1] else []
    plain = re.sub(r"\\(.)", r"\1", text)
    if is_text:
        return plain
    if text in ("true", "false", "null"):
        return json.loads(text)
    return int(text) if _INTEGER.fullmatch(text) else plain


def _split(text: str, separator: str) -> list[str]:
    """Parts between separators, of which those in braces and those with a backslash before them are none."""
    parts, depth, start, at = [], 0, 0, 0
    while at < len(text):
        if text[at] == "\\":
            at += 1
        elif text[at] in "{}":
            depth += 1 if text[at] == "{" else -1
        elif text[at] == separator and depth == 0:
            parts.append(text[start:at])
            start = at + 1
        at += 1
    return [*parts, text[start:]]
