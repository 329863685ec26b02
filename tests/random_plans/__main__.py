"""`python -m random_plans [--count 100000] [--seed 0]`: ends with status 0 when every plan equals the naive model."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence

from random_plans.check import check


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="random_plans", description="Random copies against a byte-by-byte model.")
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first plan (default 0)")
    given = parser.parse_args(arguments)
    started = time.monotonic()
    kinds = Counter(check(seed) for seed in range(given.seed, given.seed + given.count))
    listed = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
    print(f"{given.count} plans, stored and loaded, equal the model: {listed}; {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
