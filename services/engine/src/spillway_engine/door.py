"""What a setting is called where a person set it, so that a message names what its reader can change.

One engine is started through one of three doors: a YAML file with `--set`, whose keys are the settings' own paths; the
chart, where the same key is one of values.yaml; `make up`, where it is an environment variable. The chart and the local
stack write their door into the engine's configuration under `door:`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Door:
    """The default is the YAML file and `--set`: every setting is called by its path."""

    names: dict[str, str] = field(default_factory=dict)  # path -> its name at this door, where `others` is not it
    others: str = "{path}"  # the name of all other settings, e.g. `engine.{path}` of the chart
    separator: Literal[": ", "="] = ": "  # between name and value

    def name(self, path: str) -> str:
        """`offload.numCpuBlocks` -> `engine.offload.numCpuBlocks`, `NUM_CPU_BLOCKS`; an item `extraArgs[0]` too."""
        key, bracket, index = path.partition("[")
        return self.names.get(key, self.others.replace("{path}", key)) + bracket + index

    def given(self, path: str, value: object) -> str:
        """The setting with a value, as it is written at this door: `model.dtype: float32`, `DTYPE=float32`."""
        text = _word(value, "on" if self.separator == "=" else "true", "off" if self.separator == "=" else "false")
        return f"{self.name(path)}{self.separator}{text}"


FILE = Door()


def _word(value: object, true: str, false: str) -> str:
    if isinstance(value, bool):
        return true if value else false
    return str(value)
