"""Frames whose header has a page of its own, or the end of the last one: what lies where, in either layout."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_connector.errors import TierMiss
from spillway_connector.testing.tier_contract import NAMESPACE, error_of, key_of, soon
from spillway_connector.tiers.disk.files.inspect import FileInspector
from spillway_connector.tiers.disk.files.tier import FileTier
from spillway_connector.tiers.disk.frame_places import FramePlaces, last_header_at
from spillway_connector.tiers.disk.io import FrameFiles
from spillway_connector.tiers.disk.slab.inspect import SlabInspector
from spillway_connector.tiers.disk.slab.layout import slot_bytes_of
from spillway_connector.tiers.disk.slab.tier import SlabTier
from spillway_connector.tiers.frame import HEADER_BYTES, MAGIC, PAGE_BYTES, build_header, read_header
from spillway_connector.tiers.tier import StoreOutcome

# The whole range of what the last page leaves: nothing, too little, just enough, much; and no whole page.
PAYLOADS = (3 * PAGE_BYTES, 3 * PAGE_BYTES + 3905, 3 * PAGE_BYTES + 3904, 3 * PAGE_BYTES + 100, 100)
each_payload = pytest.mark.parametrize("payload_bytes", PAYLOADS)


def payload_of(seed: int, size: int) -> memoryview:
    return memoryview(random.Random(seed).randbytes(size))


def slabs(root: Path, payload_bytes: int) -> SlabTier:
    return SlabTier(NAMESPACE, payload_bytes, root, max_bytes=8 << 20)


def load(tier: SlabTier | FileTier, seed: int) -> bytes:
    target = memoryview(bytearray(tier.payload_bytes))
    tier.load(key_of(seed), target, soon())
    return bytes(target)


@given(payload_bytes=st.integers(1, 1 << 22))
def test_header_and_payload_share_no_byte_and_no_page_too_many(payload_bytes: int) -> None:
    places = FramePlaces.of(payload_bytes)
    assert places.frame_bytes % PAGE_BYTES == places.payload_at % PAGE_BYTES == 0
    header, payload = (
        range(places.header_at, places.header_at + places.header_bytes),
        range(places.payload_at, places.payload_at + payload_bytes),
    )
    assert header.stop <= payload.start or payload.stop <= header.start
    assert max(header.stop, payload.stop) <= places.frame_bytes
    assert places.frame_bytes < HEADER_BYTES + payload_bytes + PAGE_BYTES
    assert slot_bytes_of(payload_bytes) == places.frame_bytes
    if places.header_is_last:
        assert places.header_at == last_header_at(places.frame_bytes)


@each_payload
def test_bytes_lie_where_they_are_said_to_lie(tmp_path: Path, payload_bytes: int) -> None:
    files, places = FrameFiles(payload_bytes, clock=time.monotonic, wall_clock=time.time), FramePlaces.of(payload_bytes)
    payload = payload_of(1, payload_bytes)
    header = build_header(NAMESPACE.digest16, key_of(1), payload, created_ms=1, header_bytes=places.header_bytes)
    path, offset = tmp_path / "frame", 2 * places.frame_bytes
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR)
    try:
        files.write_at(descriptor, offset, header, payload, soon())
        raw = path.read_bytes()[offset:]
        assert len(raw) == places.frame_bytes
        assert raw[places.header_at :][: places.header_bytes] == header
        assert raw[places.payload_at :][:payload_bytes] == payload
        target = memoryview(bytearray(payload_bytes))
        assert files.read_at(descriptor, offset, target, soon()) == header
        assert target == payload
        assert FramePlaces.announced(read_header(header)) == places
    finally:
        os.close(descriptor)


@each_payload
def test_an_index_and_a_header_table_that_are_lost_are_made_again_from_the_slots(
    tmp_path: Path, payload_bytes: int
) -> None:
    """Slots of two models, one of each kind of frame if they can have one size, lie in one size class."""
    beside = next(
        size for size in (payload_bytes + 1, payload_bytes - 1) if slot_bytes_of(size) == slot_bytes_of(payload_bytes)
    )
    tier, other = slabs(tmp_path, payload_bytes), slabs(tmp_path, beside)
    for seed in range(4):
        tier.store(key_of(seed), payload_of(seed, payload_bytes), soon())
        other.store(key_of(seed + 10), payload_of(seed, beside), soon())
    tier.discard(key_of(1), soon())
    for each in (tier, other):
        each.close()
    (folder,) = (tmp_path / "slab").glob("[0-9]*")
    for name in ("index", "headers"):
        (folder / name).unlink()
    again, other = slabs(tmp_path, payload_bytes), slabs(tmp_path, beside)
    assert again.contains([key_of(seed) for seed in range(4)], soon()) == [True, False, True, True]
    assert [load(again, seed) == payload_of(seed, payload_bytes) for seed in (0, 2, 3)] == [True] * 3
    assert [load(other, seed + 10) == payload_of(seed, beside) for seed in range(4)] == [True] * 4
    for each in (again, other):
        each.close()


@each_payload
@pytest.mark.parametrize("layout", ["slabs", "files"])
def test_operators_read_prove_and_remove_frames_of_either_kind(tmp_path: Path, payload_bytes: int, layout: str) -> None:
    tier = slabs(tmp_path, payload_bytes) if layout == "slabs" else FileTier(NAMESPACE, payload_bytes, tmp_path)
    for seed in range(3):
        tier.store(key_of(seed), payload_of(seed, payload_bytes), soon())
    inspector = (SlabInspector if layout == "slabs" else FileInspector)(tmp_path)
    frames = sorted(inspector.frames(headers=True), key=lambda frame: frame.key or b"")
    assert {(frame.key, frame.payload_bytes, frame.damage) for frame in frames} == {
        (key_of(seed), payload_bytes, None) for seed in range(3)
    }
    assert [inspector.verify(frame) for frame in frames] == [None] * 3
    assert inspector.remove(frames[:1], only_unused=False).frames == 1
    inspector.close()
    assert tier.contains([frames[0].key or b""], soon()) == [False]
    raws = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.suffix in (".kv", ".slab"))
    assert raws.count(MAGIC) == 2  # the removed one leaves no header that a rebuild would find
    tier.close()


# --- frames of earlier versions, which gave each header a page --------------------------------------------------------


@pytest.fixture
def header_pages(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Whether each header has a page of its own from now on."""
    usual = FramePlaces.of

    def switch(on: bool) -> None:
        monkeypatch.setattr(
            FramePlaces, "of", (lambda payload_bytes: FramePlaces(payload_bytes, False)) if on else usual
        )

    return switch


