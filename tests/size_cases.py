"""The table of sizes, size_cases.yaml: each as a person may write it, with its bytes or the reason of its refusal."""

from __future__ import annotations

from pathlib import Path

import yaml

_TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
BYTES: dict[str | int | float, int] = _TABLE["bytes"]
REFUSED: dict[str | int | float, str] = _TABLE["refused"]
