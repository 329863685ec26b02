"""KV copies between one CUDA device and the pinned CPU tier: GB/s by size of piece, direction and path.

    python bench/copies.py [--megabytes 512] [--runs 5]

The connector's own transport does the copying: pieces at random places of the device, whole rows at random places of
the CPU tier, like evicted blocks. Each path of a copy (loop, batch, staged) is forced in turn, checked byte for byte
once, and timed from submission to completion as an engine sees it; `submit` is the time that the model thread spends.
The limit is one contiguous copy of the same region. Needs PyTorch with CUDA, no vLLM.

Prints a table, writes build/bench/copy.json (flat; units are in the keys) with the copy table that fits the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_report import BenchError, write_report

from spillway_connector.device.copier import Direction
from spillway_connector.device.cuda.driver import CudaDriver
from spillway_connector.device.cuda.transport import CudaTransport, torch_cuda_device
from spillway_connector.plan.copies import CopyPlan
from spillway_connector.plan.copy_table import BATCH, LOOP, PATHS, STAGED, CopyTable
from spillway_connector.testing.memory import unnamed_region

PIECES_BYTES = (4096, 8192, 16_384, 32_768, 65_536, 131_072, 262_144, 294_912, 524_288, 1 << 20, 2 << 20, 4 << 20)
ROW_BYTES = 36 << 20  # a multiple of every size above; near two 128-token blocks of a 14B model
PIECES_MAX = 65_536
WAIT_SECONDS = 60.0
GOALS = ((Direction.STORE, 16_384, 0.80), *((direction, 65_536, 0.90) for direction in Direction))
OUTPUT = Path("build/bench/copy.json")


class Bench:
    """A device tensor and a CPU tier of equal size, and a copier for each direction and path."""

    def __init__(self, megabytes: int) -> None:
        self.rows = max(2, megabytes * 1_000_000 // ROW_BYTES)
        self.bytes = self.rows * ROW_BYTES
        self.region = unnamed_region(self.rows, ROW_BYTES)
        self.region.populate(0, self.bytes)
        torch.cuda.set_device(0)
        # Twice the size: pieces leave gaps, so that adjacent pieces never merge.
        self.device = torch.randint(-128, 128, (2 * self.bytes,), dtype=torch.int8, device="cuda")
        self.host = torch.frombuffer(self.region.create_kv_memoryview().cast("B"), dtype=torch.int8)
        device, compute_stream = torch_cuda_device()
        self.driver = CudaDriver.load()
        self.transports = {
            path: CudaTransport(self.driver, self.region, device, compute_stream, "auto", table=one_path(path))
            for path in (STAGED,)
        }
        first = self.transports[STAGED]
        if not first.pin.pinned:
            raise BenchError("the CPU tier could not be pinned")
        self.copiers = {(STAGED, direction): first.copier(direction) for direction in Direction}
        self.paths = first.path

    def plan(self, piece_bytes: int, seed: int) -> CopyPlan:
        """Random pieces of the device, two sizes apart, against whole rows in random order."""
        rng = np.random.default_rng(seed)
        in_row = ROW_BYTES // piece_bytes
        rows = min(self.rows, max(1, PIECES_MAX // in_row))
        slots = rng.permutation(self.bytes // piece_bytes)[: rows * in_row].astype(np.int64)
        row_starts = np.repeat(rng.permutation(self.rows)[:rows].astype(np.int64) * ROW_BYTES, in_row)
        host = self.region.address + row_starts + np.tile(np.arange(in_row, dtype=np.int64) * piece_bytes, rows)
        # In the planner's order: tensor by tensor, and all blocks of one.
        order = np.arange(rows * in_row).reshape(rows, in_row).T.ravel()
        device = self.device.data_ptr() + slots * 2 * piece_bytes
        return CopyPlan(device[order], host[order], np.full(len(order), piece_bytes, dtype=np.int64))

    def whole(self) -> CopyPlan:
        return CopyPlan(
            *(np.array([v], dtype=np.int64) for v in (self.device.data_ptr(), self.region.address, self.bytes))
        )

    def run(self, direction: Direction, path: str, plan: CopyPlan, job_id: int) -> tuple[float, float]:
        """(seconds from submit to completion, seconds of the submit)"""
        copier = self.copiers[STAGED, direction]
        self.paths.table = one_path(path)
        started = time.perf_counter()
        copier.submit(job_id, plan)
        submitted = time.perf_counter()
        while not (results := copier.finished()):
            if time.perf_counter() - started > WAIT_SECONDS:
                raise BenchError(f"{direction.value} by {path} did not end within {WAIT_SECONDS:.0f} s")
        ended = time.perf_counter()
        if results[0].error is not None:
            raise BenchError(f"{direction.value} by {path}: {results[0].error}")
        return ended - started, submitted - started

    def check(self, direction: Direction, path: str, plan: CopyPlan) -> None:
        """Random bytes at the source, others at the target, and every byte compared after the copy."""
        size = int(plan.sizes_bytes[0])
        device_at = torch.from_numpy((plan.device_addresses - self.device.data_ptr()) // size).cuda()
        host_at = torch.from_numpy((plan.host_addresses - self.region.address) // size).cuda()
        self.device.random_(-128, 128)
        self.host.copy_(torch.randint(-128, 128, (self.bytes,), dtype=torch.int8, device="cuda"))
        before = self.device.view(-1, size).clone()
        self.run(direction, path, plan, 1)
        device, host = self.device.view(-1, size), self.host.cuda().view(-1, size)
        if not torch.equal(device[device_at], host[host_at]):
            raise BenchError(f"{direction.value} by {path} of {size}-byte pieces: bytes differ")
        if direction is Direction.STORE:
            if not torch.equal(device, before):
                raise BenchError(f"{direction.value} by {path}: the source changed")
        else:
            before[device_at] = device[device_at]
            if not torch.equal(device, before):
                raise BenchError(f"{direction.value} by {path}: bytes outside the pieces changed")

    def close(self) -> None:
        for copier in self.copiers.values():
            copier.close()
        del self.host
        self.region.cleanup()


def one_path(path: str) -> CopyTable:
    rows = ((1 << 62, path),)
    return CopyTable(store=rows, load=rows)


def rate(size_bytes: int, seconds: float) -> float:
    return round(size_bytes / seconds / 1e9, 2)


def measure(bench: Bench, sizes: Sequence[int], runs: int) -> dict[str, Any]:
    report: dict[str, Any] = {}
    for direction in Direction:
        times = [bench.run(direction, LOOP, bench.whole(), 1)[0] for _ in range(runs + 1)][1:]
        report[f"{direction.value}_contiguous_gb_per_s"] = rate(bench.bytes, statistics.median(times))
    for size in sizes:
        for direction in Direction:
            for path in PATHS:
                if (path == BATCH and not bench.paths.batch) or (path == STAGED and not bench.paths.staged):
                    continue
                bench.check(direction, path, bench.plan(size, 1))
                plan = bench.plan(size, 2)
                pairs = [bench.run(direction, path, plan, 1) for _ in range(runs + 1)][1:]
                name = f"{direction.value}_{size}_{path}"
                report[f"{name}_gb_per_s"] = rate(plan.total_bytes, statistics.median(pair[0] for pair in pairs))
                report[f"{name}_submit_ms"] = round(statistics.median(pair[1] for pair in pairs) * 1e3, 3)
                report[f"{name}_pieces"] = len(plan)
    return report


def best_table(report: dict[str, Any], sizes: Sequence[int]) -> dict[str, list[list[object]]]:
    """Staging where it is more than 2 % faster than a batch, else batch, which is simpler."""
    table: dict[str, list[list[object]]] = {}
    for direction in Direction:
        rows: list[list[object]] = []
        for size in sizes:
            rates = {path: report.get(f"{direction.value}_{size}_{path}_gb_per_s", 0.0) for path in PATHS}
            path = STAGED if rates[STAGED] > 1.02 * rates[BATCH] else BATCH
            if rows and rows[-1][1] == path:
                rows[-1][0] = size
            else:
                rows.append([size, path])
        while rows and rows[-1][1] == BATCH:
            rows.pop()
        table[direction.value] = rows
    return table


def render(report: dict[str, Any], sizes: Sequence[int]) -> str:
    lines = []
    for direction in Direction:
        limit = report[f"{direction.value}_contiguous_gb_per_s"]
        lines += [
            "",
            f"{direction.value}: contiguous {limit} GB/s",
            "",
            f"| piece | {' | '.join(PATHS)} | best / limit |",
        ]
        lines.append("| --- |" + " --- |" * (len(PATHS) + 1))
        for size in sizes:
            rates = [report.get(f"{direction.value}_{size}_{path}_gb_per_s") for path in PATHS]
            submits = [report.get(f"{direction.value}_{size}_{path}_submit_ms") for path in PATHS]
            cells = [f"{r} ({s} ms)" if r is not None else "-" for r, s in zip(rates, submits, strict=True)]
            best = max(r for r in rates if r is not None)
            lines.append(f"| {size / 1024:g} KiB | {' | '.join(cells)} | {best / limit:.0%} |")
    return "\n".join(lines)


def goals(report: dict[str, Any], sizes: Sequence[int]) -> list[str]:
    shortfalls = []
    for direction, from_bytes, share in GOALS:
        limit = report[f"{direction.value}_contiguous_gb_per_s"]
        asked = [from_bytes] if from_bytes < 65_536 else [size for size in sizes if size >= from_bytes]
        worst = min(max(report.get(f"{direction.value}_{s}_{p}_gb_per_s", 0.0) for p in PATHS) for s in asked) / limit
        shortfalls.append(f"{direction.value} {from_bytes // 1024} KiB: {worst:.0%} of the limit, goal {share:.0%}")
    return shortfalls


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="KV copies by size of piece, direction and path.")
    parser.add_argument("--megabytes", type=int, default=1024, help="of each side; a job moves at most this")
    parser.add_argument("--runs", type=int, default=5, help="timed runs per figure, after a warm-up run")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("bench-copy needs a CUDA device; PyTorch finds none here", file=sys.stderr)
        return 1
    bench = Bench(given.megabytes)
    try:
        report = {
            "device": torch.cuda.get_device_name(0),
            "driver_cuda_version": bench.driver.version(),
            "batch_signature": bench.driver.batch_version,
            "paths": [bench.paths.batch and BATCH, bench.paths.staged and STAGED],
            "region_bytes": bench.bytes,
            "runs": given.runs,
            **measure(bench, PIECES_BYTES, given.runs),
        }
    finally:
        bench.close()
    report["copy_table"] = best_table(report, PIECES_BYTES)
    print(f"{report['device']}, driver of CUDA {report['driver_cuda_version']}, GB/s (ms of the submitting thread)")
    print(render(report, PIECES_BYTES))
    print("\n" + "\n".join(goals(report, PIECES_BYTES)))
    print(f"copy table: {json.dumps(report['copy_table'])}")
    write_report(report, given.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
