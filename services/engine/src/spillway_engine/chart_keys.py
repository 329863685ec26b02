"""Settings under the chart's camelCase keys, those that the connector declares under its own keys included."""

from __future__ import annotations

from typing import Any

import msgspec

from spillway_settings.keys import Section, keyed
from spillway_settings.typed import settings_json

_CHART_KEYS = {"cpu_bytes_to_use": "cpuBytes"}  # vLLM gave the field its name


def camel_case(name: str) -> str:
    """`num_cpu_blocks` -> `numCpuBlocks`."""
    head, *tail = name.split("_")
    return head + "".join(part.capitalize() for part in tail)


def chart_key(field: str) -> str:
    """`cpu_bytes_to_use` -> `cpuBytes`: what a field of the connector is called in the chart."""
    return _CHART_KEYS.get(field, camel_case(field))


def camel_case_keys(section: type[Section]) -> type[Section]:
    """A class decorator: the same fields, inherited ones included, under camelCase keys; no other key is accepted."""
    return keyed(section, chart_key)


def settings_tree(settings: msgspec.Struct) -> dict[str, Any]:
    """The inverse of `read_settings`: camelCase keys, plain values, fit for YAML and JSON."""
    tree: dict[str, Any] = msgspec.json.decode(settings_json(settings))
    return tree