@pytest.mark.parametrize("layout", ["slabs", "files"])
def test_a_frame_of_an_earlier_version_is_a_miss_and_makes_way(
    tmp_path: Path, header_pages: Callable[[bool], None], layout: str
) -> None:
    payload_bytes = PAGE_BYTES + 100
    make = slabs if layout == "slabs" else lambda root, size: FileTier(NAMESPACE, size, root)
    header_pages(True)
    earlier = make(tmp_path, payload_bytes)
    earlier.store(key_of(1), payload_of(1, payload_bytes), soon())
    header_pages(False)
    inspector = (SlabInspector if layout == "slabs" else FileInspector)(tmp_path)
    (frame,) = inspector.frames(headers=True)
    assert (frame.damage, inspector.verify(frame)) == (None, None)
    inspector.close()
    tier = make(tmp_path, payload_bytes)
    assert tier.contains([key_of(1)], soon()) == [False]
    if layout == "slabs":
        assert isinstance(error_of(lambda: load(tier, 1)), TierMiss)
    assert tier.store(key_of(1), payload_of(1, payload_bytes), soon()) is StoreOutcome.STORED
    assert load(tier, 1) == payload_of(1, payload_bytes)
    # A process of that version beside it goes on, and does not take turns with it over one key.
    assert earlier.contains([key_of(1)], soon()) == [layout == "slabs"]
    for each in (earlier, tier):
        each.close()


def test_a_file_that_was_cut_is_stored_again(tmp_path: Path) -> None:
    tier = FileTier(NAMESPACE, PAGE_BYTES, tmp_path)
    tier.store(key_of(1), payload_of(1, PAGE_BYTES), soon())
    before = tier.resident_bytes(soon())
    (path,) = tmp_path.rglob("*.kv")
    os.truncate(path, 100)
    assert tier.contains([key_of(1)], soon()) == [False]
    assert tier.store(key_of(1), payload_of(1, PAGE_BYTES), soon()) is StoreOutcome.STORED
    assert load(tier, 1) == payload_of(1, PAGE_BYTES)
    assert before <= tier.resident_bytes(soon()) <= 2 * before  # what was cut off is not known to the ledger
    tier.close()
