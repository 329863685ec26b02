"""`python -m spillway_settings.values charts/spillway`: writes what the chart has of the model."""

from __future__ import annotations

import argparse
from pathlib import Path

from spillway_settings.shared_names import shared_names
from spillway_settings.values.completion import with_missing_settings
from spillway_settings.values.reference import with_reference
from spillway_settings.values.schema import needed_settings, values_schema, written


def generated(chart: Path) -> dict[str, str]:
    """File of the chart -> its text."""
    values = with_missing_settings((chart / "values.yaml").read_text())
    schema = values_schema(values)
    return {
        "values.yaml": values,
        "values.schema.json": written(schema) + "\n",
        "files/shared-names.json": written(shared_names()) + "\n",
        "files/needed-settings.json": written(needed_settings()) + "\n",
        "README.md": with_reference((chart / "README.md").read_text(), schema),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes what the chart has of the model.")
    parser.add_argument("chart", nargs="?", type=Path, default=Path("charts/spillway"), help="its folder")
    chart: Path = parser.parse_args().chart
    if not (chart / "values.yaml").is_file():
        parser.error(f"{chart} holds no values.yaml; give the folder of the chart")
    for name, text in generated(chart).items():
        Path(chart, name).write_text(text)


if __name__ == "__main__":
    main()
