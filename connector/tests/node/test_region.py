"""The places of a region: an engine that starts while all are taken waits for those of engines that were killed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from spillway_connector.errors import HostMemoryError
from spillway_connector.node import region as region_module
from spillway_connector.node.region import NodeRegion
from spillway_connector.plan.node_index import DEAD_ROWS_KEPT_MS, ENGINES_MAX
from spillway_connector.tiers.disk.slab.writers import WriterLease, new_number

ROWS, ROW_BYTES = 4, 4096


@pytest.fixture
def region(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeRegion]:
    monkeypatch.setattr(region_module, "_PLACE_RETRY_SECONDS", 0.0)
    region = NodeRegion(tmp_path, ROWS, ROW_BYTES, new_number())
    yield region
    region.close()


def taken_by(region: NodeRegion, engines: int) -> list[WriterLease]:
    """Engines that run and have a place."""
    leases = [WriterLease(region.path / "writers", new_number()) for _ in range(engines)]
    with region.changing() as index:
        for lease in leases:
            lease.acquire()
            assert index.join(lease.number) is not None
    return leases


def test_an_engine_waits_until_one_of_64_that_were_killed_at_once_gives_up_its_place(
    region: NodeRegion, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO")
    for lease in taken_by(region, ENGINES_MAX):
        lease.release()  # as the kernel does when the engine is killed
    times = count(1000, DEAD_ROWS_KEPT_MS // 4)
    assert region.join(times.__next__) in range(ENGINES_MAX)
    assert next(times) > 1000 + DEAD_ROWS_KEPT_MS, "rows that a device may still write to were given away"
    assert region.index.engines() == 1
    assert [record.message for record in caplog.records if "waiting for a place" in record.message] == [
        f"Spillway: waiting for a place in {region.path} that an engine which was killed has"
    ]


def test_no_wait_helps_if_every_place_has_an_engine_that_runs(region: NodeRegion):
    leases = taken_by(region, ENGINES_MAX)
    times = iter([1000])  # and no second one
    with pytest.raises(HostMemoryError, match="no place for another engine; start fewer"):
        region.join(times.__next__)
    leases[0].release()
    assert region.join(count(2000, DEAD_ROWS_KEPT_MS).__next__) == 0


def test_the_wait_for_a_place_is_bounded(region: NodeRegion):
    for lease in taken_by(region, ENGINES_MAX):
        lease.release()
    with pytest.raises(HostMemoryError, match="no place for another engine"):
        region.join(lambda: 1000, patience_seconds=0.05)  # a clock that stands still
