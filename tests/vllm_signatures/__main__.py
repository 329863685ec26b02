"""`python -m vllm_signatures FOLDER VERSION > tests/vllm_signatures/samples/vllm-VERSION.json`

FOLDER: an unpacked wheel, of which the sources suffice:

    pip download --no-deps vllm==0.33.0
    unzip -q vllm-0.33.0-*.whl 'vllm/*.py' -d /tmp/vllm-0.33.0
    PYTHONPATH=tests .venv/local/bin/python -m vllm_signatures /tmp/vllm-0.33.0 0.33.0
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from spillway_connector.engine.v030.seams import SEAMS
from vllm_signatures.read import read


def main(folder: str, version: str) -> None:
    if not Path(folder, "vllm").is_dir():
        sys.exit(f"{folder} holds no folder vllm; give the folder into which the wheel was unpacked")
    json.dump(read(Path(folder), version, SEAMS)._asdict(), sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:])
