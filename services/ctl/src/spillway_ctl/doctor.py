"""`spillway doctor`: what is wrong with a running gateway, its engines and their shared tier, and what to change."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TextIO

from spillway_connector.errors import ConfigError, TierError
from spillway_connector.explanations import explanation
from spillway_ctl.errors import CommandError
from spillway_ctl.evidence import EngineReading, Finding, Verdict
from spillway_ctl.findings import judge
from spillway_ctl.plan_arithmetic import break_even_bytes_per_second
from spillway_ctl.quantities import format_bytes
from spillway_ctl.readings import Questions, read_all
from spillway_ctl.run import JSON_FORMAT, OK
from spillway_ctl.store_choice import StoreChoice
from spillway_ctl.tier_rates import TierRates, measure_bucket, measure_directory, measure_redis

FAILED = 1
CHECK = "tier rates"
_COLUMNS = ("CHECK", "WHERE", "VERDICT", "FOUND", "CHANGE")
_CELL_MAX = 40  # of CHECK and WHERE


@dataclass(frozen=True, slots=True)
class Patient:
    """The addresses that `spillway doctor` asks.

    Attributes:
        gateway_url: None: no gateway is asked.
        engine_urls: empty: the engines that the gateway names.
        tier: the shared tier to measure from here; None: none is named.
        no_tier: why there is none to measure.
    """

    gateway_url: str | None
    engine_urls: tuple[str, ...]
    tier: StoreChoice | None = None
    no_tier: str = "no tier was named: give --config, --nvme, --redis or --s3 from a place that reaches it"


def doctor(patient: Patient, questions: Questions, *, as_json: bool, out: TextIO | None = None) -> int:
    """Print one line for each check; 1 if any failed."""
    out = out if out is not None else sys.stdout
    gateway, engines = read_all(patient.gateway_url, patient.engine_urls, questions)
    findings = [*judge(gateway, engines, questions.window_seconds), _tier(patient, engines, questions.answer_seconds)]
    if as_json:
        print_json(findings, out)
    else:
        print(table(findings), file=out, flush=True)
    return status_of(findings)


def status_of(findings: Sequence[Finding]) -> int:
    return FAILED if any(finding.verdict is Verdict.FAILED for finding in findings) else OK


def print_json(findings: Sequence[Finding], out: TextIO) -> None:
    whole = {
        "format": JSON_FORMAT,
        "command": "doctor",
        "failed": status_of(findings) == FAILED,
        "findings": [asdict(each) for each in findings],
    }
    print(json.dumps(whole, indent=2), file=out, flush=True)


def counts_of(findings: Sequence[Finding]) -> str:
    """`3 ok, 0 warning, 1 failed, 2 not checked`"""
    return ", ".join(f"{sum(each.verdict is verdict for each in findings)} {verdict}" for verdict in Verdict)


def table(findings: Sequence[Finding]) -> str:
    """One line for each, in columns, and a last one with the counts."""
    rows = [_COLUMNS, *(_row(finding) for finding in findings)]
    widths = [min(_CELL_MAX, max(len(row[column]) for row in rows)) for column in range(3)]
    lines = []
    for row in rows:
        start = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False))
        lines.append(f"{start}  {row[3]}{f' -> {row[4]}' if row[4] else ''}")
    lines[0] = f"{lines[0].partition(' -> ')[0]} -> {_COLUMNS[4]}"
    return "\n".join([*lines, "", counts_of(findings)])


def _row(finding: Finding) -> tuple[str, str, str, str, str]:
    return finding.check, finding.where, finding.verdict, _one_line(finding.found), _one_line(finding.change)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _tier(patient: Patient, engines: Sequence[EngineReading], answer_seconds: float) -> Finding:
    tier = patient.tier
    if tier is None:
        return Finding(CHECK, "here", Verdict.NOT_CHECKED, patient.no_tier)
    kind, where, change = _place(tier)
    try:
        rates = _measure(tier, answer_seconds)
    except CommandError as error:  # a login that is not here
        return Finding(CHECK, where, Verdict.NOT_CHECKED, str(error))
    except (OSError, TierError, ConfigError) as error:
        said = explanation(error.reason, kind) if isinstance(error, TierError) else None
        return Finding(CHECK, where, Verdict.FAILED, str(error), change if said is None else said.remedy or change)
    write, read = rates.write_bytes_per_second, rates.read_bytes_per_second
    found = (
        f"{format_bytes(write)}/s written, {format_bytes(read)}/s read ({format_bytes(rates.size_bytes)}, one thread)"
    )
    needed = [each for engine in engines if (each := break_even(engine)) is not None]
    if needed and read < max(needed):
        found = f"{found}; computing a prefix is as fast as {format_bytes(max(needed))}/s"
        change = "a faster disk or network, or sharedTier.type: none; ioThreads help if one thread is the limit"
        return Finding(CHECK, where, Verdict.WARNING, found, change)
    return Finding(CHECK, where, Verdict.OK, found)


def break_even(engine: EngineReading) -> float | None:
    """Bytes per second from which a load beats computing, by the engine's measured prefill; None: it has no rate."""
    rate = None if engine.after is None else engine.after.total("spillway_prefill_tokens_per_second")
    memory = (engine.config or {}).get("memory")
    per_token = memory.get("bytes_per_token") if isinstance(memory, dict) else None
    return break_even_bytes_per_second(per_token, rate) if isinstance(per_token, int) and rate else None


def _place(tier: StoreChoice) -> tuple[str, str, str]:
    """Return the tier's type, its address, and the remedy if a measurement fails for a reason without explanation."""
    if tier.nvme is not None:
        change = "mount the volume here, and run this as the engines' user; free space if it is full"
        return "nvme", str(tier.nvme), change
    if tier.s3 is not None:
        change = "correct what the sentence names (offload.sharedTier.s3, the Secret or the identity)"
        return "s3", str(tier.s3), change
    change = (
        "start the Redis or Valkey there, or correct the url, its login and certificates (offload.sharedTier.redis)"
    )
    return "redis", str(tier.redis), change


def _measure(tier: StoreChoice, answer_seconds: float) -> TierRates:
    """Raises CommandError, ConfigError, OSError, TierError."""
    if tier.nvme is not None:
        return measure_directory(tier.nvme)
    if tier.s3 is not None:
        return measure_bucket(tier.s3, answer_seconds)
    return measure_redis(tier.endpoint(), answer_seconds)
