"""Common steps of all benches: refuse figures that mean nothing, summarise, write what was measured, and end."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn


class BenchError(Exception):
    """A figure would not measure what its row names."""


def spread_of(key: str, seconds: Sequence[float]) -> dict[str, float]:
    """Median, least and most, as `KEY_seconds`, `KEY_fastest_seconds` and `KEY_slowest_seconds`."""
    found = {"": statistics.median(seconds), "_fastest": min(seconds), "_slowest": max(seconds)}
    return {f"{key}{kind}_seconds": round(value, 4) for kind, value in found.items()}


def write_report(report: Mapping[str, Any], output: Path) -> None:
    """Write the file, and its folder if there is none."""
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"\nwritten to {output}")


def run(main: Callable[[], int | None]) -> NoReturn:
    """End the process with what `main` returns; a BenchError is one line, and status 1."""
    try:
        sys.exit(main())
    except BenchError as error:
        sys.exit(f"{Path(sys.argv[0]).stem}: {error}")
