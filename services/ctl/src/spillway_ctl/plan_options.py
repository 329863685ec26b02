"""The command line of `spillway plan`, and what it means."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spillway_ctl.errors import CommandError
from spillway_ctl.named_text import read_named
from spillway_ctl.plan_arithmetic import Rates
from spillway_ctl.plan_input import PlannedEngines, read_rendered, render_chart
from spillway_ctl.plan_ratio import Apart, ApartRates, apart
from spillway_ctl.quantities import checked, parse_rate

DEFAULT_PROMPTS = (2_048, 8_192, 32_768)

_DESCRIPTION = """\
What values of the chart mean before anything runs: memory of a pod, the bandwidth from which a load beats computing,
and the time to the first token by where the prompt's prefix lies. Memory is the chart's own arithmetic.
"""
_EPILOG = """\
The rates are those of your machines: an engine's prefill rate and its copy rate are on its /metrics page
(spillway_prefill_tokens_per_second, spillway_device_copy_*), a tier's is spillway_tier_load_bytes_per_second.

examples:
  spillway plan --chart charts/spillway -f my-values.yaml
  spillway plan --chart charts/spillway -f my-values.yaml --prefill-tokens-per-second 8000 \\
    --device-copy-rate 20GiB/s --tier-rate 3GiB/s --prompt-tokens 4096 16384
  spillway plan --chart charts/spillway -f my-values.yaml --trace requests.jsonl \\
    --prefill-tokens-per-second 30000 --token-ms 12 --answers-per-engine 48
  helm template chat charts/spillway -f my-values.yaml | spillway plan --rendered - --json
"""


def add_plan(areas: Any) -> None:
    parser = areas.add_parser(
        "plan",
        help="memory, break-even bandwidth and first token of values of the chart",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--chart", type=Path, metavar="FOLDER", help="render this chart, with the helm on PATH")
    source.add_argument("--rendered", metavar="FILE", help="output of helm template; - for standard input")
    parser.add_argument("-f", "--values", type=Path, action="append", default=[], metavar="FILE", help="as Helm's")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as Helm's")
    parser.add_argument("--helm", default="helm", metavar="PROGRAM", help="Helm 3 or 4 (default: %(default)s)")
    parser.add_argument(
        "--prefill-tokens-per-second",
        type=_positive,
        metavar="N",
        help="of one engine (default: engine.offload.prefillTokensPerSecond of the values, if set)",
    )
    parser.add_argument("--device-copy-rate", type=_rate, metavar="RATE", help="CPU tier to device, e.g. 20GiB/s")
    parser.add_argument("--tier-rate", type=_rate, metavar="RATE", help="shared tier to one engine, e.g. 3GiB/s")
    for kind, what in (("put", "writes"), ("get", "reads and lookups")):
        parser.add_argument(
            f"--{kind}-price",
            type=_positive,
            metavar="N",
            help=f"of a million {what} of an object store",
        )
    parser.add_argument(
        "--prompt-tokens",
        type=_tokens,
        nargs="+",
        default=list(DEFAULT_PROMPTS),
        metavar="N",
        help="lengths of prompts to compute",
    )
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help="requests in Mooncake's format, one JSON object a line: how many prefill and decode engines they need",
    )
    parser.add_argument("--token-ms", type=_positive, metavar="N", help="between two tokens of one answer")
    parser.add_argument(
        "--answers-per-engine", type=_tokens, metavar="N", help="that a decode engine gives at once at that pace"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document instead of a table")


def planned_engines(given: argparse.Namespace) -> tuple[PlannedEngines, ...]:
    """Raises CommandError."""
    if given.rendered is not None:
        if given.values or given.set:
            raise CommandError("--rendered is rendered already; give -f and --set to helm template instead")
        return read_rendered(read_named(given.rendered, "--rendered"))
    return read_rendered(render_chart(given.helm, given.chart, given.values, given.set))


def rates_of(given: argparse.Namespace) -> Rates:
    return Rates(
        given.prefill_tokens_per_second, given.device_copy_rate, given.tier_rate, given.put_price, given.get_price
    )


def apart_of(given: argparse.Namespace, engines: Sequence[PlannedEngines]) -> Apart | None:
    """Compute how many engines of each role the given trace needs; None if no trace is given. Raises CommandError."""
    if given.trace is None:
        return None
    known = (group.prefill_tokens_per_second for group in engines)
    prefill = given.prefill_tokens_per_second or next(filter(None, known), None)
    if prefill is None or given.token_ms is None or given.answers_per_engine is None:
        raise CommandError("--trace needs --prefill-tokens-per-second, --token-ms and --answers-per-engine too")
    rates = ApartRates(prefill, given.token_ms / 1000.0, given.answers_per_engine)
    return apart(read_named(given.trace, "--trace").splitlines(), rates)


@checked
def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise ValueError(f"{text} given, a number above 0 needed")
    return number


@checked
def _tokens(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(f"{text} given, at least 1 needed")
    return number


@checked
def _rate(text: str) -> float:
    rate = parse_rate(text)
    if rate is None:
        raise ValueError("a number is needed here, e.g. 3GiB/s")
    return float(rate)
