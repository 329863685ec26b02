"""Faults at random under load, with every answer checked token by token.

    python bench/soak.py [--minutes 30] [--tier nvme|redis|both] [--seed N]
                         [--nvme-mode auto|slab|files] [--shared-blocks 32] [--reset-seconds 5] [--inject-wrong]

An engine without offload gives the right answers first (soak/references.py says how rounding is kept out of them). Then
two engines behind the gateway, with device, CPU and shared tier all too small for the prompts, answer a few clients who
never rest, while three lanes of faults strike from a seeded schedule (soak/schedule.py): one the shared store, one the
processes, one the prefix caches of an engine, connector included. Each fault is healed and recovery waited for; memory,
descriptors and threads of each process are sampled.

Broken, and exit status 1: a wrong answer; a failed request that was not in flight on a killed process; a tier that is
not used again after a fault; an engine that does not come back; a process that grows; anything left behind. With `both`
the tiers come one after the other, each with half of the minutes. `--inject-wrong` spoils one reference per tier and so
proves that the check can fail: the run must end with one wrong answer each and status 1. Prints a table, writes
build/bench/soak.json (flat; units are in the keys). Ctrl-C ends it in order and reports what was seen until then.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))  # stack_driver, which the cross-process tests drive the stack with

from bench_report import write_report  # noqa: E402
from soak.references import NotDecisive  # noqa: E402
from soak.report import Report, broken_promises, flat_report, render  # noqa: E402
from soak.run import SoakSettings, learn_references, soak  # noqa: E402

from spillway_stack.errors import StackError  # noqa: E402

OUTPUT = Path("build/bench/soak.json")
TIERS = {"nvme": ("nvme",), "redis": ("redis",), "both": ("nvme", "redis")}


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parse(arguments)
    stopped = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        if stopped.is_set():
            raise KeyboardInterrupt  # the second time: now, cleaning up on the way out
        stopped.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    tiers = TIERS[given.tier]
    settings = SoakSettings(
        tiers[0],
        given.minutes * 60.0 / len(tiers),
        given.seed,
        given.clients,
        given.prompts,
        given.dtype,
        given.inject_wrong,
        given.nvme_mode,
        given.shared_blocks,
        given.reset_seconds,
    )
    report: Report = {
        "seed": given.seed,
        "clients_count": given.clients,
        "dtype": given.dtype,
        "nvme_mode": given.nvme_mode,
        "shared_tier_blocks": given.shared_blocks,
        "reset_mean_seconds": given.reset_seconds,
    }
    broken: list[str] = []
    pool = learn_references(settings, _say)
    for tier in tiers:
        if stopped.is_set():
            break
        seen = soak(replace(settings, tier=tier), pool, stopped, _say)
        promises = broken_promises(seen)
        print(f"\n{render(seen, promises)}\n", flush=True)
        report |= flat_report(seen)
        broken += [f"{tier}: {promise}" for promise in promises]
    report |= {"stopped_early": int(stopped.is_set()), "broken_promises_count": len(broken)}
    report |= {f"broken_promise_{number}": promise for number, promise in enumerate(broken, 1)}
    write_report(report, given.output)
    return 1 if broken else 130 if stopped.is_set() else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Faults at random under load, every answer checked.")
    parser.add_argument("--minutes", type=float, default=30.0, help="of load and faults, all tiers together")
    parser.add_argument("--tier", choices=TIERS, default="both")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--dtype", default="float32", help="of the model; auto takes what the engine would")
    parser.add_argument("--nvme-mode", choices=("auto", "slab", "files"), default="auto", help="its layout")
    parser.add_argument("--shared-blocks", type=int, default=32, help="of the shared tier: fewer evict more")
    parser.add_argument(
        "--reset-seconds", type=float, default=5.0, help="between resets of caches, on average; 0: none"
    )
    parser.add_argument("--inject-wrong", action="store_true", help="spoil one reference: the run must fail")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    return parser.parse_args(arguments)


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (NotDecisive, StackError) as error:
        print(f"soak: {error}", file=sys.stderr)
        sys.exit(1)
