"""The whole under load, simulated: four engines with tiers, a router, agents in a closed loop. Virtual time.

    PYTHONPATH=bench python -m system.simulate [--systems spillway_cpu ...] [--sessions 64] [--seconds 75] [--seed 1]
        [--crowd 32 [--crowd-programs 1] [--crowd-tokens 1000 15000] [--cold]] [--kill-at 40 [--back-after 30]]
        [--think 1] [--prefill-times 1] [--retaining 8] [--answers-return] [--answer-tokens 64]

Engines keep the times of rates.py. The connector's own rows and order of eviction are the CPU tier, the gateway's own
routing and prefix index choose among engines; what differs between systems stands in systems.py and design.py. When
the default load runs, the figures of a real run (measured.py) stand beside the model's, and the rows that it does not
reproduce are named; a part of a run may deviate, so only a whole one is compared.

With --kill-at the last engine's process dies then, with all that it held, and requests that it had not answered are
sent to the others; the figures are of what came later, and a line shows them for each 10 seconds. With --back-after an
empty engine answers again so many seconds later.

With many sessions and a long --think the working set outgrows the tiers: what the sessions that go on at the end will
ask for again stands beside the figures, as a multiple of the NVMe tier's blocks. Whether a load pays depends on how
fast the engine computes; --prefill-times 4 is one that takes four times as long for a token with KV of the same size.

Rows for what agents bring along are run by name, beside spillway_recognised: spillway_named; spillway_retained, with
--retaining places that ask to retain their prompts and think ten times as long; spillway_answers_off, _on and _auto,
with and without --answers-return, which sends answers back as they were generated; spillway_fair, with a --crowd, which
is --crowd-programs programs. A crowd and those who retain have a line of their own.

Promised: what the gateway expected a request to find; without a gateway, what the engine held when it came.
Prints tables and writes build/bench/system.json (flat; keys `<system>_<figure>`, at other than 64 sessions
`<system>_<sessions>_sessions_<figure>`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bench_report import write_report

from system.agents import AgentLoad
from system.measured import COMPARED, MEASURED, distances, outside
from system.rates import H200_QWEN3_8B, SHARED_BLOCKS, slower
from system.report import Answered, figures
from system.run import ENGINES, Kill, SystemRun
from system.systems import FOR_AGENTS, SYSTEMS

SESSIONS = 64
OUTPUT = Path("build/bench/system.json")
_COLUMNS = (
    ("requests", "requests", 1.0, "%9.0f"),
    ("input_tokens_per_second", "tokens/s", 1.0, "%10.0f"),
    ("first_token_p50_seconds", "p50 s", 1.0, "%7.2f"),
    ("first_token_p90_seconds", "p90 s", 1.0, "%7.2f"),
    ("first_token_p99_seconds", "p99 s", 1.0, "%7.2f"),
    ("first_token_max_seconds", "max s", 1.0, "%7.2f"),
    ("cached_share", "cached %", 100.0, "%9.1f"),
    ("found_of_promised", "found %", 100.0, "%8.1f"),
    ("copied_of_computed", "copied", 1.0, "%8.2f"),
    ("working_set_of_nvme", "set/NVMe", 1.0, "%10.1f"),
)
SLICE_SECONDS = 10
_KNOWN = {**SYSTEMS, **FOR_AGENTS}


def row(name: str, values: Mapping[str, float]) -> str:
    """One line of the table of systems."""
    return f"{name:28}" + "".join(pattern % (values[key] * factor) for key, _, factor, pattern in _COLUMNS)


def heading(sessions: int) -> str:
    title = f"{sessions} sessions"
    return f"{title:28}" + "".join(f"{name:>{len(pattern % 0)}}" for _, name, _, pattern in _COLUMNS)


def run_system(
    name: str, load: AgentLoad, kill: Kill | None = None, prefill_times: float = 1.0
) -> tuple[list[Answered], dict[str, float]]:
    """The answered requests; blocks copied to the CPU tier over blocks computed, the working set over the NVMe tier."""
    system = _KNOWN[name]
    run = SystemRun(system.policy(), system.design, load, rates=slower(H200_QWEN3_8B, prefill_times), kill=kill)
    answered = run.run()
    computed = sum(engine.counters.computed_tokens / engine.shape.block_tokens for engine in run.engines)
    copied = sum(engine.system_tiers.copied_blocks for engine in run.engines) / max(1.0, computed)
    return answered, {"copied_of_computed": copied, "working_set_of_nvme": run.working_set_blocks / SHARED_BLOCKS}


def by_time(answered: Sequence[Answered], seconds: float) -> str:
    """Cached share and input tokens of what ended in each 10 seconds."""
    cells = []
    for begin in range(0, int(seconds), SLICE_SECONDS):
        ended = [one for one in answered if begin <= one.end_seconds < begin + SLICE_SECONDS]
        tokens = sum(one.prompt_tokens for one in ended)
        share = sum(one.cached_tokens for one in ended) / max(1, tokens)
        cells.append(f"{begin} s: {100 * share:.0f} %, {tokens / SLICE_SECONDS / 1000:.0f}k/s")
    return "  ".join(cells)


def _groups(answered: Sequence[Answered]) -> dict[str, list[Answered]]:
    """The sessions' requests, and apart from them those of a crowd and of those who retain their prompts."""
    found: dict[str, list[Answered]] = {}
    for one in answered:
        found.setdefault("crowd" if one.of_crowd else "retaining" if one.retains else "", []).append(one)
    return {group: found[group] for group in ("", "crowd", "retaining") if group in found}


