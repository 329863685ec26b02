"""`python -m vllm_signatures FOLDER VERSION > tests/vllm_signatures/samples/vllm-VERSION.json`

FOLDER: an unpacked wheel, of which the sources suffice:

    pip download --no-deps vllm==0.33.0
    unzip -q vllm-0.33.0-*.whl 'vllm/*.py' -d /tmp/vllm-0.33.0
    PYTHONPATH=tests .venv/local/bin/python -m vllm_signatures /tmp/vllm-0.33.0 0.33.0
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from spillway_connector.engine.v030.seams import SEAMS
from vllm_signatures.read import read


def main() -> None:
    parser = argparse.ArgumentParser(prog="vllm_signatures", description="Writes the signatures of a vLLM to stdout.")
    parser.add_argument("folder", type=Path, help="into which the wheel was unpacked")
    parser.add_argument("version", help="such as 0.33.0")
    given = parser.parse_args()
    if not (given.folder / "vllm").is_dir():
        parser.error(f"{given.folder} holds no folder vllm; give the folder into which the wheel was unpacked")
    json.dump(read(given.folder, given.version, SEAMS)._asdict(), sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
