"""Agreement of a pipeline's processes: the workers ask each other, and the scheduler's process reads the rows.

The exchange between two workers is tested in tests/engine_matrix.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from spillway_connector.device.host_region import HostRegion, region_path
from spillway_connector.engine.layouts import stages
from spillway_connector.engine.layouts.kv_layout import write_layout
from spillway_connector.engine.layouts.packed_blocks import NOT_KNOWN_HERE
from spillway_connector.engine.layouts.stages import StageFacts, agree, joined, without_agreed
from spillway_connector.errors import ConfigError

FIRST, LAST = StageFacts(4096, ranks_hold_the_same=True), StageFacts(8192, ranks_hold_the_same=True)


@pytest.fixture
def region() -> Iterator[HostRegion]:
    opened = HostRegion(region_path(f"test-stages-{os.getpid()}"), 2, 8192)
    yield opened
    opened.cleanup()


def test_without_a_pipeline_a_worker_asks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages.parallel_state, "model_parallel_is_initialized", lambda: True)
    assert agree(FIRST, 1, tmp_path / "none") is FIRST


def test_without_a_pipeline_the_scheduler_asks_whether_ranks_hold_the_same(tmp_path: Path, region: HostRegion) -> None:
    """The scheduler sees MLA in the first layer, and the workers see the heads of a drafter in another."""
    of_each = replace(FIRST, ranks_hold_the_same=False)
    rows = region.create_kv_memoryview().cast("B")
    write_layout(rows, 0, 4096, {"layers": ["a layer"]}, of_each.as_layout())
    rows.release()
    assert agree(FIRST, 1, region.path) == of_each
    assert agree(of_each, 1, tmp_path / "none") is of_each


def test_the_largest_stage_decides_and_one_with_heads_of_its_own() -> None:
    assert joined([FIRST, LAST]) == LAST
    assert joined([LAST, StageFacts(100, ranks_hold_the_same=False)]) == StageFacts(8192, ranks_hold_the_same=False)


@pytest.mark.parametrize("layers", [3, 3000])  # a description, and a digest where it does not fit
def test_the_scheduler_hears_what_the_workers_agreed_on(region: HostRegion, layers: int) -> None:
    rows = region.create_kv_memoryview().cast("B")
    write_layout(rows, 0, 4096, {"layers": ["a layer"] * layers}, LAST.as_layout())
    rows.release()
    assert agree(FIRST, 2, region.path) == LAST


def test_a_scheduler_without_workers_on_its_machine_says_so(tmp_path: Path, region: HostRegion) -> None:
    with pytest.raises(ConfigError, match="a replica must run on one machine"):
        agree(FIRST, 2, tmp_path / "none")
    with pytest.raises(ConfigError, match="a replica must run on one machine"):
        agree(FIRST, 2, region.path)  # rows without a description


def test_what_others_put_in_the_place_of_the_rows_is_neither_read_nor_waited_for(
    tmp_path: Path, region: HostRegion
) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(region.path)
    for name in ("fifo", "link"):
        with pytest.raises(ConfigError, match="not a file of this store"):
            agree(FIRST, 2, tmp_path / name)


def test_a_process_that_cannot_tell_how_large_a_block_is_asks_the_workers(
    region: HostRegion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker may be in the scheduler's process, with vLLM's ranks in it."""
    monkeypatch.setattr(stages.parallel_state, "model_parallel_is_initialized", lambda: True)
    rows = region.create_kv_memoryview().cast("B")
    write_layout(rows, 0, 4096, {"layers": ["a layer"]}, LAST.as_layout())
    rows.release()
    assert agree(StageFacts(NOT_KNOWN_HERE, ranks_hold_the_same=True), 1, region.path) == LAST


def test_what_was_agreed_on_is_no_part_of_a_description() -> None:
    assert without_agreed({"layers": ["a layer"], **LAST.as_layout()}) == {"layers": ["a layer"]}
