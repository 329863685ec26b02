"""`python -m spillway_settings.values charts/spillway`: writes what the chart has of the model."""

from __future__ import annotations

import sys
from pathlib import Path

from spillway_settings.values.schema import needed_settings, values_schema, written


def generated(values_text: str) -> dict[str, str]:
    """File of the chart -> its text."""
    return {
        "values.schema.json": written(values_schema(values_text)) + "\n",
        "files/needed-settings.json": written(needed_settings()) + "\n",
    }


def main() -> None:
    [chart] = sys.argv[1:] or ["charts/spillway"]
    for name, text in generated(Path(chart, "values.yaml").read_text()).items():
        Path(chart, name).write_text(text)


if __name__ == "__main__":
    main()
