"""`python -m spillway_stack demo`: find the stack, run the phases, write a table, a report and a chart."""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Sequence
from pathlib import Path

from spillway_stack.demo.chart import draw_chart
from spillway_stack.demo.console import Console
from spillway_stack.demo.phases import Phase
from spillway_stack.demo.report import Row, write_report
from spillway_stack.demo.run import Demo
from spillway_stack.demo.running_stack import RunningStack, find_stack
from spillway_stack.demo.sizing import DOCUMENTS
from spillway_stack.demo.table import duration, footnotes, header, line
from spillway_stack.errors import StackError

REPORT_NAME, CHART_NAME = "report.json", "ttft.png"


def closing_sentences(rows: Sequence[Row], bytes_per_token: int, platform: str) -> list[str]:
    """Return two sentences about the `rows` of a whole demo."""
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo. Returns 0 if every phase was served from its tier with identical answers, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m spillway_stack demo", description="Measure what each tier saves on the running stack."
    )
    parser.add_argument("--state-dir", type=Path, default=Path(".run"), help="of the running stack (default .run)")
    parser.add_argument("--output", type=Path, default=Path("build/demo"), help="folder (default build/demo)")
    parser.add_argument("--edition", default="", help="stands in each document's first line (default: the time)")
    parser.add_argument(
        "--longest", action="store_true", help="the longest documents that fit, however slow this machine computes them"
    )
    given = parser.parse_args(arguments)
    try:
        return _run(find_stack(given.state_dir), given.output, given.edition or _now(), longest=given.longest)
    except StackError as error:
        print(f"spillway: {error}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        print("\nspillway: interrupted; no report was written, the stack keeps running", file=sys.stderr, flush=True)
        return 130


def _run(running: RunningStack, output: Path, edition: str, *, longest: bool) -> int:
    console = Console()
    demo = Demo(running, edition, console, on_row=lambda row: _show(console, row))
    engines = len(running.stack.engines)
    console.write_line(
        f"{running.model} in {running.dtype} on {engines} {running.platform} engines, "
        f"shared tier: {running.shared_tier}\n"
    )
    demo.prepare(longest=longest)
    console.write_line(
        f"prefill runs at {demo.prefill_tokens_per_second:,.0f} tokens/s; "
        f"each of {DOCUMENTS} documents has {demo.document_tokens:,} tokens:"
    )
    for book in demo.books:
        console.write_line(f"  {book.title}")
    console.write_line()
    if console.is_terminal:
        console.write_line(header())
    demo.run()
    if not console.is_terminal:
        # Without a terminal progress lines stand between the rows, so all rows are repeated here.
        console.write_line("\n".join(["", header(), *map(line, demo.rows)]))
    _write_conclusion(console, demo, running)
    write_report(demo.rows, output / REPORT_NAME)
    subtitle = (
        f"{demo.rows[0].prompt_tokens:,}-token prompts, {running.model} in {running.dtype}, "
        f"{running.platform} engines, {running.shared_tier} as shared tier; median of {DOCUMENTS} documents"
    )
    draw_chart(demo.rows, subtitle, output / CHART_NAME)
    console.write_line(f"\n{output / REPORT_NAME}   {output / CHART_NAME}")
    return 0 if all(row.is_proven for row in demo.rows) else 1


def _show(console: Console, row: Row) -> None:
    console.write_line(line(row))


def _write_conclusion(console: Console, demo: Demo, running: RunningStack) -> None:
    console.write_line()
    for footnote in footnotes(demo.rows, DOCUMENTS):
        console.write_line(footnote)
    question, answer = demo.question
    console.write_line(f"\nasked, for example: {question}\nanswered:           {answer}")
    headers = next(row for row in demo.rows if row.phase == Phase.GATEWAY.value).headers
    console.write_line(
        "gateway's headers:  " + "  ".join(f"{name}: {value}" for name, value in sorted(headers.items()))
    )
    console.write_line()
    for sentence in closing_sentences(demo.rows, running.limits.bytes_per_token, running.platform):
        console.write_line(sentence)


def _now() -> str:
    return datetime.datetime.now(tz=datetime.UTC).strftime("%Y%m%d-%H%M%S")
