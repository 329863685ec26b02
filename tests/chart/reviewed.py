"""A render as a golden file has it: what differs from the model's defaults, and no hashes.

A setting that the chart writes with its default into the configuration of a process is none of a golden's business: the
default stands in settings/, and test_every_value.py proves that each value arrives. A new setting of that kind, or
another default, changes no golden; what the defaults make of pods and other objects does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
import yaml
from chart.rendering import Render

from spillway_settings.byte_sizes import parse_byte_count
from spillway_settings.values.release import Values

_FILES = re.compile(r"^  (engine\.yaml|gateway\.yaml|release\.json): \|\n((?:(?:    .*)?\n)+)", re.MULTILINE)
_HASHES = re.compile(r"^( *checksum/config: )[0-9a-f]{64}$", re.MULTILINE)
_DEFAULTS = msgspec.to_builtins(Values())


def reviewed(rendered: Render) -> str:
    """The text for a person to read."""
    return _HASHES.sub(r"\1(a hash)", _FILES.sub(_without_defaults, rendered.effects))


def _without_defaults(block: re.Match[str]) -> str:
    name, text = block.groups()
    given = yaml.safe_load(text)
    if name == "release.json":  # both configurations again, for helm test
        given["gateway"]["settings"] = different(given["gateway"]["settings"], _DEFAULTS["gateway"])
        for model in given["models"]:
            model["settings"] = different(model["settings"], _DEFAULTS["engine"])
    else:
        given = different(given, _DEFAULTS[name.removesuffix(".yaml")])
    found = yaml.dump(given, width=110, allow_unicode=True)
    lines = "".join(f"    {line}\n" for line in found.splitlines())
    return f"  {name}: (as the model has it, but for)\n{lines}" + "\n" * (len(text) - len(text.rstrip("\n")) - 1)


def different(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return `given` without its defaults, and without sections that have nothing else."""
    kept: dict[str, Any] = {}
    for key, value in given.items():
        if isinstance(value, dict) and isinstance(defaults.get(key), dict):
            if inner := different(value, defaults[key]):
                kept[key] = inner
        elif key not in defaults or not _same(value, defaults[key]):
            kept[key] = value
    return kept


def _same(value: Any, default: Any) -> bool:
    if value == default:
        return isinstance(value, bool) == isinstance(default, bool)
    if isinstance(value, int) and isinstance(default, str) and default[:1].isdigit():
        return parse_byte_count(default) == value
    return False
