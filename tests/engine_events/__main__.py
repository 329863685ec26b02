"""Writes what the vLLM of this interpreter publishes into the samples that the gateway's tests read.

PYTHONHASHSEED=0 PYTHONPATH=tests python -m engine_events
"""

from __future__ import annotations

import argparse
import json

from engine_events.published import sample, sample_path

if __name__ == "__main__":
    argparse.ArgumentParser(prog="engine_events", description="Writes the samples of this vLLM.").parse_args()
    sample_path().write_text(json.dumps(sample(), indent=1) + "\n")
    print(sample_path())
