"""Engines that share the rows of a node, each with a shared tier below: what is written to it and read from it, and how
often."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.v1.kv_offload.base import OffloadKey, PrepareStoreOutput, ReqContext, make_offload_key

from spillway_connector import metrics
from spillway_connector.config import ConnectorConfig
from spillway_connector.engine.ipc.samples import sample_key
from spillway_connector.engine.node_tier.rows import NodeRows
from spillway_connector.namespace import Namespace
from spillway_connector.node.region import NodeRegion
from spillway_connector.testing.generation import (
    STEP_END,
    SharedTierAdapter,
    SpillwayTieringManager,
    make_node_tier,
)
from spillway_connector.tiers.disk.slab.writers import new_number

ROWS, ROW_BYTES, CHUNKS = 32, 4096, 6
NAMESPACE = b"n" * 16
CONTEXT = ReqContext(req_id="r")
FOREVER_SECONDS = 3600.0
WAIT_SECONDS = 30.0


def prompt(number: int) -> list[OffloadKey]:
    return [make_offload_key(bytes([number, at]) * 16, 0) for at in range(CHUNKS)]


class Engine:
    """The manager of one engine over the rows of the node and an NVMe tier; `moved` counts what it asks of the tier."""

    def __init__(self, rows: Path, folder: Path, mode: str) -> None:
        region = NodeRegion(rows, ROWS, ROW_BYTES, new_number())
        self.rows = make_node_tier(region, NAMESPACE, False)
        assert isinstance(self.rows, NodeRows)
        spec = SimpleNamespace(
            geometry=SimpleNamespace(payload_bytes=ROW_BYTES, row_bytes=ROW_BYTES),
            namespace=Namespace.of({"test": "node"}),
            announces_blocks=False,
        )
        options = {"path": str(folder), "mode": mode, "max_bytes": 1 << 26}
        options |= {name: FOREVER_SECONDS for name in ("lookup_timeout_seconds", "load_timeout_seconds")}
        view = self.rows.get_kv_memoryview()
        self.bytes = view.cast("B")
        self.tier = SharedTierAdapter(spec, view, "nvme", **options)
        config = {"num_cpu_blocks": ROWS, "request_wait_seconds": FOREVER_SECONDS, "prefill_tokens_per_second": 1.0}
        config |= {"promotion_in_flight_fraction": 1.0, "promotion_per_request_fraction": 1.0}
        self.manager = SpillwayTieringManager(
            self.rows, [self.tier], ROWS, ConnectorConfig.parse(config), chunk_tokens=16, chunk_bytes=ROW_BYTES
        )
        self.moved: Counter[str] = Counter()
        inner = self.tier._shared._tier
        store, load = inner.store, inner.load

        def counted_store(*given: object, **named: object) -> object:
            self.moved["stored"] += 1
            return store(*given, **named)

        def counted_load(*given: object, **named: object) -> object:
            self.moved["loaded"] += 1
            return load(*given, **named)

        inner.store, inner.load = counted_store, counted_load
        inner.in_memory = lambda key, deadline: None

    def compute(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Store these chunks. Returns those that were not there or on their way."""
        output = self.manager.prepare_store(keys, CONTEXT)
        assert output is not None
        stored = list(output.keys_to_store)
        for key, row in zip(stored, output.store_spec.block_ids.tolist(), strict=True):
            self.bytes[row * ROW_BYTES : (row + 1) * ROW_BYTES] = content(key)
        self.manager.complete_store(stored, CONTEXT)
        return stored

    def step(self) -> None:
        self.manager.on_schedule_end(*STEP_END)

    def loaded(self, keys: Sequence[OffloadKey]) -> bool:
        """Ask for the prefix, as in a step, and say whether all of it is ready."""
        tokens = self.manager.lookup_prefix(list(keys), CONTEXT)
        self.step()
        return tokens is not None and self.rows.ready.issuperset(keys)


def content(key: OffloadKey) -> bytes:
    return bytes(key[:2]) * (ROW_BYTES // 2)


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not done():
        assert time.monotonic() < deadline, "it does not come to an end"
        time.sleep(0.002)


@pytest.fixture(params=["files", "slab"])
def engines(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Engine, Engine]]:
    made = [Engine(tmp_path / "node", tmp_path / "nvme", request.param) for _ in range(2)]
    yield made[0], made[1]
    for engine in made:
        engine.bytes.release()
        engine.manager.shutdown()


def settled(*engines: Engine) -> bool:
    for engine in engines:
        engine.step()
    return not any(engine.manager._transfer_jobs for engine in engines)


def test_a_chunk_goes_to_the_shared_tier_once_for_all_engines_of_the_node(engines: tuple[Engine, Engine]):
    first, second = engines
    keys = prompt(1)
    assert first.compute(keys[:4]) == keys[:4]
    second.step()
    assert second.compute(keys) == keys[4:]
    first.step()
    assert first.compute(keys) == []
    until(lambda: settled(first, second))
    assert (first.moved["stored"], second.moved["stored"]) == (4, 2)


def test_two_engines_that_ask_in_one_moment_load_a_chunk_once(engines: tuple[Engine, Engine]):
    first, second = engines
    keys = prompt(1)
    first.compute(keys)
    until(lambda: settled(first, second))
    for number in range(20):
        for engine in engines:
            engine.manager.reset_cache()  # the tier below has them alone
            engine.moved.clear()
        until(lambda: settled(first, second))
        waiting = set(engines)
        while waiting:
            for engine in list(waiting):
                if engine.loaded(keys):
                    waiting.remove(engine)
        until(lambda: settled(first, second))
        assert first.moved["loaded"] + second.moved["loaded"] == CHUNKS, f"round {number}"
        for key, row in zip(keys, first.rows.rows_of(keys), strict=True):
            assert bytes(second.bytes[row * ROW_BYTES : (row + 1) * ROW_BYTES]) == content(key)
        assert first.manager._bounds.rows_in_flight == second.manager._bounds.rows_in_flight == 0


def test_what_another_engine_has_begun_to_load_counts_for_that_engine_alone(engines: tuple[Engine, Engine]):
    first, second = engines
    keys = prompt(1)
    first.compute(keys)
    until(lambda: settled(first, second))
    for engine in engines:
        engine.manager.reset_cache()
    until(lambda: settled(first, second))
    prepare_write = second.rows.prepare_write

    def late(wanted: Sequence[OffloadKey], context: ReqContext) -> PrepareStoreOutput | None:
        """The first engine claims three of the rows after the second one has looked."""
        second.rows.prepare_write = prepare_write
        until(lambda: first.loaded(keys[:3]) or first.rows.resident >= set(keys[:3]))
        return prepare_write(wanted, context)

    second.rows.prepare_write = late
    until(lambda: (first.step(), second.loaded(keys))[1])
    until(lambda: settled(first, second))
    assert (first.moved["loaded"], second.moved["loaded"]) == (3, 3)
    assert first.manager._bounds.rows_in_flight == second.manager._bounds.rows_in_flight == 0


def test_metrics_say_whether_an_engine_uses_the_tier_of_its_node(engines: tuple[Engine, Engine]):
    first, _ = engines
    name = sample_key(metrics.CPU_TIER_JOINED)
    assert first.manager.take_samples().samples()[name] == 1
    first.rows._leave("another process held the lock")
    for _ in range(2):  # statistics of a step may be lost
        first.manager.count_settled(1)
        assert first.manager.take_samples().samples()[name] == 0
    first.rows._sweep_at = 0.0
    first.step()
    assert first.manager.take_samples().samples()[name] == 1
