"""The figures of one soak as a flat document, the promises it broke, and a table for people."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from soak.counters import Counters
from soak.footprints import Footprints
from soak.lanes import Log
from soak.load import Tally
from soak.references import Pool

Report = dict[str, float | int | str]
ANSWERS_LEAST = 20  # fewer say nothing


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything one stack showed. leftovers: processes, ports and shared memory that outlived what made them."""

    tier: str
    seconds: float
    block_bytes: int
    pool: Pool
    tally: Tally
    log: Log
    counters: Counters
    footprints: Footprints
    leftovers: Sequence[str]


def broken_promises(seen: Observed) -> list[str]:
    tally = seen.tally
    broken = []
    if tally.wrong:
        broken.append(f"{tally.wrong} of {tally.answers} answers were wrong")
    if tally.failed:
        broken.append(f"{sum(tally.failed.values())} requests failed without an excuse: {dict(tally.failed)}")
    if tally.answers < ANSWERS_LEAST:
        broken.append(f"only {tally.answers} answers were checked; {ANSWERS_LEAST} are the least for a verdict")
    broken += seen.log.broken
    broken += [f"left behind: {what}" for what in seen.leftovers]
    for generation in seen.footprints.generations.values():
        # Valkey is not ours, and what it holds is meant to grow up to its limit.
        if not generation.name.startswith("valkey"):
            broken += generation.growths()
    return broken


def flat_report(seen: Observed) -> Report:
    """Units are in the keys; `_count` where there is none."""
    tally, pool, totals = seen.tally, seen.pool, seen.counters.totals
    report: Report = {
        "run_seconds": round(seen.seconds, 1),
        "processors_count": os.cpu_count() or 0,
        "load_average_at_end": round(os.getloadavg()[0], 2),
        "prompts_count": len(pool.references),
        "prompts_sensitive_to_one_foreign_block_count": pool.sensitive_prompts,
        "rounding_noise_nats": pool.noise,
        "answers_checked_count": tally.answers,
        "answers_wrong_count": tally.wrong,
        "answer_tokens_compared_count": tally.checked_tokens,
        "answers_at_a_cached_length_never_learnt_count": tally.unrecorded_lengths,
        "requests_failed_unexcused_count": sum(tally.failed.values()),
        "requests_failed_in_flight_on_a_killed_process_count": sum(tally.excused.values()),
        "faults_count": sum(seen.log.faults.values()),
        "cached_by_device_tokens": int(totals["prefix_cache_hits"]),
        "cached_by_cpu_or_shared_tier_tokens": int(totals["external_prefix_cache_hits"]),
        "read_from_shared_tier_blocks": int(totals["tier_read_bytes"] / seen.block_bytes),
        "written_to_shared_tier_blocks": int(totals["tier_written_bytes"] / seen.block_bytes),
        "evicted_from_shared_tier_frames": int(seen.counters.total("tier_evicted_frames")),
        "cpu_tier_resets_done_count": int(totals["cpu_tier_resets_done"]),
        "cpu_tier_resets_refused_count": int(totals["cpu_tier_resets_refused"]),
        "left_behind_count": len(seen.leftovers),
        "growing_processes_count": sum(bool(one.growths()) for one in seen.footprints.generations.values()),
    }
    if tally.seconds:
        ordered = sorted(tally.seconds)
        report["request_p50_seconds"] = round(statistics.median(ordered), 3)
        report["request_p99_seconds"] = round(ordered[int(0.99 * (len(ordered) - 1))], 3)
        report["request_slowest_seconds"] = round(ordered[-1], 3)
    for name, counter in (("answers_by", tally.by_route), ("answers_cached", tally.by_cached)):
        report |= {f"{name}_{key}_count": count for key, count in sorted(counter.items())}
    report |= {f"requests_failed_{reason}_count": count for reason, count in sorted(tally.failed.items())}
    report |= {f"requests_in_flight_at_{kind}_count": count for kind, count in sorted(tally.excused.items())}
    report |= {f"fault_{kind}_count": count for kind, count in sorted(seen.log.faults.items())}
    for kind, seconds in sorted(seen.log.recovery_seconds.items()):
        report[f"recovery_after_{kind}_median_seconds"] = round(statistics.median(seconds), 2)
        report[f"recovery_after_{kind}_slowest_seconds"] = round(max(seconds), 2)
    for series, total in sorted(totals.items()):
        if series.startswith(("tier_evicted_frames", "tier_failures", "tier_lookups")) and total:
            report[f"{series}_count"] = int(total)
    return {f"{seen.tier}_{key}": value for key, value in (report | _processes(seen.footprints)).items()}


def _processes(footprints: Footprints) -> Report:
    """Report the memory of each name's longest-lived process at its end, and what its second half added."""
    longest = {}
    for generation in sorted(footprints.generations.values(), key=lambda one: len(one.samples)):
        longest[generation.name] = generation
    report: Report = {}
    for name, generation in sorted(longest.items()):
        place = name.replace("-", "_").replace(" ", "_")
        last = generation.samples[-1]
        report[f"process_{place}_watched_seconds"] = round(last.seconds - generation.samples[0].seconds)
        report[f"process_{place}_pss_bytes"] = last.pss_bytes
        for quantity, unit in (("own_memory_bytes", ""), ("descriptors", "_count"), ("threads", "_count")):
            report[f"process_{place}_{quantity}{unit}"] = getattr(last, quantity)
            seen = generation.trend(quantity)
            if seen is not None:
                report[f"process_{place}_second_half_rise_{quantity}{unit}"] = round(seen.rise, 1)
    return report


def render(seen: Observed, broken: Sequence[str]) -> str:
    report = {key.removeprefix(f"{seen.tier}_"): value for key, value in flat_report(seen).items()}
    lines = [
        f"{seen.tier}: {seen.seconds / 60:.1f} minutes, {report['faults_count']} faults, "
        f"{report['answers_checked_count']} answers checked, {report['answers_wrong_count']} wrong",
        "",
        f"{'fault':24}{'times':>6}{'recovery, median':>18}{'slowest':>10}",
    ]
    for kind, times in sorted(seen.log.faults.items()):
        seconds = seen.log.recovery_seconds.get(kind, [])
        cells = f"{statistics.median(seconds):>16.1f} s{max(seconds):>8.1f} s" if seconds else f"{'':>18}{'':>10}"
        lines.append(f"{kind:24}{times:>6}{cells}")
    lines += ["", f"{'process':18}{'watched':>9}{'own memory':>12}{'rise':>10}{'fds':>6}{'threads':>9}"]
    for key, watched in report.items():
        if key.startswith("process_") and key.endswith("_watched_seconds"):
            place = key.removesuffix("_watched_seconds")
            rise = report.get(f"{place}_second_half_rise_own_memory_bytes")
            lines.append(
                f"{place.removeprefix('process_').replace('_', ' '):18}{watched:>7} s"
                f"{float(report[f'{place}_own_memory_bytes']) / 2**20:>8.0f} MiB"
                f"{'' if rise is None else f'{float(rise) / 2**20:+.1f} MiB':>10}"
                f"{report[f'{place}_descriptors_count']:>6}{report[f'{place}_threads_count']:>9}"
            )
    shown = [key for key in report if not key.startswith(("process_", "fault_", "recovery_"))]
    lines += ["", *(f"{key:60}{report[key]:>14}" for key in shown)]
    lines += ["", *(seen.tally.texts if seen.tally.texts else [])]
    lines += [f"BROKEN: {promise}" for promise in broken] or ["every promise was kept"]
    return "\n".join(lines)
