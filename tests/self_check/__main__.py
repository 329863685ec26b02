"""`python -m self_check`: verdicts of the start-up check on healthy engines of every kind and on broken ones.

Prints a line per case and writes build/selfcheck.json. `--kinds` and `--starts` narrow it; `--add` keeps what earlier
runs wrote, so that the cases can be run a few at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from self_check.broken import BROKEN, SUBTLE
from self_check.engine import Engine
from self_check.starts import forked_start
from spillway_engine.machine import probe_machine
from spillway_stack.bundled_model import prepare

REPORT = Path("build/selfcheck.json")
TELLING_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16")
# Settings of one healthy engine each. Compiled graphs take minutes.
KINDS: dict[str, dict[str, Any]] = {
    "float32": {"model": {"dtype": "float32"}},
    "bfloat16": {"model": {"dtype": "bfloat16"}},
    "float16": {"model": {"dtype": "float16"}},
    "bfloat16, fp8 KV": {"model": {"dtype": "bfloat16"}, "extraArgs": ["--kv-cache-dtype", "fp8"]},
    "bfloat16, compiled": {
        "model": {"dtype": "bfloat16"},
        "extraArgs": ["--no-enforce-eager"],
        "extraEnv": {"TORCH_COMPILE_DISABLE": "0"},
    },
    "bfloat16, blocks of 16": {"model": {"dtype": "bfloat16"}, "blockSize": 16, "deviceBlocks": 128},
    "bfloat16, logits": {"model": {"dtype": "bfloat16"}, "extraArgs": ["--logprobs-mode", "raw_logits"]},
    "bfloat16, pooling": {"model": {"dtype": "bfloat16"}, "extraArgs": ["--runner", "pooling"]},
}
BROKEN_KINDS = ("float32", "bfloat16", "float16")
# Without AVX-512 FP16, float16 is slow, and a start takes twice as long.
START_SHARES = {"bfloat16": 2, "float32": 2, "float16": 1}
# Of each, the same 2,048 tokens of KV cache.
STARTED_KINDS: dict[str, dict[str, Any]] = {
    f"{dtype}, blocks of {size}": {"model": {"dtype": dtype}, "blockSize": size, "deviceBlocks": 2048 // size}
    for size in (128, 16)
    for dtype in START_SHARES
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="self_check", description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS), metavar="KIND")
    parser.add_argument("--starts", type=int, default=30, help="healthy starts, dtypes and block sizes in turn")
    parser.add_argument("--add", action="store_true", help="keep the results of earlier runs")
    given = parser.parse_args()
    model = prepare(print)
    report = _read_report() if given.add else {"healthy": {}, "broken": {}, "starts": []}
    flags = probe_machine("cpu").cpu_flags
    report["cpu_flags"] = [flag for flag in TELLING_FLAGS if flag in flags]
    wrong = 0
    for kind in given.kinds:
        with tempfile.TemporaryDirectory() as folder, Engine(Path(folder), model, **KINDS[kind]) as engine:
            _report(kind, engine.verdict.healthy, engine.verdict.message)
            report["healthy"][kind] = dataclasses.asdict(engine.verdict)
            wrong += not engine.verdict.healthy
            if kind in BROKEN_KINDS and engine.verdict.healthy:
                report["broken"][kind] = asyncio.run(_broken(engine))
                wrong += sum(report["broken"][kind][name]["healthy"] for name in BROKEN)
        _write_report(report)
    for _ in range(given.starts):
        kind = _next_start([start["kind"] for start in report["starts"]])
        begun = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            verdict = forked_start(Path(folder), model, STARTED_KINDS[kind])
        seconds = round(time.monotonic() - begun, 1)
        _report(f"start {len(report['starts']) + 1}, {kind}, {seconds} s", verdict.healthy, verdict.message)
        report["starts"].append({"kind": kind, "seconds": seconds, **dataclasses.asdict(verdict)})
        wrong += not verdict.healthy
        _write_report(report)
    refused = sum(not start["healthy"] for start in report["starts"])
    print(f"{refused} of {len(report['starts'])} healthy starts refused")
    print(f"{wrong} verdicts are wrong; {REPORT} has them all")
    return int(wrong > 0)


def _next_start(done: list[str]) -> str:
    """The kind that is furthest behind its share."""
    return min(STARTED_KINDS, key=lambda kind: done.count(kind) / START_SHARES[STARTED_KINDS[kind]["model"]["dtype"]])


async def _broken(engine: Engine) -> dict[str, dict[str, Any]]:
    """Each damage with the reference and without one, as for a model without one."""
    verdicts: dict[str, dict[str, Any]] = {}
    brief = engine.brief()
    for name, order in {**BROKEN, **SUBTLE}.items():
        await engine.order(*order)
        verdict, unknown = await engine.check(brief), await engine.check(dataclasses.replace(brief, reference=None))
        await engine.order("mend")
        _report(f"  {name}", verdict.healthy, verdict.message)
        verdicts[name] = {**dataclasses.asdict(verdict), "without_reference": dataclasses.asdict(unknown)}
    return verdicts


def _report(name: str, healthy: bool, message: str) -> None:
    print(f"{name}: {'passes' if healthy else 'refused'}: {message}", flush=True)


def _read_report() -> dict[str, Any]:
    return json.loads(REPORT.read_text()) if REPORT.is_file() else {"healthy": {}, "broken": {}, "starts": []}


def _write_report(report: dict[str, Any]) -> None:
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
