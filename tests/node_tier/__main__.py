"""`python -m node_tier [--count 10000] [--kills 1000] [--stops 3000] [--seed 0]`: status 0 if no byte was wrong."""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from node_tier import killed, stopped
from node_tier.schedules import run


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="node_tier", description="Random schedules of engines that share rows.")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--stops", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule (default 0)")
    given = parser.parse_args(arguments)
    started = time.monotonic()
    seen: Counter[str] = Counter()
    for seed in range(given.seed, given.seed + given.count):
        seen += run(seed)
        if not seed % 100:
            gc.collect()  # mappings, which have descriptors, go with their objects
    listed = ", ".join(f"{what} {count}" for what, count in sorted(seen.items()))
    print(f"{given.count} schedules, no wrong byte, no lost row: {listed}; {time.monotonic() - started:.0f} s")
    started = time.monotonic()
    with TemporaryDirectory(prefix="node-tier-", dir="/dev/shm") as folder:
        killed.run(Path(folder) / "region", given.kills, processes=3, seed=given.seed)
    print(f"{given.kills} engines killed, no wrong byte, no lost row; {time.monotonic() - started:.0f} s")
    started = time.monotonic()
    with TemporaryDirectory(prefix="node-tier-", dir="/dev/shm") as folder:
        loaded = stopped.run(Path(folder) / "region", given.stops, given.stops // 30, seed=given.seed)
    print(
        f"{given.stops} engines stopped between two lines, {given.stops // 30} killed there, {loaded} chunks loaded, "
        f"no wrong byte, no lost row; {time.monotonic() - started:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
