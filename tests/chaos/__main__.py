"""PYTHONPATH=tests python -m chaos [--streams 200] [--requests-per-step 120]"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from .run import run
from .storm import REQUESTS_PER_STEP


def main() -> int:
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--requests-per-step", type=int, default=REQUESTS_PER_STEP)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="spillway-chaos-") as folder:
        outcome = asyncio.run(run(Path(folder), given.streams, given.requests_per_step))
    print(outcome)
    for fault in outcome.faults:
        print(f"FAULT {fault}")
    return bool(outcome.faults)


if __name__ == "__main__":
    sys.exit(main())
