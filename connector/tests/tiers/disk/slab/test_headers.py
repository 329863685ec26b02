from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from spillway_connector.tiers.disk.slab.headers import HeaderTable
from spillway_connector.tiers.disk.slab.layout import TABLE_NAME, SizeClassShape
from spillway_connector.tiers.frame import HEADER_BYTES, build_header

SHAPE = SizeClassShape(8192, 5, 4)


def _header(number: int) -> bytes:
    return build_header(bytes(16), bytes([number]) * 36, b"payload", created_ms=number, header_bytes=4096)


@pytest.fixture
def table(tmp_path: Path) -> HeaderTable:
    table = HeaderTable(tmp_path, SHAPE)
    table.create()
    table.publish_file()
    return table


def _listed(folder: Path, shape: SizeClassShape = SHAPE) -> dict[int, bytes]:
    """Read the headers by slot, as a process that has just started does."""
    table = HeaderTable(folder, shape)
    found = np.concatenate([table.read_chunk(chunk) for chunk in range(shape.chunks)])
    return {slot: found[slot].tobytes() for slot in np.flatnonzero(found.any(1)).tolist()}


def test_a_record_is_listed_until_it_is_cleared(table: HeaderTable, tmp_path: Path) -> None:
    for slot in (0, 4, 5, 19):
        table.put(slot, _header(slot + 1))
    assert _listed(tmp_path) == {slot: _header(slot + 1)[:HEADER_BYTES] for slot in (0, 4, 5, 19)}
    table.clear(4)
    assert sorted(_listed(tmp_path)) == [0, 5, 19]
    table.clear_chunk(1)
    assert sorted(_listed(tmp_path)) == [0, 19]
    headers = np.zeros((5, HEADER_BYTES), np.uint8)
    headers[2] = np.frombuffer(_header(9)[:HEADER_BYTES], np.uint8)
    table.write_chunk(0, headers)
    assert _listed(tmp_path) == {2: _header(9)[:HEADER_BYTES], 19: _header(20)[:HEADER_BYTES]}


def test_any_flipped_bit_of_a_record_loses_that_record_alone(table: HeaderTable, tmp_path: Path) -> None:
    for slot in (6, 7, 8):
        table.put(slot, _header(slot))
    path = tmp_path / TABLE_NAME
    whole = path.read_bytes()
    for position in range(200):
        damaged = bytearray(whole)
        damaged[4096 + 7 * 200 + position] ^= 1 << position % 8
        path.write_bytes(damaged)
        assert sorted(_listed(tmp_path)) == [6, 8]


def test_a_table_that_is_cut_short_lists_what_is_left(table: HeaderTable, tmp_path: Path) -> None:
    for slot in range(20):
        table.put(slot, _header(slot + 1))
    os.truncate(tmp_path / TABLE_NAME, 4096 + 200 * 7 + 50)
    assert sorted(_listed(tmp_path)) == list(range(7))


def test_a_table_grows_with_its_size_class(table: HeaderTable, tmp_path: Path) -> None:
    larger = SizeClassShape(8192, 5, 6)
    table.put(3, _header(3))
    table.grow(larger)
    table.put(29, _header(29))
    assert (tmp_path / TABLE_NAME).stat().st_size == larger.table_bytes
    assert sorted(_listed(tmp_path, larger)) == [3, 29]


def test_without_a_table_of_this_size_class_nothing_happens(table: HeaderTable, tmp_path: Path) -> None:
    table.put(1, _header(1))
    before = (tmp_path / TABLE_NAME).read_bytes()
    for other in (HeaderTable(tmp_path, SizeClassShape(8192, 6, 4)), HeaderTable(tmp_path / "none", SHAPE)):
        assert not other.exists()
        other.put(2, _header(2))
        other.clear(1)
        other.clear_chunk(0)
        other.grow(SizeClassShape(8192, 6, 9))
        assert not other.read_chunk(0).any()
    assert (tmp_path / TABLE_NAME).read_bytes() == before
