"""Loads from the page cache: which frames stay there, and what a load makes of what it finds. Real files; that the rest
of the tier's promises hold on this way too is said by running its tests on both (test_tier.py, ../test_faults.py)."""

from __future__ import annotations

import errno
import mmap
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spillway_connector.errors import CorruptReason, TierCorrupt, TierMiss, UnreachableReason
from spillway_connector.testing.cache_first import CacheFirst
from spillway_connector.testing.tier_contract import NAMESPACE, PAYLOAD_BYTES, error_of, key_of, load, payload_of, soon
from spillway_connector.tiers.disk import io as disk_io
from spillway_connector.tiers.disk import page_cache
from spillway_connector.tiers.disk.page_cache import is_cached, read_cached, supports_page_cache, write_through
from spillway_connector.tiers.disk.slab.layout import slot_bytes_of
from spillway_connector.tiers.disk.slab.tier import SlabTier
from spillway_connector.tiers.frame import HEADER_BYTES, PAGE_BYTES
from spillway_connector.tiers.sealed import SEAL_BYTES, SealedTier, SealKey, sealed_namespace
from spillway_connector.tiers.tier import StoreOutcome

SLOT_BYTES = slot_bytes_of(PAYLOAD_BYTES)
MakeTier = Callable[..., CacheFirst]


@pytest.fixture(autouse=True)
def _a_kernel_that_can_tell(tmp_path: Path) -> None:
    if not (disk_io.supports_direct(tmp_path) and supports_page_cache(tmp_path)):
        pytest.skip("needs Linux 6.5 and a file system with direct I/O")


