"""A chain over real stores: a folder, and below it a bucket of a real server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from spillway_connector.config import parse_tier
from spillway_connector.engine.shared_tiers.open_shared_tier import open_shared_tier
from spillway_connector.plan.geometry import ChunkGeometry
from spillway_connector.testing.tier_contract import NAMESPACE, PAYLOAD_BYTES, key_of, payload_of
from spillway_connector.tiers.s3.place import S3Place
from spillway_connector.transfer.chain import TierChain
from spillway_connector.transfer.demotions import DemotionOutcome
from spillway_connector.transfer.jobs import JobOutcome
from spillway_connector.transfer.lookups import Lookup
from spillway_connector.transfer.shared_tier import SharedTier

GEOMETRY = ChunkGeometry(rank_block_bytes=PAYLOAD_BYTES, blocks_per_chunk=1, num_ranks=1)
ROWS = 4
KEYS = [key_of(row) for row in range(ROWS)]
PATIENCE_SECONDS = 60.0


class Engine:
    """One engine's chain, and its rows of the CPU tier."""

    def __init__(self, folder: Path, place: S3Place, mode: str) -> None:
        bucket = {"bucket": place.bucket, "prefix": place.prefix, "endpoint": place.endpoint, "path_style": True}
        below = {"type": "s3", "idle_seconds": 0.01, **bucket}
        config = parse_tier("nvme", {"path": str(folder), "mode": mode, "max_bytes": "16MiB", "below": below})
        self.rows = np.zeros((ROWS, GEOMETRY.row_bytes), np.uint8)
        rows = memoryview(self.rows).cast("B")
        chain = open_shared_tier(config, NAMESPACE, GEOMETRY, rows, announces_blocks=False)
        assert isinstance(chain, TierChain)
        self.chain = chain
        self._jobs = 0

    def ended(self, submit: Callable[[int, list[bytes], list[int]], None]) -> JobOutcome:
        self._jobs += 1
        submit(self._jobs, KEYS, list(range(ROWS)))
        while not (outcomes := self.chain.finished()):
            assert self.chain.wait_for_progress(PATIENCE_SECONDS)
        return outcomes[0]

    def look(self, tier: TierChain | SharedTier) -> list[Lookup]:
        while Lookup.PENDING in (found := tier.lookup_prefix(KEYS, "request").found):
            self.chain.step_end()
            assert self.chain.wait_for_progress(PATIENCE_SECONDS)
        return found

    def wait_for_demotions(self) -> None:
        until = time.monotonic() + PATIENCE_SECONDS
        while self.chain.demotions.outcomes().get(DemotionOutcome.STORED, 0) < ROWS:
            assert time.monotonic() < until, self.chain.demotions.outcomes()
            time.sleep(0.05)


@pytest.fixture
def engine_at() -> Iterator[Callable[[Path, S3Place, str], Engine]]:
    engines: list[Engine] = []

    def make(folder: Path, place: S3Place, mode: str) -> Engine:
        folder.mkdir()
        engines.append(Engine(folder, place, mode))
        return engines[-1]

    yield make
    for engine in engines:
        engine.chain.close()


@pytest.mark.parametrize("mode", ["files", "slab"])
def test_what_was_idle_on_one_node_is_loaded_on_another_and_then_lies_in_its_folder(
    engine_at: Callable[[Path, S3Place, str], Engine], place: S3Place, tmp_path: Path, mode: str
) -> None:
    first = engine_at(tmp_path / "first", place, mode)
    for row in range(ROWS):
        first.rows[row, :PAYLOAD_BYTES] = np.frombuffer(payload_of(row), np.uint8)
    assert first.ended(first.chain.submit_store).success
    first.wait_for_demotions()

    second = engine_at(tmp_path / "second", place, mode)
    assert second.look(second.chain) == [Lookup.HIT] * ROWS
    loaded = second.ended(second.chain.submit_load)
    assert loaded.success
    assert [second.rows[row, :PAYLOAD_BYTES].tobytes() for row in range(ROWS)] == [payload_of(r) for r in range(ROWS)]
    assert list(second.chain.take_promoted(loaded.job_id)) == KEYS
    assert second.ended(second.chain.submit_store).success
    above = second.chain.members[0]
    above.reset()
    assert second.look(above) == [Lookup.HIT] * ROWS
