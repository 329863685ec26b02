"""Chunks that clients asked to retain, in an engine's CPU tier under each policy and in the tier that a node shares."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from vllm.v1.kv_offload.base import OffloadKey, ReqContext

from spillway_connector.device.host_region import HostRegion
from spillway_connector.engine.cpu_tier.tier import CpuTier
from spillway_connector.node.region import NodeRegion
from spillway_connector.testing.clock import SteppedClock
from spillway_connector.testing.generation import HIT, make_cpu_tier, make_node_tier
from spillway_connector.testing.memory import unnamed_region
from spillway_connector.testing.retention_contract import ANN, BOB, MakeRetaining, RetentionContract
from spillway_connector.testing.tier_contract import key_of
from spillway_connector.tiers.disk.slab.writers import new_number
from spillway_connector.tiers.tier import NO_TENANT

CONTEXT = ReqContext(req_id="r")
ROW_BYTES = 4096
OURS, THEIRS = b"o" * 16, b"t" * 16


def key(chunk: int) -> OffloadKey:
    return OffloadKey(key_of(chunk))


class Rows:
    """Engines in turn: each has the next request. One of them, or those of a node."""

    honours_holds = True

    def __init__(self, clock: SteppedClock, *engines: CpuTier) -> None:
        self.clock, self.engines = clock, engines
        self.turns = 0

    def store(self, chunks: Iterable[int], tenant: bytes = NO_TENANT) -> None:
        for chunk in chunks:
            engine = self.engines[self.turns % len(self.engines)]
            self.turns += 1
            store(engine, chunk)

    def hold(self, tenant: bytes, share: float, seconds: float, chunks: range) -> None:
        for number, engine in enumerate(self.engines):
            engine.sync()
            engine.hold(tenant, share, seconds, [key(chunk) for chunk in chunks[number :: len(self.engines)]])

    def held(self) -> int:
        return sum(engine.held_rows() for engine in self.engines)

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def there(self, chunks: range) -> set[int]:
        return there(self.engines[0], chunks)


def store(engine: CpuTier, *chunks: int) -> None:
    engine.sync()
    output = engine.prepare_store([key(chunk) for chunk in chunks], CONTEXT)
    assert output is not None
    engine.complete_store(output.keys_to_store, CONTEXT)


def there(engine: CpuTier, chunks: Iterable[int]) -> set[int]:
    engine.sync()
    return {chunk for chunk in chunks if engine.lookup(key(chunk), CONTEXT) is HIT}


@pytest.fixture(params=["lru", "arc"])
def make_rows(request: pytest.FixtureRequest) -> Iterator[MakeRetaining]:
    regions: list[HostRegion] = []

    def make(chunks: int) -> Rows:
        region = unnamed_region(chunks, ROW_BYTES)
        regions.append(region)
        clock = SteppedClock()
        tier = make_cpu_tier(chunks, region, request.param, enable_events=False)
        tier._clock = clock
        return Rows(clock, tier)

    yield make
    for region in regions:
        region.cleanup()


MakeEngine = Callable[..., CpuTier]


@pytest.fixture
def clock() -> SteppedClock:
    return SteppedClock()


@pytest.fixture
def make_engine(tmp_path: Path, clock: SteppedClock) -> Iterator[MakeEngine]:
    engines: list[CpuTier] = []

    def make(rows: int, namespace: bytes = OURS) -> CpuTier:
        region = NodeRegion(tmp_path / "node", rows, ROW_BYTES, new_number())
        engines.append(make_node_tier(region, namespace, False, clock=clock))
        return engines[-1]

    yield make
    for engine in engines:
        engine.shutdown()


class TestCpuTier(RetentionContract):
    @pytest.fixture
    def make_retaining(self, make_rows: MakeRetaining) -> MakeRetaining:
        return make_rows


class TestNodeTier(RetentionContract):
    @pytest.fixture
    def make_retaining(self, make_engine: MakeEngine, clock: SteppedClock) -> MakeRetaining:
        def make(chunks: int) -> Rows:
            engines = [make_engine(chunks) for _ in range(2)]
            clock.advance(1.0)  # until each knows of the other
            for engine in engines:
                engine.sync()
            return Rows(clock, *engines)

        return make


@pytest.mark.parametrize("namespace", [OURS, THEIRS])
def test_no_other_engine_evicts_what_the_clients_of_one_retain(
    make_engine: MakeEngine, clock: SteppedClock, namespace: bytes
) -> None:
    """An engine of another model does not evict them either, as long as other chunks can leave."""
    first, second = make_engine(8), make_engine(8, namespace)
    store(first, *range(8))
    clock.advance(1.0)
    first.sync()
    first.hold(ANN, 0.5, 60.0, [key(0), key(1)])
    store(second, 10, 11, 12)
    store(second, 13, 14, 15)
    assert there(first, range(8)) == {0, 1}
    clock.advance(60.0)
    store(second, *range(20, 28))
    assert there(first, range(8)) == set()


def test_a_chunk_that_comes_after_its_hold_is_held_for_all_engines(
    make_engine: MakeEngine, clock: SteppedClock
) -> None:
    """The hold counts, whichever engine stores the chunk."""
    first, second = make_engine(4), make_engine(4)
    clock.advance(1.0)
    first.sync()
    first.hold(ANN, 0.5, 60.0, [key(0)])
    store(second, 0, 1, 2, 3)
    first.sync()
    store(second, 4, 5, 6)
    assert there(second, range(4)) == {0}


def test_what_takes_the_place_of_a_held_chunk_is_not_held(make_engine: MakeEngine, clock: SteppedClock) -> None:
    first, second = make_engine(4), make_engine(4)
    store(first, 0, 1, 2, 3)
    first.hold(ANN, 0.5, 60.0, [key(0), key(1)])
    store(second, 4, 5, 6, 7)  # nothing else can leave
    assert not any(second._index.is_held(row, clock()) for row in range(4))
    store(first, 0)
    assert second._index.is_held(first.rows_of([key(0)])[0], clock()), "held again, as its time has not passed"


def test_what_an_engine_held_is_free_to_leave_when_it_has_ended(make_engine: MakeEngine, clock: SteppedClock) -> None:
    first, second = make_engine(4), make_engine(4)
    store(first, 0, 1, 2, 3)
    first.hold(ANN, 0.5, 60.0, [key(0)])
    first._node.lease.release()  # as the kernel does
    clock.advance(1.0)
    store(second, 4)
    assert there(second, range(4)) == {1, 2, 3}


def test_a_hold_that_one_engine_gives_up_is_kept_by_the_other(make_engine: MakeEngine, clock: SteppedClock) -> None:
    first, second = make_engine(8), make_engine(8)
    store(first, *range(8))
    for engine in (first, second):
        clock.advance(1.0)
        engine.sync()
        engine.hold(ANN, 0.25, 60.0, [key(0)])  # one of each engine's four rows
    first.hold(ANN, 0.25, 60.0, [key(1)])
    store(second, *range(8, 14))
    assert there(first, range(8)) == {0, 1}
    second.hold(ANN, 0.25, 60.0, [key(8)])
    store(first, 14)
    assert there(first, range(8)) == {1}


def test_a_reset_ends_the_holds_of_its_engine_for_all(make_engine: MakeEngine, clock: SteppedClock) -> None:
    first, second = make_engine(4), make_engine(4)
    store(first, 0, 1, 2, 3)
    first.hold(ANN, 0.5, 60.0, [key(0)])
    second.sync()
    second.prepare_load([key(0)], CONTEXT)  # so that it stays
    first.reset_cache()
    second.complete_load([key(0)], CONTEXT)
    assert not second._index.any_held(clock())
    store(second, 4, 5, 6, 7)
    assert there(second, [0]) == set()


def test_an_engine_has_its_part_of_the_node_to_hold(make_engine: MakeEngine, clock: SteppedClock) -> None:
    """All engines together hold no more than half of the node."""
    first = make_engine(16)
    store(first, *range(16))
    first.hold(ANN, 0.5, 60.0, [key(chunk) for chunk in range(16)])
    assert first.held_rows() == 8
    second = make_engine(16)
    clock.advance(1.0)
    first.sync()
    second.sync()
    second.hold(BOB, 0.5, 60.0, [key(chunk) for chunk in range(8, 16)])
    assert first.held_rows() + second.held_rows() == 8
    held = [row for row in range(16) if first._index.is_held(row, clock())]
    assert len(held) == 8
