"""`python -m engine_chain [--kills 30] [--seed 0]`: ends with status 0 when no answer was wrong."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from s3_servers import KEYS

from engine_chain import killed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="engine_chain", description="Kill an engine and the bucket of its chain.")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"] = KEYS
    started = time.monotonic()
    with TemporaryDirectory(prefix="engine-chain-") as folder:
        seen = killed.run(Path(folder), given.kills, given.seed)
    listed = ", ".join(f"{what} {count}" for what, count in sorted(seen.items()))
    print(f"no wrong answer: {listed}; {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
