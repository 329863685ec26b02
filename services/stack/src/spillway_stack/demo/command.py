"""`python -m spillway_stack demo`: find the stack, run the phases, leave a table, a report and a chart."""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Sequence
from pathlib import Path

from spillway_stack.demo.chart import draw_chart
from spillway_stack.demo.closing import closing_sentences
from spillway_stack.demo.narrator import Narrator
from spillway_stack.demo.phases import Phase
from spillway_stack.demo.report import Row, write_report
from spillway_stack.demo.run import Demo
from spillway_stack.demo.running_stack import RunningStack, find_stack
from spillway_stack.demo.sizing import DOCUMENTS
from spillway_stack.demo.table import footnotes, header, line
from spillway_stack.errors import StackError

REPORT_NAME, CHART_NAME = "report.json", "ttft.png"


def main(arguments: Sequence[str] | None = None) -> int:
    """0: every phase was served from where it says, with identical answers. 1: one was not, or nothing could run."""
    parser = argparse.ArgumentParser(
        prog="python -m spillway_stack demo", description="Show what offload is for, against the running stack."
    )
    parser.add_argument("--state-dir", type=Path, default=Path(".run"), help="of the running stack (default .run)")
    parser.add_argument("--output", type=Path, default=Path("build/demo"), help="folder (default build/demo)")
    parser.add_argument("--edition", default="", help="stands in each document's first line (default: the time)")
    given = parser.parse_args(arguments)
    try:
        return _run(find_stack(given.state_dir), given.output, given.edition or _now())
    except StackError as error:
        print(f"spillway: {error}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        print("\nspillway: interrupted; no report was written, the stack runs on", file=sys.stderr, flush=True)
        return 130


def _run(running: RunningStack, output: Path, edition: str) -> int:
    narrator = Narrator()
    demo = Demo(running, edition, narrator, on_row=lambda row: _show(narrator, row))
    engines = len(running.stack.engines)
    narrator.say(
        f"{running.model} in {running.dtype} on {engines} {running.platform} engines, "
        f"shared tier: {running.shared_tier}\n"
    )
    demo.prepare()
    narrator.say(
        f"prefill runs at {demo.prefill_tokens_per_second:,.0f} tokens/s, "
        f"so each of {DOCUMENTS} documents has {demo.document_tokens:,} tokens:"
    )
    for book in demo.books:
        narrator.say(f"  {book.title}")
    narrator.say()
    if narrator.is_terminal:
        narrator.say(header())
    demo.run()
    if not narrator.is_terminal:
        # Away from a terminal the progress lines stay between the rows; here they are once more, together.
        narrator.say("\n".join(["", header(), *map(line, demo.rows)]))
    _say_what_it_means(narrator, demo, running)
    write_report(demo.rows, output / REPORT_NAME)
    subtitle = (
        f"{demo.rows[0].prompt_tokens:,}-token prompts, {running.model} in {running.dtype}, "
        f"{running.platform} engines, {running.shared_tier} as shared tier; median of {DOCUMENTS} documents"
    )
    draw_chart(demo.rows, subtitle, output / CHART_NAME)
    narrator.say(f"\n{output / REPORT_NAME}   {output / CHART_NAME}")
    return 0 if all(row.is_proven for row in demo.rows) else 1


def _show(narrator: Narrator, row: Row) -> None:
    narrator.say(line(row))


def _say_what_it_means(narrator: Narrator, demo: Demo, running: RunningStack) -> None:
    narrator.say()
    for footnote in footnotes(demo.rows, DOCUMENTS):
        narrator.say(footnote)
    question, answer = demo.question
    narrator.say(f"\nasked, for example: {question}\nanswered:           {answer}")
    headers = next(row for row in demo.rows if row.phase == Phase.GATEWAY.value).headers
    narrator.say("gateway's headers:  " + "  ".join(f"{name}: {value}" for name, value in sorted(headers.items())))
    narrator.say()
    for sentence in closing_sentences(demo.rows, running.limits.bytes_per_token, running.platform):
        narrator.say(sentence)


def _now() -> str:
    return datetime.datetime.now(tz=datetime.UTC).strftime("%Y%m%d-%H%M%S")
