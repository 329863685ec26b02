"""Every model of the matrix: `python -m engine_matrix [--platform cpu|cuda] [--only NAME...] [--cases CASE...]`.

Prints the table of docs/models.md and writes build/models.json. Ends with status 1 when an answer changed, when
nothing was loaded, or when an engine refused unexpectedly.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from engine_matrix.models import CPU_MODELS, CUDA_MODELS, MODELS
from engine_matrix.verdict import Outcome, faults, run_model

CASES = ("none", "cpu", "chunks", "nvme", "lossy", "failing")
CUDA_CASES = ("none", "device", "cpu", "chunks", "nvme", "lossy", "failing")
OUTPUT = Path("build/models.json")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="engine_matrix", description="KV layouts through vLLM's own engine.")
    parser.add_argument("--platform", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--cases", nargs="+")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    given = parser.parse_args(arguments)
    models = CUDA_MODELS if given.platform == "cuda" else CPU_MODELS
    if given.only:
        models = [model for model in MODELS if model.name in given.only]
    rows, bad = [], 0
    output: Path = given.output
    output.parent.mkdir(parents=True, exist_ok=True)
    report = json.loads(output.read_text()) if output.exists() else {}
    with tempfile.TemporaryDirectory(prefix="spillway-models-") as folder:
        for model in models:
            started = time.monotonic()
            wanted = given.cases or (CUDA_CASES if model.platform == "cuda" else CASES)
            cases = [case for case in wanted if case not in model.leaves_out]
            outcome = run_model(model.name, Path(folder), [*cases, *model.more_cases])
            verdict, fine = judge(outcome, model.refuses)
            bad += not fine
            if not fine:
                print(outcome.log, file=sys.stderr)
            rows.append(f"| {model.name} | {model.layout} | {', '.join(outcome.runs) or '-'} | {verdict} |")
            print(f"{model.name}: {time.monotonic() - started:.0f} s: {verdict}", flush=True)
            report[model.name] = {"verdict": verdict, "runs": outcome.runs, "refusals": outcome.refusals}
            output.write_text(json.dumps(report, indent=1) + "\n")
    print("\n| model | KV cache | cases that ran | result |\n| --- | --- | --- | --- |\n" + "\n".join(rows))
    return 1 if bad else 0


def judge(outcome: Outcome, known_refusal: str | None) -> tuple[str, bool]:
    """(a sentence for the table, whether it is as expected)"""
    if "none" not in outcome.runs:
        error = outcome.refusals.get("none", "the engine did not start")
        return f"vLLM itself refuses: {error}", known_refusal is not None and known_refusal in error
    found = faults(outcome) + [f"{case}: {error}" for case, error in outcome.refusals.items()]
    if found:
        return "; ".join(found), False
    return f"identical; {outcome.loaded_tokens:,} tokens from a tier", known_refusal is None


if __name__ == "__main__":
    sys.exit(main())
