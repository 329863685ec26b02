"""The table of all settings for the chart's README: default, what is needed, and the sentence of values.yaml."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from spillway_settings.values.schema import Schema

BEGIN = "<!-- All settings: written by make schema. -->"
END = "<!-- End of all settings. -->"
_NEEDED = re.compile(r"(?:^| )Needed: (.*)\.$", re.DOTALL)
_UNITS = {"Seconds": "seconds", "MiB": "MiB", "Percent": "percent", "Tokens": "tokens", "TokensPerSecond": "tokens/s"}
_COLUMNS = "| setting | default | needed | what it does |\n| --- | --- | --- | --- |"


def with_reference(readme: str, schema: Schema) -> str:
    """The README with the current table between its two marks."""
    before, _, rest = readme.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{_tables(schema)}\n\n{END}{rest.partition(END)[2]}"


def _tables(schema: Schema) -> str:
    """One table for each part of the values, and a last one for what has no part."""
    parts, alone = [], []
    for key, setting in (schema["properties"] | {"engine": schema["definitions"]["engine"]}).items():
        if "properties" in setting:
            parts.append("\n".join([f"### `{key}`", "", _COLUMNS, *_rows(setting, "")]))
        elif key != "global":
            alone.append(_row(key, setting))
    return "\n\n".join([*parts, "\n".join(["### Other settings", "", _COLUMNS, *alone])])


def _rows(section: Schema, path: str) -> Iterator[str]:
    for key, setting in section["properties"].items():
        at = f"{path}.{key}" if path else key
        if "properties" in setting:
            yield from _rows(setting, at)
        else:
            yield _row(at, setting)


def _row(path: str, setting: Schema) -> str:
    described = setting.get("description", "")
    needed = _NEEDED.search(described)
    sentence = _NEEDED.sub("", described)
    default = f"`{_yaml(setting['default'])}`" if "default" in setting else ""
    sentence = sentence.replace("<", "&lt;")
    cells = (f"`{path}`", default, needed[1] if needed else _kind(setting, path), sentence)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _kind(setting: Schema, path: str) -> str:
    """`a whole number from 1 to 16`, `auto, on or off`."""
    if "enum" in setting:
        return _listed([_yaml(word) for word in setting["enum"] if not isinstance(word, bool)])
    kinds = [kind for kind in _as_list(setting.get("type", "object")) if kind != "null"]
    or_null = " or null" if "null" in _as_list(setting.get("type", "")) else ""
    if set(kinds) & {"integer", "number"}:
        return f"{_number(setting, kinds)}{_unit(path)}{or_null}"
    names = {"boolean": "true or false", "string": "text", "array": "a list", "object": "a map"}
    reference = next((each["$ref"].rsplit("/", 1)[1] for each in setting.get("allOf", [])), None)
    reference = reference or setting.get("items", {}).get("$ref", "/").rsplit("/", 1)[1]
    of = f" ({reference} of Kubernetes)" if reference else ""
    return _listed([names[kind] for kind in kinds]) + of + or_null


def _number(setting: Schema, kinds: list[str]) -> str:
    noun = "a whole number" if "integer" in kinds else "a number"
    least, most = setting.get("minimum"), setting.get("maximum")
    if "exclusiveMinimum" in setting:
        return f"{noun} above {setting['exclusiveMinimum']:g}" + (f", at most {most:,g}" if most and most < 1e9 else "")
    if least is None:
        return noun
    return f"{noun} from {least:g} to {most:.16g}" if most and most < 1e9 else f"{noun} from {least:g} on"


def _unit(path: str) -> str:
    name = path.rsplit(".", 1)[-1]
    for ending in sorted(_UNITS, key=len, reverse=True):
        if name.endswith(ending):
            return f" ({_UNITS[ending]})"
    return ""


def _listed(words: list[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def _yaml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if not isinstance(value, str) or not value else value


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