def comparison(answered: Mapping[tuple[str, int], Sequence[Answered]], ramp_seconds: float) -> list[str]:
    """One line for each measured row that was simulated."""
    lines = [f"{'simulated over measured':28}{'sessions':>9}" + "".join(f"{name:>28}" for name in COMPARED)]
    for measured in MEASURED:
        requests = answered.get((measured.system, measured.sessions))
        if requests is None:
            continue
        simulated = figures(requests, measured.seconds, ramp_seconds)
        cells = "".join(
            f"{f'{simulated[name]:.4g} of {getattr(measured, name):.4g} ({100 * distance:+.0f} %)':>28}"
            for name, distance in distances(measured, simulated).items()
        )
        missed = outside(measured, simulated)
        lines.append(
            f"{measured.system:28}{measured.sessions:>9}{cells}" + (f"  NOT {', '.join(missed)}" if missed else "")
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", choices=list(_KNOWN), default=list(SYSTEMS))
    parser.add_argument("--sessions", nargs="+", type=int, default=[32, SESSIONS])
    parser.add_argument("--seconds", type=float, default=75.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--crowd", type=int, default=0, help="places of a tenant that asks without a pause")
    parser.add_argument("--crowd-programs", type=int, default=AgentLoad().crowd_programs)
    parser.add_argument("--crowd-tokens", nargs=2, type=int, default=AgentLoad().crowd_tokens)
    parser.add_argument("--cold", action="store_true", help="the crowd's prompts share nothing")
    parser.add_argument("--kill-at", type=float, help="second at which the last engine's process dies")
    parser.add_argument("--back-after", type=float, help="seconds after which an empty engine takes its place")
    parser.add_argument("--think", type=float, default=AgentLoad().think_seconds, help="mean seconds between two turns")
    parser.add_argument("--prefill-times", type=float, default=1.0, help="times the seconds of a prefill token")
    parser.add_argument("--retaining", type=int, default=0, help="places that ask to retain their prompts")
    parser.add_argument("--answers-return", action="store_true", help="as the tokens that were generated")
    parser.add_argument("--answer-tokens", type=int, default=AgentLoad().answer_tokens)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args(arguments)
    written: dict[str, float] = {
        "seconds": options.seconds,
        "seed": options.seed,
        "think_seconds": options.think,
        "prefill_times": options.prefill_times,
    }
    answered: dict[tuple[str, int], list[Answered]] = {}
    load = AgentLoad(
        seconds=options.seconds,
        seed=options.seed,
        crowd=options.crowd,
        crowd_tokens=tuple(options.crowd_tokens),
        crowd_is_cold=options.cold,
        crowd_programs=options.crowd_programs,
        think_seconds=options.think,
        ramp_seconds=max(AgentLoad().ramp_seconds, options.think),
        retaining=options.retaining,
        answers_return=options.answers_return,
        answer_tokens=options.answer_tokens,
    )
    kill = None
    if options.kill_at is not None:
        back_at = None if options.back_after is None else options.kill_at + options.back_after
        kill = Kill(ENGINES - 1, options.kill_at, back_at)
    for sessions in options.sessions:
        print(heading(sessions), flush=True)
        load = replace(load, sessions=sessions)
        for name in options.systems:
            requests, of_run = run_system(name, load, kill, options.prefill_times)
            if kill is not None:
                print(by_time(requests, options.seconds), flush=True)
                requests = [one for one in requests if one.sent_seconds >= kill.at]
            answered[name, sessions] = requests
            prefix = name if sessions == SESSIONS else f"{name}_{sessions}_sessions"
            for group, of_group in _groups(requests).items():
                begin = 0.0 if kill is None else kill.at
                values = {**figures(of_group, options.seconds, load.ramp_seconds, begin), **of_run}
                key = f"{prefix}_{group}" if group else prefix
                written |= {f"{key}_{figure}": round(value, 4) for figure, value in values.items()}
                print(row(f"{name} ({group})" if group else name, values), flush=True)
        print()
    as_measured = kill is None and replace(load, sessions=0, seconds=0.0, seed=0) == replace(
        AgentLoad(), sessions=0, seconds=0.0, seed=0
    )
    long_enough = options.seconds >= max(measured.seconds for measured in MEASURED)
    if as_measured and options.prefill_times == 1.0 and long_enough:
        print("\n".join(comparison(answered, load.ramp_seconds)))
    write_report(written, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
