from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from spillway_connector.testing.tier_contract import NAMESPACE, OTHER_NAMESPACE, PAYLOAD_BYTES, key_of, payload_of, soon
from spillway_connector.tiers.disk.root import SLAB_FOLDER
from spillway_connector.tiers.disk.slab.index import SlabIndex
from spillway_connector.tiers.disk.slab.index_reader import IndexReader
from spillway_connector.tiers.disk.slab.inspect import SlabInspector
from spillway_connector.tiers.disk.slab.layout import SizeClassShape, slot_bytes_of
from spillway_connector.tiers.disk.slab.policy import LIVE
from spillway_connector.tiers.disk.slab.tier import SlabTier
from spillway_connector.tiers.inspection import Gone

MAX_BYTES = 8 << 20


def fill(root: Path, count: int, namespace=NAMESPACE) -> None:
    tier = SlabTier(namespace, PAYLOAD_BYTES, root, max_bytes=MAX_BYTES)
    for seed in range(count):
        tier.store(key_of(seed), payload_of(seed), soon())
    tier.close()


def test_a_walk_finds_what_was_stored(tmp_path: Path) -> None:
    fill(tmp_path, 5)
    inspector = SlabInspector(tmp_path)
    found = list(inspector.frames(headers=True))
    assert {frame.key for frame in found} == {key_of(seed) for seed in range(5)}
    assert {frame.namespace for frame in found} == {NAMESPACE.digest16}
    assert all(inspector.verify(frame) is None for frame in found)
    assert inspector.frames_in_use()[:2] == (5, sum(frame.stored_bytes for frame in found))


def test_namespaces_are_told_apart_even_without_their_documents(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    fill(tmp_path, 2, OTHER_NAMESPACE)
    inspector = SlabInspector(tmp_path)
    for _ in range(2):
        for headers in (False, True):
            found = inspector.frames(headers=headers, namespace_prefix=OTHER_NAMESPACE.hex)
            assert [frame.namespace for frame in found] == [OTHER_NAMESPACE.digest16] * 2
        (tmp_path / OTHER_NAMESPACE.hex / "namespace.json").unlink(missing_ok=True)
        (tmp_path / OTHER_NAMESPACE.hex).rmdir() if (tmp_path / OTHER_NAMESPACE.hex).exists() else None


def test_a_slot_that_is_claimed_anew_is_not_the_frame_that_was_seen(tmp_path: Path) -> None:
    tier = SlabTier(NAMESPACE, PAYLOAD_BYTES, tmp_path, max_bytes=MAX_BYTES)
    tier.store(key_of(1), payload_of(1), soon())
    inspector = SlabInspector(tmp_path)
    [seen] = inspector.frames(headers=True)
    tier.discard(key_of(1), soon())
    with pytest.raises(Gone):
        inspector.verify(seen)
    tier.store(key_of(2), payload_of(2), soon())
    assert inspector.remove([seen], only_unused=False).frames == 0
    assert tier.contains([key_of(2)], soon()) == [True]
    tier.close()


def test_a_slot_that_is_claimed_while_it_is_walked_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, 1)
    column, looks = IndexReader.column, []

    def claim() -> None:
        index = SlabIndex.open(tmp_path / SLAB_FOLDER / str(slot_bytes_of(PAYLOAD_BYTES)), writable=True)
        assert index is not None
        [slot] = np.flatnonzero(index.state == LIVE).tolist()
        with index.changing():
            index.put("generation", slot, int(index.generation[slot]) + 1)
            index.put("key_low", slot, int(index.key_low[slot]) ^ 1)

    def column_then_claim(self: IndexReader, name: str, first: int, count: int) -> npt.NDArray[np.generic]:
        found = column(self, name, first, count)
        if name in ("state", "generation"):
            looks.append(name)
            if len(looks) == 1:
                claim()
        return found

    monkeypatch.setattr(IndexReader, "column", column_then_claim)
    inspector = SlabInspector(tmp_path)
    [seen] = inspector.frames(headers=False)
    with pytest.raises(Gone):
        inspector.verify(seen)


def test_a_removal_that_was_killed_is_put_right_by_the_next_holder_of_the_lock(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    inspector = SlabInspector(tmp_path)
    seen = list(inspector.frames(headers=False))
    [folder] = (tmp_path / SLAB_FOLDER).glob("[0-9]*")
    index = SlabIndex.open(folder, writable=True)
    assert index is not None
    index.put("dirty", 0, 1)
    index.put("state", seen[0].handle.slot, 0)  # freed, but not yet counted
    assert inspector.remove(seen[1:2], only_unused=False).frames == 1
    assert index.follow()
    assert (index.used, index.counter("dirty")) == (1, 0)
    inspector.close()


def test_half_a_million_slots_are_walked_in_bounded_memory(tmp_path: Path) -> None:
    slots = 1 << 19
    folder = tmp_path / SLAB_FOLDER / "8192"
    folder.mkdir(parents=True)
    (tmp_path / NAMESPACE.hex).mkdir()
    (tmp_path / NAMESPACE.hex / "namespace.json").write_bytes(NAMESPACE.document)
    index = SlabIndex.create(folder, SizeClassShape(8192, slots // 16, 16))
    index.put_all("state", np.full(slots, LIVE, np.uint8))
    index.put_all("namespace", np.full(slots, int.from_bytes(NAMESPACE.digest16[:8], "little"), np.uint64))
    index.put_all("used_s", np.full(slots, int(time.time()), np.uint32))
    index.put_all("chunk_epoch", np.ones(16, np.uint32))
    SlabIndex.publish_file(folder)
    del index
    walked, blocks = 0, []
    for frame in SlabInspector(tmp_path).frames(headers=False):
        walked += 1
        if walked % (1 << 17) == 1 << 16:
            blocks.append(sys.getallocatedblocks())
        assert frame.namespace == NAMESPACE.digest16
    assert walked == slots
    # A stretch of 65,536 slot numbers is the most that is held at once.
    assert max(blocks) - min(blocks) < 3 * (1 << 16)


def test_a_link_in_the_place_of_a_chunk_is_named_and_not_written_through(tmp_path: Path) -> None:
    root, victim = tmp_path / "kv", tmp_path / "victim"
    fill(root, 3)
    victim.write_bytes(b"the node's" * 10_000)
    inspector = SlabInspector(root)
    frames = list(inspector.frames(headers=True))
    for chunk in root.rglob("*.slab"):
        chunk.unlink()
        chunk.symlink_to(victim)
    assert {frame.damage.reason for frame in inspector.frames(headers=True) if frame.damage} == {"foreign"}
    assert inspector.remove(frames, only_unused=False).frames == 3
    assert victim.read_bytes() == b"the node's" * 10_000
    inspector.close()
