"""The table on the terminal: a header, a line per phase as it completes, and footnotes. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from spillway_stack.demo.phases import COMPUTED
from spillway_stack.demo.report import DEVICE_REFERENCE, Row

_FORMAT = "{:<33} {:<9} {:<11} {:>7} {:>7} {:>9} {:>8}  {}"


def header() -> str:
    titles = _FORMAT.format("phase", "engine", "served from", "tokens", "cached", "TTFT", "faster", "identical")
    return f"{titles}\n{'-' * len(titles)}"


def line(row: Row) -> str:
    tier = "computed" if row.tier == COMPUTED else row.tier
    return _FORMAT.format(
        row.phase,
        "several" if "," in row.engine else row.engine,
        tier if row.served_as_planned else f"{tier} (!)",
        f"{row.prompt_tokens:,}",
        f"{row.cached_tokens:,}",
        duration(row.ttft_seconds),
        f"{row.ratio_to_recompute:.1f}x",
        _identical(row),
    ).rstrip()


def footnotes(rows: Sequence[Row], documents: int) -> list[str]:
    """Lines below the table: how it was measured, which answers were compared, and every deviation from the plan."""
    lines = [
        f"TTFT: time to the first token, median of {documents} documents; faster: than computing the prompt (cold)."
    ]
    rounding = [row for row in rows if row.reference == DEVICE_REFERENCE]
    if rounding:
        lines.append(
            "identical: token for token, to the cold answer; in rows with * to the device hit of the same length, "
            "because this CPU's kernels round differently in a full and in a partial prefill."
        )
    else:
        lines.append("identical: token for token, every answer to the cold answer about the same document.")
    if any(row.differs_by_rounding for row in rows):
        lines.append("no (rounding): two tokens were about equally likely, and rounding chose the other one.")
    for row in rows:
        lines += [f"(!) {row.phase}: {note}" for note in row.notes]
        if not row.identical and not row.is_proven:
            lines.append(f"(!) {row.phase}: answers differ from {row.reference}: {' | '.join(row.answers)}")
    return lines


def duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def _identical(row: Row) -> str:
    if row.identical:
        return "yes *" if row.reference == DEVICE_REFERENCE else "yes"
    return "no (rounding)" if row.is_proven else "NO"
