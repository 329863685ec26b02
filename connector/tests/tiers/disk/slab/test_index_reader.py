from __future__ import annotations

from pathlib import Path

import pytest

from spillway_connector.tiers.disk.slab.index import SlabIndex, tenant_place
from spillway_connector.tiers.disk.slab.index_reader import open_index
from spillway_connector.tiers.disk.slab.layout import SizeClassShape
from spillway_connector.tiers.disk.slab.policy import LIVE

SHAPE = SizeClassShape(8192, 16, 4)


@pytest.fixture
def index(tmp_path: Path) -> SlabIndex:
    index = SlabIndex.create(tmp_path, SHAPE)
    SlabIndex.publish_file(tmp_path)
    for chunk in range(SHAPE.chunks):
        index.set_chunk(chunk, 1)
    for slot in range(5):
        index.claim(slot, (slot + 1, slot + 100), namespace=7, tenant=9, owner=1, now_s=50 + slot)
        index.publish(slot)
    return index


def test_it_reads_what_the_mapped_index_has(tmp_path: Path, index: SlabIndex) -> None:
    with open_index(tmp_path) as reader:
        assert reader is not None
        assert (reader.shape, reader.inode) == (SHAPE, index.identity[1])
        assert reader.used_slots() == index.used == 5
        assert reader.column("used_s", 0, 6).tolist() == [50, 51, 52, 53, 54, 0]
        assert reader.column("state", 4, 2).tolist() == [LIVE, 0]
        assert reader.element("key_high", 3) == 103
        place = tenant_place(9)
        assert reader.element("tenant_used", place) * SHAPE.slot_bytes == index.tenant_bytes_at_most(9)
        index.release(2)
        assert (reader.used_slots(), reader.element("state", 2)) == (4, 0), "as it is now"


def test_an_index_that_cannot_be_used_is_none(tmp_path: Path, index: SlabIndex) -> None:
    with open_index(tmp_path / "elsewhere") as reader:
        assert reader is None
    path = tmp_path / "index"
    whole = path.read_bytes()
    for damaged in (whole[:-4096], b"x" + whole[1:], b""):
        path.write_bytes(damaged)
        with open_index(tmp_path) as reader:
            assert reader is None
