"""Engines that are killed with SIGKILL while they work on one region, each a process of its own."""

from __future__ import annotations

import mmap
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3
from vllm.v1.kv_offload.base import OffloadKey, ReqContext

from spillway_connector.engine.node_tier.row_checks import NodeRowsSpec, RowChecks
from spillway_connector.engine.node_tier.rows import NodeRows
from spillway_connector.errors import DeviceCopyError
from spillway_connector.node.region import NodeRegion
from spillway_connector.plan import node_records
from spillway_connector.plan.node_index import READY, WRITING
from spillway_connector.testing.generation import make_node_tier
from spillway_connector.tiers.disk.slab.writers import new_number

ROWS, ROW_BYTES = 24, 8192
NAMESPACE = b"n" * 16
CONTEXT = ReqContext(req_id="r")
WRONG = 3  # status of a process that has read wrong bytes
_WAIT_SECONDS = 120.0  # for what takes a fraction of a second


def content(key: bytes) -> bytes:
    return blake3(NAMESPACE + key).digest(ROW_BYTES)


def join(folder: Path, rows: int = ROWS) -> tuple[NodeRegion, NodeRows]:
    region = NodeRegion(folder, rows, ROW_BYTES, new_number())
    tier = make_node_tier(region, NAMESPACE, False)
    assert isinstance(tier, NodeRows)
    return region, tier


def work(
    folder: Path, seed: int, count: Callable[[], None], count_loaded: Callable[[int], None], num_rows: int = ROWS
) -> int:
    """Store and load until killed. Returns WRONG if a load got another chunk's bytes.

    Args:
        folder: Folder of the region.
        seed: Seed of the choices.
        count: Called after each round.
        count_loaded: Called with the number of chunks that were loaded and compared.
        num_rows: Rows of the region, half of what all chunks need.
    """
    chosen = random.Random(seed)
    node_records.FEW_ROWS = chosen.choice((0, 1, node_records.FEW_ROWS))  # of this process
    keys = [OffloadKey(bytes([number]) * 36) for number in range(2 * num_rows)]
    region, tier = join(folder, num_rows)
    tier._spare_rows = (seed % 2 * max(1, num_rows // 8)).__index__  # type: ignore[method-assign]
    checks = RowChecks(region)
    view = region.memory.create_kv_memoryview().cast("B")
    for copy_id in range(1 << 30):
        tier.sync()
        output = tier.prepare_store(chosen.sample(keys, chosen.randint(1, num_rows // 6 + 2)), CONTEXT)
        if output is not None and output.keys_to_store:
            stored = list(output.keys_to_store)
            for key, row in zip(stored, output.store_spec.block_ids.tolist(), strict=True):
                view[row * ROW_BYTES : (row + 1) * ROW_BYTES] = content(key)
            with tier.together():
                good = chosen.random() < 0.9
                tier.complete_store(stored, CONTEXT, good)
                reading = tier.prepare_read(stored, CONTEXT) if good and chosen.random() < 0.5 else None  # pinned
            if reading is not None:
                rows = reading.block_ids.tolist()
                if [bytes(view[row * ROW_BYTES : (row + 1) * ROW_BYTES]) for row in rows] != list(map(content, stored)):
                    return WRONG
                tier.complete_read(stored, CONTEXT)
        ready = [key for key in chosen.sample(keys, num_rows // 4 + 2) if key in tier.ready]
        if ready:
            spec = tier.prepare_load(ready, CONTEXT)
            assert isinstance(spec, NodeRowsSpec)
            try:
                checks.require(spec)
            except DeviceCopyError:
                pass
            else:
                checks.submitted(copy_id, spec)
                copied = [bytes(view[row * ROW_BYTES : (row + 1) * ROW_BYTES]) for row in spec.block_ids.tolist()]
                if not checks.still_held(copy_id) or copied != [content(key) for key in ready]:
                    return WRONG
                count_loaded(len(ready))
            tier.complete_load(ready, CONTEXT)
        if chosen.random() < 0.02:
            tier.reset_cache()
        count()
    return 0


def run(folder: Path, kills: int, processes: int, seed: int = 0) -> int:
    """Kill and start `kills` engines. Returns how many chunks they loaded and compared.

    Raises AssertionError when bytes were wrong or a row stays claimed.
    """
    chosen = random.Random(seed)
    counts = memoryview(mmap.mmap(-1, 8 * (kills + processes))).cast("Q")  # rounds of each engine
    loaded = memoryview(mmap.mmap(-1, 8 * (kills + processes))).cast("Q")  # chunks that each has compared
    running: list[tuple[int, int]] = []  # (process, its place in counts)

    def start(number: int) -> None:
        process = os.fork()
        if process:
            running.append((process, number))
            return
        status = 1
        try:

            def count() -> None:
                counts[number] += 1

            def count_loaded(chunks: int) -> None:
                loaded[number] += chunks

            status = work(folder, seed + number, count, count_loaded)
        finally:
            os._exit(status)

    def kill(place: int) -> None:
        process, _ = running.pop(place)
        os.kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
        assert os.WIFSIGNALED(status), f"an engine ended with status {os.waitstatus_to_exitcode(status)}"

    try:
        for number in range(processes):
            start(number)
        for number in range(processes, processes + kills):
            place = chosen.randrange(len(running))
            process, counted = running[place]
            wanted, deadline = chosen.randint(1, 60), time.monotonic() + _WAIT_SECONDS
            while counts[counted] < wanted:
                assert time.monotonic() < deadline, "an engine makes no progress"
                ended, status = os.waitpid(process, os.WNOHANG)
                assert not ended, f"an engine ended with status {os.waitstatus_to_exitcode(status)}"
                time.sleep(0.0005)
            time.sleep(chosen.random() * 0.004)  # anywhere within its next steps
            kill(place)
            start(number)
    finally:
        while running:
            kill(0)
    require_right_rows(folder)
    return sum(loaded)


def require_right_rows(folder: Path, num_rows: int = ROWS) -> None:
    region, tier = join(folder, num_rows)
    deadline = time.monotonic() + _WAIT_SECONDS
    while region.index.count()[WRITING]:
        assert time.monotonic() < deadline, "rows of killed engines stay claimed"
        tier.sync()
        time.sleep(0.05)
    view = region.memory.create_kv_memoryview().cast("B")
    for row in range(num_rows):
        entry = region.index.entry(row)
        assert entry is not None
        if entry.state == READY:
            assert bytes(view[row * ROW_BYTES : (row + 1) * ROW_BYTES]) == content(entry.key)
    view.release()
    tier.shutdown()
