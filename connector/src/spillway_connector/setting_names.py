"""Translates a setting's path into the name under which a person set it, so that a message names what its reader can
change.

An engine is configured in one of three places: a YAML file with `--set`, whose keys are the paths of the settings; the
chart, where the same key is one of values.yaml; `make up`, where it is an environment variable.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class SettingNames(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The default: every setting is called by its path, as in the YAML file and `--set`."""

    names: dict[str, str] = msgspec.field(default_factory=dict)  # path -> name, for all that `others` does not name
    others: str = "{path}"  # e.g. `engine.{path}` in the chart
    separator: Literal[": ", "="] = ": "  # between name and value

    def name(self, path: str) -> str:
        """`offload.numCpuBlocks` -> `engine.offload.numCpuBlocks`, `NUM_CPU_BLOCKS`; an item `extraArgs[0]` too."""
        key, bracket, index = path.partition("[")
        return self.names.get(key, self.others.replace("{path}", key)) + bracket + index

    def given(self, path: str, value: object) -> str:
        """The setting with a value, as a person writes it: `model.dtype: float32`, `DTYPE=float32`."""
        text = _word(value, "on" if self.separator == "=" else "true", "off" if self.separator == "=" else "false")
        return f"{self.name(path)}{self.separator}{text}"


PLAIN_NAMES = SettingNames()


def _word(value: object, true: str, false: str) -> str:
    if isinstance(value, bool):
        return true if value else false
    return str(value)