@pytest.fixture(autouse=True)
def idle(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Whether memory is idle, which this machine's load does not decide; it is until a test says otherwise."""

    def set_idle(enough: bool) -> None:
        monkeypatch.setattr(disk_io.IdleMemory, "enough", enough)

    set_idle(True)
    return set_idle


@pytest.fixture
def make_tier(tmp_path: Path) -> Iterator[MakeTier]:
    tiers: list[CacheFirst] = []

    def make(**options: Any) -> CacheFirst:
        options.setdefault("max_bytes", 64 * SLOT_BYTES)
        tiers.append(CacheFirst(NAMESPACE, PAYLOAD_BYTES, tmp_path / "kv", **options))
        return tiers[-1]

    yield make
    for tier in tiers:
        tier.close()


def aligned(seed: int) -> memoryview:
    """The payload on a page boundary, so that it can be written directly."""
    memory = memoryview(mmap.mmap(-1, PAYLOAD_BYTES))
    memory[:] = payload_of(seed)
    return memory


def place_of(tier: SlabTier, key: bytes) -> tuple[int, int]:
    """Descriptor, without O_DIRECT, and offset of a frame."""
    entry = tier._entry(key, soon())
    shape = entry.size_class.index.shape
    return entry.size_class.chunks._file(shape.chunk_of(entry.slot), entry.epoch, 0).descriptor, shape.offset_of(
        entry.slot
    )


def drop(tier: SlabTier, key: bytes, offset: int = 0, size: int = SLOT_BYTES) -> None:
    """Drop a frame's pages, as the kernel does when it wants the memory."""
    descriptor, start = place_of(tier, key)
    os.posix_fadvise(descriptor, start + offset, size, os.POSIX_FADV_DONTNEED)


def flip(tier: SlabTier, key: bytes, byte: int) -> None:
    descriptor, start = place_of(tier, key)
    found = os.pread(descriptor, 1, start + byte)[0]
    os.pwrite(descriptor, bytes([found ^ 1]), start + byte)


# --- what is cached ---------------------------------------------------------------------------------------------------


def test_what_was_stored_is_loaded_without_the_disk(make_tier: MakeTier, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = make_tier()
    for seed in range(8):
        tier.store(key_of(seed), payload_of(seed), soon())
    monkeypatch.setattr(tier._files, "read_at", None)
    other = make_tier()  # another process of the node, as far as files go
    other.prepare(soon())
    for reader in (tier, other):
        assert [load(reader, key_of(seed)) for seed in range(8)] == [payload_of(seed) for seed in range(8)]
        assert reader.from_memory == 8


def test_a_store_ends_when_the_disk_has_the_frame(make_tier: MakeTier) -> None:
    tier = make_tier()
    tier.store(key_of(1), payload_of(1), soon())
    drop(tier, key_of(1))  # drops only what is not dirty
    assert not is_cached(*place_of(tier, key_of(1)), SLOT_BYTES)
    assert load(tier, key_of(1)) == payload_of(1)
    assert tier.from_memory == 0


def test_without_idle_memory_nothing_is_left_or_read_there(make_tier: MakeTier, idle: Callable[[bool], None]) -> None:
    tier = make_tier()
    tier.store(key_of(1), aligned(1), soon())
    idle(False)
    tier.store(key_of(2), aligned(2), soon())
    assert is_cached(*place_of(tier, key_of(1)), SLOT_BYTES)
    assert not is_cached(*place_of(tier, key_of(2)), SLOT_BYTES)
    assert [load(tier, key_of(seed)) for seed in (1, 2)] == [payload_of(1), payload_of(2)]
    assert tier.from_memory == 0
    idle(True)
    assert load(tier, key_of(1)) == payload_of(1)
    assert tier.from_memory == 1


def test_it_can_be_left_out(make_tier: MakeTier) -> None:
    tier = make_tier(page_cache=False)
    tier.store(key_of(1), aligned(1), soon())
    assert not is_cached(*place_of(tier, key_of(1)), SLOT_BYTES)
    assert tier.in_memory(key_of(1), soon()) is None


def test_a_kernel_that_cannot_tell_gets_direct_transfers(make_tier: MakeTier, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = make_tier()
    with monkeypatch.context() as older:
        older.setattr(page_cache, "_CACHESTAT", 100_000)  # no such system call, as before Linux 6.5
        tier.store(key_of(1), aligned(1), soon())
    assert tier.uses_direct_io
    assert not is_cached(*place_of(tier, key_of(1)), SLOT_BYTES)
    assert load(tier, key_of(1)) == payload_of(1)
    assert tier.from_memory == 0


@pytest.mark.parametrize("page", range(SLOT_BYTES // PAGE_BYTES))
def test_a_frame_that_lost_a_page_is_read_from_the_disk(make_tier: MakeTier, page: int) -> None:
    tier = make_tier()
    tier.store(key_of(1), payload_of(1), soon())
    drop(tier, key_of(1), page * PAGE_BYTES, PAGE_BYTES)
    descriptor, start = place_of(tier, key_of(1))
    if is_cached(descriptor, start, SLOT_BYTES):  # a large folio goes as a whole or not at all
        drop(tier, key_of(1))
    assert tier.in_memory(key_of(1), soon()) is None
    assert load(tier, key_of(1)) == payload_of(1)
    assert tier.from_memory == 0


# --- between the look and the copy ------------------------------------------------------------------------------------


def test_pages_that_go_before_the_copy_make_it_fail(make_tier: MakeTier) -> None:
    tier = make_tier()
    tier.store(key_of(1), payload_of(1), soon())
    block = tier.in_memory(key_of(1), soon())
    assert block is not None
    drop(tier, key_of(1))
    assert not block.copy_to(memoryview(bytearray(PAYLOAD_BYTES)))
    assert load(tier, key_of(1)) == payload_of(1)


@pytest.mark.parametrize("idle_then", [True, False])
def test_a_slot_that_changes_hands_before_the_copy_makes_it_fail(
    make_tier: MakeTier, idle: Callable[[bool], None], idle_then: bool
) -> None:
    """Overwritten through the page cache, and past it: the kernel then drops what the cache held."""
    tier = make_tier(max_bytes=12 * SLOT_BYTES)
    tier.store(key_of(1), payload_of(1), soon())
    block = tier.in_memory(key_of(1), soon())
    assert block is not None
    idle(idle_then)
    tier.discard(key_of(1), soon())
    for seed in range(100, 130):
        tier.store(key_of(seed), aligned(seed), soon())
    idle(True)
    assert not block.copy_to(memoryview(bytearray(PAYLOAD_BYTES)))
    assert isinstance(error_of(lambda: load(tier, key_of(1))), TierMiss)


# --- damage -----------------------------------------------------------------------------------------------------------


def test_every_flipped_byte_is_found_and_counts_as_damage(make_tier: MakeTier) -> None:
    tier = make_tier()
    tier.store(key_of(1), payload_of(1), soon())
    header_at = SLOT_BYTES - HEADER_BYTES
    for byte in [*range(0, PAYLOAD_BYTES, 97), *range(header_at, SLOT_BYTES, 16)]:
        flip(tier, key_of(1), byte)
        block = tier.in_memory(key_of(1), soon())
        assert block is not None
        assert not block.copy_to(memoryview(bytearray(PAYLOAD_BYTES)))
        reasons = (CorruptReason.MAGIC, CorruptReason.VERSION, CorruptReason.HEADER)
        error = error_of(lambda: load(tier, key_of(1)))
        assert isinstance(error, TierCorrupt)
        assert error.reason in reasons if byte >= header_at else error.reason == CorruptReason.PAYLOAD
        flip(tier, key_of(1), byte)
    assert load(tier, key_of(1)) == payload_of(1)
    assert tier.from_memory == 1


def test_a_truncated_or_replaced_chunk_is_not_read_beyond_its_end(make_tier: MakeTier) -> None:
    tier = make_tier()
    for seed in range(4):
        tier.store(key_of(seed), payload_of(seed), soon())
    block = tier.in_memory(key_of(1), soon())
    descriptor, start = place_of(tier, key_of(1))
    path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
    whole = path.read_bytes()
    os.truncate(path, start + 2 * PAGE_BYTES)
    assert block is not None
    assert not block.copy_to(memoryview(bytearray(PAYLOAD_BYTES)))
    assert tier.in_memory(key_of(1), soon()) is None
    assert error_of(lambda: load(tier, key_of(1))).reason == CorruptReason.SHORT
    path.write_bytes(whole)
    assert load(tier, key_of(1)) == payload_of(1)
    replaced = path.with_suffix(".new")
    replaced.write_bytes(random.Random(1).randbytes(len(whole)))
    os.rename(replaced, path)
    restarted = make_tier()  # the first goes on with the file that it has open
    assert isinstance(error_of(lambda: load(restarted, key_of(1))), TierCorrupt)


# --- the disk ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_frame_that_the_disk_does_not_take_is_not_published(
    make_tier: MakeTier, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    tier = make_tier()
    tier.store(key_of(1), payload_of(1), soon())

    def sick(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(disk_io, "write_through", sick)
    error = error_of(lambda: tier.store(key_of(2), payload_of(2), soon()))
    assert error.reason == (UnreachableReason.INPUT_OUTPUT if number == errno.EIO else "no_space")
    assert tier.contains([key_of(1), key_of(2)], soon()) == [True, False]
    monkeypatch.undo()
    assert tier.store(key_of(2), payload_of(2), soon()) is StoreOutcome.STORED
    assert load(tier, key_of(2)) == payload_of(2)


def test_a_hung_disk_does_not_hold_up_what_is_cached(make_tier: MakeTier, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = make_tier()
    for seed in (1, 2):
        tier.store(key_of(seed), payload_of(seed), soon())
    drop(tier, key_of(2))
    hung, entered, real = threading.Event(), threading.Event(), os.preadv

    def preadv(descriptor: int, views: list[memoryview], offset: int, flags: int = 0) -> int:
        if not flags & os.RWF_NOWAIT:
            entered.set()
            assert hung.wait(30.0)
        return real(descriptor, views, offset, flags)

    monkeypatch.setattr(os, "preadv", preadv)
    found: list[bytes] = []
    stuck = threading.Thread(target=lambda: found.append(load(tier, key_of(2))))
    stuck.start()
    assert entered.wait(30.0)
    assert load(tier, key_of(1)) == payload_of(1)
    hung.set()
    stuck.join(30.0)
    assert found == [payload_of(2)]


# --- all together -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_cached_and_direct_transfers_serves_what_was_stored_last(
    make_tier: MakeTier, idle: Callable[[bool], None], seed: int
) -> None:
    """Two engines on one directory, one without the page cache; slots change hands, pages come and go."""
    lots = random.Random(seed)
    tiers = [make_tier(max_bytes=14 * SLOT_BYTES), make_tier(max_bytes=14 * SLOT_BYTES, page_cache=False)]
    served = 0
    for _ in range(600):
        number, tier = lots.randrange(20), lots.choice(tiers)
        act = lots.random()
        if act < 0.05:
            idle(lots.random() < 0.5)
        elif act < 0.1:
            tier.discard(key_of(number), soon())
        elif act < 0.2:
            try:
                drop(tier, key_of(number), lots.randrange(SLOT_BYTES // PAGE_BYTES) * PAGE_BYTES, PAGE_BYTES)
            except TierMiss:
                pass
        elif act < 0.5:
            tier.store(key_of(number), lots.choice((aligned, payload_of))(number), soon())
        else:
            try:
                assert load(tier, key_of(number)) == payload_of(number)
                served += 1
            except TierMiss:
                pass
    assert served > 50
    assert tiers[0].from_memory > 10
    assert tiers[1].from_memory == 0


def test_sealed_blocks_are_opened_from_the_page_cache(tmp_path: Path) -> None:
    key = SealKey("test", bytes(range(32)))
    namespace = sealed_namespace(NAMESPACE, key)
    slab = SlabTier(namespace, PAYLOAD_BYTES + SEAL_BYTES, tmp_path / "kv", max_bytes=64 * SLOT_BYTES)
    tier = SealedTier(slab, namespace, PAYLOAD_BYTES, key)
    tier.store(key_of(1), payload_of(1), soon())
    target = memoryview(bytearray(PAYLOAD_BYTES))
    block = tier.in_memory(key_of(1), soon())
    assert block is not None
    assert block.copy_to(target)
    assert target == payload_of(1)
    other = SealedTier(slab, namespace, PAYLOAD_BYTES, SealKey("test", bytes(32)))  # whose seal does not open it
    block = other.in_memory(key_of(1), soon())
    assert block is not None
    assert not block.copy_to(target)
    assert error_of(lambda: load(other, key_of(1))).reason == CorruptReason.SEAL
    tier.close()


# --- the system calls -------------------------------------------------------------------------------------------------


def test_system_calls_say_what_they_find(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    os.pwrite(descriptor, bytes(range(256)) * 64, 0)  # four pages
    write_through(descriptor, 0, 4 * PAGE_BYTES)
    assert is_cached(descriptor, 0, 4 * PAGE_BYTES)
    assert not is_cached(descriptor, 0, 5 * PAGE_BYTES)
    view = memoryview(bytearray(PAGE_BYTES))
    assert read_cached(descriptor, PAGE_BYTES, [view])
    assert view == bytes(range(256)) * 16
    assert not read_cached(descriptor, 4 * PAGE_BYTES, [view])
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    assert not is_cached(descriptor, 0, PAGE_BYTES)
    os.close(descriptor)
    assert not is_cached(descriptor, 0, PAGE_BYTES)
    assert not read_cached(descriptor, 0, [view])
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        write_through(descriptor, 0, PAGE_BYTES)
