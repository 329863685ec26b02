from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from spillway_connector.testing.clock import SteppedClock
from spillway_connector.testing.tier_contract import NAMESPACE, PAYLOAD_BYTES, key_of, payload_of, soon
from spillway_connector.tiers.disk.slab.layout import slot_bytes_of
from spillway_connector.tiers.disk.slab.tier import SlabTier
from spillway_connector.tiers.tier import EvictionReason

SLOT_BYTES = slot_bytes_of(PAYLOAD_BYTES)
NEVER = 1e7  # a deadline on a stepped clock
WAIT_SECONDS = 60.0


def bytes_on_disk(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


def filled(root: Path, frames: int, **options: object) -> SlabTier:
    tier = SlabTier(NAMESPACE, PAYLOAD_BYTES, root, max_bytes=100 * SLOT_BYTES, **options)  # type: ignore[arg-type]
    deadline = NEVER if "clock" in options else soon()
    for seed in range(frames):
        tier.store(key_of(seed), payload_of(seed), deadline)
    return tier


def test_a_bound_that_was_lowered_is_kept_without_a_store(tmp_path: Path) -> None:
    filled(tmp_path, 60).close()
    assert bytes_on_disk(tmp_path) > 40 * SLOT_BYTES
    idle = SlabTier(NAMESPACE, PAYLOAD_BYTES, tmp_path, max_bytes=40 * SLOT_BYTES)
    assert idle.contains([key_of(59)], soon()) == [True]
    idle.maintain(soon())
    assert bytes_on_disk(tmp_path) <= 40 * SLOT_BYTES
    assert idle.contains([key_of(0), key_of(59)], soon()) == [False, True]
    idle.close()


def test_expired_entries_are_removed_without_a_store(tmp_path: Path) -> None:
    clock = SteppedClock()
    tier = filled(tmp_path, 4, clock=clock, ttl_seconds=100)
    clock.advance(101)
    tier.maintain(NEVER)
    assert tier.evictions[EvictionReason.TTL] == 4
    tier.close()


def test_the_space_of_a_dropped_chunk_is_free_although_others_have_it_open(tmp_path: Path) -> None:
    filled(tmp_path, 60).close()
    chunks = sorted(tmp_path.glob("slab/*/*.slab"))
    held = {chunk: chunk.open("rb") for chunk in chunks}
    assert all(os.fstat(file.fileno()).st_blocks for file in held.values())
    smaller = SlabTier(NAMESPACE, PAYLOAD_BYTES, tmp_path, max_bytes=40 * SLOT_BYTES)
    smaller.prepare(soon())
    smaller.maintain(soon())
    dropped = [chunk for chunk in chunks if not chunk.exists()]
    assert dropped
    for chunk, file in held.items():
        assert (os.fstat(file.fileno()).st_blocks == 0) is (chunk in dropped)
        file.close()
    smaller.close()


def test_no_more_is_given_back_than_others_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds for a file system, too, that says only later that removed files have left it."""
    filled(tmp_path, 90).close()
    taken = bytes_on_disk(tmp_path)
    real = os.statvfs(tmp_path)
    full = os.statvfs_result([*real[:3], 0, 0, *real[5:]])
    tier = SlabTier(NAMESPACE, PAYLOAD_BYTES, tmp_path)
    monkeypatch.setattr("spillway_connector.tiers.disk.slab.space.os.statvfs", lambda path: full)
    tier.contains([key_of(0)], soon())
    tier.maintain(soon())
    [chunk_bytes] = {path.stat().st_size for path in tmp_path.glob("slab/*/*.slab")}
    assert 0.8 * taken - chunk_bytes <= bytes_on_disk(tmp_path) <= 0.8 * taken
    tier.close()


def test_a_reader_of_a_dropped_chunk_misses(tmp_path: Path) -> None:
    """The entry is gone before the bytes are."""
    reader = filled(tmp_path, 60)
    smaller = SlabTier(NAMESPACE, PAYLOAD_BYTES, tmp_path, max_bytes=20 * SLOT_BYTES)
    target = memoryview(bytearray(PAYLOAD_BYTES))
    smaller.prepare(soon())
    before = {seed for seed in range(60) if reader.contains([key_of(seed)], soon()) == [True]}
    smaller.maintain(soon())
    left = {seed for seed in before if reader.contains([key_of(seed)], soon()) == [True]}
    assert left and left < before
    for seed in left:
        reader.load(key_of(seed), target, soon())
        assert target == payload_of(seed)
    for tier in (reader, smaller):
        tier.close()


def test_a_directory_that_was_removed_stays_removed(tmp_path: Path) -> None:
    tier = filled(tmp_path / "kv", 4)
    shutil.rmtree(tmp_path / "kv")
    tier.maintain(soon())
    assert not (tmp_path / "kv").exists()
    tier.close()


def test_nothing_is_touched_before_the_first_operation(tmp_path: Path) -> None:
    tier = SlabTier(NAMESPACE, PAYLOAD_BYTES, tmp_path / "kv")
    tier.maintain(soon())
    assert not (tmp_path / "kv").exists()
    tier.close()


@pytest.mark.parametrize("use", [lambda tier: tier.prepare(soon()), lambda tier: tier.contains([], soon())])
def test_the_thread_lives_from_the_first_use_to_the_end(tmp_path: Path, use: Callable[[SlabTier], object]) -> None:
    before = set(threading.enumerate())
    tier = SlabTier(NAMESPACE, PAYLOAD_BYTES, tmp_path)
    assert set(threading.enumerate()) == before
    use(tier)
    [thread] = set(threading.enumerate()) - before
    tier.close()
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive()
