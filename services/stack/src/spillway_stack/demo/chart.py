"""The rows as a bar chart: one bar per phase, labelled with seconds and ratio."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter

from spillway_stack.demo.phases import COMPUTED, CPU, DEVICE
from spillway_stack.demo.report import Row
from spillway_stack.demo.table import duration
from spillway_stack.state_folder import replacing

# The axis starts at zero; it is logarithmic only if short bars would vanish beside the cold one.
LOG_SCALE_FROM_RATIO = 200.0
WIDTH_INCHES, ROW_INCHES, TOP_INCHES, BOTTOM_INCHES = 10.0, 0.55, 0.95, 0.65
_COLOURS = {COMPUTED: "#6b7280", DEVICE: "#0f766e", CPU: "#2563eb"}
_SHARED_COLOUR = "#d97706"
_NOT_PLANNED_COLOUR = "#b91c1c"


def draw_chart(rows: Sequence[Row], subtitle: str, path: Path) -> None:
    """Write a PNG, atomically."""
    mpl.rcParams["font.family"] = "DejaVu Sans"  # ships with matplotlib, so the picture is the same everywhere
    height = TOP_INCHES + ROW_INCHES * len(rows) + BOTTOM_INCHES
    figure = Figure(figsize=(WIDTH_INCHES, height), dpi=150)
    axes = figure.add_subplot()
    figure.subplots_adjust(left=0.25, right=0.975, top=1 - TOP_INCHES / height, bottom=BOTTOM_INCHES / height)
    figure.text(
        0.02, 1 - 0.30 / height, "The same prompt, served from each tier", fontsize=14, weight="bold", va="center"
    )
    figure.text(0.02, 1 - 0.62 / height, subtitle, fontsize=9.5, color="#4b5563", va="center")
    seconds = [row.ttft_seconds for row in rows]
    axes.barh(range(len(rows)), seconds, height=0.62, color=[_colour(row) for row in rows])
    for position, row in enumerate(rows):
        axes.annotate(
            _label(row),
            (row.ttft_seconds, position),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=10,
        )
    axes.set_yticks(range(len(rows)), [f"{row.phase}\n{row.engine}" for row in rows], fontsize=9.5)
    axes.invert_yaxis()
    _scale(axes, seconds)
    axes.set_xlabel("time to first token, seconds (median)")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        figure.savefig(partial, format="png")


def _scale(axes: Axes, seconds: Sequence[float]) -> None:
    """Return the scale, with room for a label behind the longest bar."""
    longest, shortest = max(seconds), min(seconds)
    if longest / shortest >= LOG_SCALE_FROM_RATIO:
        axes.set_xscale("log")
        axes.set_xlim(shortest / 2, longest * (longest / shortest) ** 0.4)
        axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
    else:
        axes.set_xlim(0, longest * 1.25)


def _label(row: Row) -> str:
    if row.tier == COMPUTED and row.served_as_planned:
        return f"{duration(row.ttft_seconds)}   computed"
    source = f"from {row.tier}" if row.served_as_planned else f"from {row.tier}, not as planned"
    return f"{duration(row.ttft_seconds)}   {row.ratio_to_recompute:.1f}x faster, {source}"


def _colour(row: Row) -> str:
    return _COLOURS.get(row.tier, _SHARED_COLOUR) if row.served_as_planned else _NOT_PLANNED_COLOUR
