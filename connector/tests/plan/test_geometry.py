from __future__ import annotations

import importlib.util
import mmap
import sys
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_connector.errors import ConfigError
from spillway_connector.plan import geometry as geometry_module
from spillway_connector.plan.geometry import ROW_ALIGNMENT_BYTES, ChunkGeometry


def test_the_bundled_model_in_bfloat16():
    """30 layers x 3 KV heads x 64 x (K and V) x 2 bytes = 23,040 bytes a token, 128 tokens a block."""
    geometry = ChunkGeometry(rank_block_bytes=23_040 * 128, blocks_per_chunk=1, num_ranks=1)
    assert geometry.payload_bytes == 2_949_120
    assert geometry.row_bytes == 2_949_120  # already a multiple of a page
    assert geometry.rows_in(1 << 30) == 364


@given(st.integers(1, 1 << 26), st.integers(1, 16), st.integers(1, 16))
def test_a_row_holds_every_rank_and_less_than_a_page_of_padding(block_bytes, per_chunk, ranks):
    geometry = ChunkGeometry(block_bytes, per_chunk, ranks)
    assert geometry.payload_bytes == block_bytes * per_chunk * ranks
    assert 0 <= geometry.row_bytes - geometry.payload_bytes < ROW_ALIGNMENT_BYTES
    assert geometry.row_bytes % ROW_ALIGNMENT_BYTES == 0
    assert geometry.rows_in(geometry.row_bytes * 7 + 1) == 7


@given(
    st.integers(1, 1 << 22),
    st.integers(1, 4),
    st.integers(1, 8),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([4096, 16_384, 65_536]),
)
def test_the_pages_of_all_ranks_are_the_row(block_bytes, per_chunk, stage_ranks, stages, one_cell, page_bytes):
    """The pages are those of any kernel, whatever this one's are."""
    ranks = stage_ranks * stages
    geometry = ChunkGeometry(block_bytes, per_chunk, ranks, one_cell, page_bytes, stages)
    assert geometry.row_bytes % page_bytes == 0
    assert 0 <= geometry.row_bytes - geometry.payload_bytes < page_bytes
    at = 0
    for rank in range(ranks):
        offset, length = geometry.own_pages(rank)
        assert (offset, offset % page_bytes, length % page_bytes) == (at, 0, 0)
        at += length
        if not one_cell and geometry.rank_cell_bytes >= 2 * page_bytes:
            cell = geometry.cell_of(rank)
            assert offset <= cell < offset + length and at > cell + geometry.rank_cell_bytes - page_bytes
    assert at == geometry.row_bytes


def test_rows_are_whole_pages_of_this_kernel():
    assert ROW_ALIGNMENT_BYTES % mmap.PAGESIZE == 0
    assert ChunkGeometry(1, 1, 1).row_bytes == ROW_ALIGNMENT_BYTES


def geometry_of_kernel(page_bytes: int, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module as a process on a kernel with these pages imports it."""
    monkeypatch.setattr(mmap, "PAGESIZE", page_bytes)
    spec = geometry_module.__spec__
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "_geometry_of_another_kernel", loaded)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.mark.parametrize(("kernel", "rows"), [(512, 4096), (4096, 4096), (16_384, 16_384), (65_536, 65_536)])
def test_rows_are_whole_pages_of_any_kernel_without_being_told(monkeypatch, kernel, rows):
    """Rows are never less than what direct I/O needs."""
    loaded = geometry_of_kernel(kernel, monkeypatch)
    assert rows == loaded.ROW_ALIGNMENT_BYTES
    geometry = loaded.ChunkGeometry(3 * 4096 + 100, 2, 3)
    assert geometry.row_bytes % rows == 0
    assert all(edge % rows == 0 for rank in range(3) for edge in geometry.own_pages(rank))


def test_ranks_that_hold_the_same_fill_one_cell():
    """DeepSeek-V3 on eight ranks: 61 layers x 576 numbers x 2 bytes a token, on each of them."""
    geometry = ChunkGeometry(61 * 576 * 2 * 128, blocks_per_chunk=1, num_ranks=8, one_cell=True)
    assert geometry.payload_bytes == geometry.rank_cell_bytes == 128 * 70_272
    assert [geometry.cell_of(rank) for rank in range(8)] == [0] * 8
    assert [geometry.store_share(rank) for rank in range(8)] == [(rank, 8) for rank in range(8)]
    assert 8 * geometry.layout_bytes <= geometry.payload_bytes


def test_each_stage_of_a_pipeline_has_a_cell_that_its_ranks_fill():
    """DeepSeek-V3 on two stages of four ranks: 31 layers and 30, in cells of 31."""
    geometry = ChunkGeometry(31 * 576 * 2 * 128, blocks_per_chunk=1, num_ranks=8, one_cell=True, stages=2)
    cell = geometry.rank_cell_bytes
    assert geometry.payload_bytes == 2 * cell
    assert [geometry.cell_of(rank) for rank in range(8)] == [0] * 4 + [cell] * 4
    assert [geometry.store_share(rank) for rank in range(8)] == [(rank, 4) for rank in range(4)] * 2
    assert 8 * geometry.layout_bytes <= geometry.payload_bytes


def test_stages_whose_ranks_have_heads_of_their_own_have_a_cell_for_each():
    geometry = ChunkGeometry(4096, blocks_per_chunk=1, num_ranks=4, stages=2)
    assert [geometry.cell_of(rank) for rank in range(4)] == [0, 4096, 8192, 12_288]
    assert {geometry.store_share(rank) for rank in range(4)} == {(0, 1)}


def test_ranks_with_heads_of_their_own_fill_a_cell_each():
    geometry = ChunkGeometry(4096, blocks_per_chunk=2, num_ranks=2)
    assert [geometry.cell_of(rank) for rank in range(2)] == [0, 8192]
    assert [geometry.store_share(rank) for rank in range(2)] == [(0, 1), (0, 1)]
    assert geometry.layout_bytes == geometry.rank_cell_bytes


def test_a_budget_below_one_chunk_names_the_remedy():
    with pytest.raises(ConfigError, match=f"set cpu_bytes_to_use >= {ROW_ALIGNMENT_BYTES}"):
        ChunkGeometry(100, 1, 1).rows_in(4095)
