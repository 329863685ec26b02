"""The two closing sentences: what the figures show, and what they do not. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from spillway_stack.demo.phases import Phase
from spillway_stack.demo.report import Row
from spillway_stack.demo.table import duration


def closing_sentences(rows: Sequence[Row], bytes_per_token: int, platform: str) -> list[str]:
    """Two, from the `rows` of a whole demo."""
    by_phase = {row.phase: row for row in rows}
    cold, cpu = by_phase[Phase.COLD.value], by_phase[Phase.CPU_TIER.value]
    shared = sorted(
        (by_phase[phase.value] for phase in (Phase.OTHER_ENGINE, Phase.RESTARTED)), key=lambda row: row.ttft_seconds
    )
    megabytes = cold.prompt_tokens * bytes_per_token / 1e6
    figures = (
        f"A prompt of {cold.prompt_tokens:,} tokens ({megabytes:.0f} MB of KV) that has left the device cache costs "
        f"{duration(cold.ttft_seconds)} to compute again, {duration(cpu.ttft_seconds)} from its engine's CPU tier and "
        f"{duration(shared[0].ttft_seconds)} to {duration(shared[1].ttft_seconds)} from the shared tier, on an engine "
        "that never computed it or was restarted since."
    )
    if platform == "cpu":
        limits = (
            "This shows the path, not the speed: the CPU engine stands in for an NPU, so every copy here is from "
            "host memory to host memory, both engines and the shared tier share one machine, and the model is small."
        )
    else:
        limits = (
            "The engines and the shared tier are on one machine here: over a network, the shared tier costs what the "
            "network costs on top."
        )
    return [figures, limits]
