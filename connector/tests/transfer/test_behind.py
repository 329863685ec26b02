"""A load that computing overtakes is given up, whatever the tier is, also the first load of its life."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from spillway_connector.plan.load_cost import BEHIND_SECONDS_MIN, BEHIND_SHARE
from spillway_connector.testing.clock import SteppedClock
from spillway_connector.testing.faults import HangingTier
from spillway_connector.testing.tier_contract import NAMESPACE, key_of, payload_of
from spillway_connector.tiers.memory import MemoryStore, MemoryTier
from spillway_connector.transfer.breaker import BreakerState
from spillway_connector.transfer.jobs import JobOutcome
from spillway_connector.transfer.shared_tier import SharedTier, TransferLimits
from spillway_connector.transfer.stats import MissReason, Operation

PAYLOAD, CHUNKS, THREADS = 1000, 20, 2
SECONDS_PER_CHUNK = 1.0
ALLOWED = BEHIND_SHARE * CHUNKS * SECONDS_PER_CHUNK
REAL_SECONDS = 30.0


class Trickling(MemoryTier):
    """A tier whose loads end when the test says so, and which tells how many of their bytes have arrived."""

    def __init__(self, store: MemoryStore, clock: SteppedClock) -> None:
        super().__init__(NAMESPACE, PAYLOAD, store, clock=clock)
        self.received_bytes = 0
        self.may_end = threading.Event()

    def load(self, key: bytes, target: memoryview, deadline: float) -> None:
        assert self.may_end.wait(REAL_SECONDS)
        super().load(key, target, deadline)


class Rig:
    """kind: of the tier; one that hangs cannot tell what has arrived."""

    def __init__(self, kind: str) -> None:
        self.clock = SteppedClock()
        store = MemoryStore(1 << 20)
        filling = MemoryTier(NAMESPACE, PAYLOAD, store, clock=self.clock)
        for row in range(CHUNKS):
            filling.store(key_of(row), payload_of(row, PAYLOAD), self.clock() + 1)
        self.trickling = Trickling(store, self.clock)
        self.hanging = HangingTier(filling, {Operation.LOAD})
        self.rows = np.zeros((CHUNKS, PAYLOAD), np.uint8)
        self.shared = SharedTier(
            self.trickling if kind == "tells" else self.hanging,
            rows=memoryview(self.rows).cast("B"),
            row_bytes=PAYLOAD,
            payload_bytes=PAYLOAD,
            limits=TransferLimits(io_threads=THREADS, load_timeout_seconds=1e6),
            clock=self.clock,
        )
        # What the threads of a tier that cannot tell are loading counts as a whole.
        self.credit = 0.0 if kind == "tells" else THREADS * SECONDS_PER_CHUNK

    def submit(self) -> None:
        self.shared.submit_load(1, [key_of(row) for row in range(CHUNKS)], range(CHUNKS))

    def wait_until_threads_load(self) -> None:
        for _ in range(THREADS):
            assert self.hanging.entered.acquire(timeout=REAL_SECONDS)

    def look(self, spared: bool = False) -> list[JobOutcome]:
        self.shared.give_up_behind(SECONDS_PER_CHUNK, lambda job_id: spared)
        return self.shared.finished()

    def close(self) -> None:
        self.trickling.may_end.set()
        self.hanging.release()
        self.shared.close()


@pytest.fixture(params=["tells", "cannot tell"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(request.param)
    rig.submit()
    if request.param == "cannot tell":
        rig.wait_until_threads_load()
    yield rig
    rig.close()


def test_the_first_load_of_a_tier_that_gives_nothing_costs_a_small_share_of_computing(rig: Rig) -> None:
    allowed = max(rig.credit, ALLOWED)
    rig.clock.advance(allowed - 0.01)
    assert rig.look() == []
    rig.clock.advance(0.02)
    (outcome,) = rig.look()
    assert len(outcome.failed) == CHUNKS and outcome.behind is not None
    assert outcome.behind.seconds == pytest.approx(allowed + 0.01)
    stats = rig.shared.snapshot()
    assert stats.misses[MissReason.NOT_WORTH] == CHUNKS
    assert not stats.failures and not stats.shed and not stats.expiries, "nothing has failed"
    assert stats.breakers[Operation.LOAD] is BreakerState.CLOSED


def test_a_load_of_which_nobody_waits_goes_on(rig: Rig) -> None:
    rig.clock.advance(1000.0)
    assert rig.look(spared=True) == []


def test_a_load_goes_on_while_more_arrives_than_would_be_computed() -> None:
    rig = Rig("tells")
    rig.submit()
    for _ in range(CHUNKS - 1):
        rig.clock.advance(SECONDS_PER_CHUNK)
        rig.trickling.received_bytes += PAYLOAD
        assert rig.look() == []
    rig.clock.advance(ALLOWED + 0.01)
    (outcome,) = rig.look()
    assert outcome.behind is not None and outcome.behind.chunks == CHUNKS - 1
    rig.close()


def test_loads_are_judged_no_sooner_than_one_can_be_behind(rig: Rig) -> None:
    asked: list[int] = []

    def spared(job_id: int) -> bool:
        asked.append(job_id)
        return True

    rig.clock.advance(1e3)
    for _ in range(10):
        rig.shared.give_up_behind(SECONDS_PER_CHUNK, spared)
    assert len(asked) == 1
    rig.clock.advance(BEHIND_SECONDS_MIN)
    rig.shared.give_up_behind(SECONDS_PER_CHUNK, spared)
    assert len(asked) == 2
