"""An index whose file is cut, overwritten or replaced under a running engine: nothing of it is mapped, so the process
lives and its requests lose time at most."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from spillway_connector.errors import TierError, TierMiss
from spillway_connector.plan.sessions import SessionUse
from spillway_connector.testing.tier_contract import (
    NAMESPACE,
    PAYLOAD_BYTES,
    error_of,
    key_of,
    load,
    payload_of,
    soon,
)
from spillway_connector.tiers.disk.slab import change_log
from spillway_connector.tiers.disk.slab import tier as slab_tier
from spillway_connector.tiers.disk.slab.change_log import EVERYTHING, ChangeLog, apply, place
from spillway_connector.tiers.disk.slab.columns import FileCut
from spillway_connector.tiers.disk.slab.index import SlabIndex
from spillway_connector.tiers.disk.slab.layout import SizeClassShape, slot_bytes_of
from spillway_connector.tiers.disk.slab.tier import SlabTier
from spillway_connector.tiers.tier import NO_TENANT, StoreOutcome

COUNT = 12
KEYS = [key_of(seed) for seed in range(COUNT)]
MakeTier = Callable[[], SlabTier]


@pytest.fixture
def make_tier(tmp_path: Path) -> Iterator[MakeTier]:
    tiers: list[SlabTier] = []

    def make() -> SlabTier:
        tiers.append(SlabTier(NAMESPACE, PAYLOAD_BYTES, tmp_path / "kv", max_bytes=8 << 20))
        return tiers[-1]

    yield make
    for tier in tiers:
        tier.close()


@pytest.fixture
def size_class(tmp_path: Path) -> Path:
    return tmp_path / "kv" / "slab" / str(slot_bytes_of(PAYLOAD_BYTES))


def fill(tier: SlabTier) -> None:
    for seed in range(COUNT):
        tier.store(key_of(seed), payload_of(seed), soon())


def cut(path: Path) -> None:
    os.truncate(path, 0)


def cut_within_the_arrays(path: Path) -> None:
    os.truncate(path, 4096)


def made_sparse(path: Path) -> None:
    with path.open("r+b") as file:  # a tier that sees the empty file may replace it before it is long again
        size = os.fstat(file.fileno()).st_size
        file.truncate(0)
        file.truncate(size)


def lengthened(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 8192)


def overwritten(path: Path) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.write(random.Random(1).randbytes(size))


def copied_over(path: Path) -> None:
    """cp truncates, then writes: what a restore over a live directory does."""
    old = path.read_bytes()
    path.write_bytes(old[: len(old) // 2])
    path.write_bytes(old)


def removed(path: Path) -> None:
    path.unlink()


LOSSES = [cut, cut_within_the_arrays, made_sparse, lengthened, overwritten, copied_over, removed]


@pytest.mark.parametrize("name", ["index", "headers", "changes", "sessions"])
@pytest.mark.parametrize("lose", LOSSES)
def test_a_file_that_is_lost_under_a_running_engine_costs_misses_at_most(
    make_tier: MakeTier, size_class: Path, lose: Callable[[Path], None], name: str
) -> None:
    tier, other = make_tier(), make_tier()
    fill(tier)
    tier.use_session(SessionUse(NO_TENANT, b"12345678", KEYS[:3], False, 60.0, 120.0))
    tier.store(key_of(COUNT), payload_of(COUNT), soon())
    assert other.contains(KEYS, soon()) == [True] * COUNT
    lose(size_class / name)
    for each in (tier, other):
        each.contains_now(KEYS)
        each.contains_now(KEYS[:1])
        for seed in range(COUNT):
            try:
                assert load(each, key_of(seed)) == payload_of(seed)
            except TierMiss:
                pass
        each.use_session(SessionUse(NO_TENANT, b"12345678", KEYS[3:5], False, 60.0, 120.0))
    for each in (tier, other):
        for seed in range(100, 104):
            try:
                each.store(key_of(seed), payload_of(seed), soon())
            except TierError:
                pass  # the one that finds it
        for seed in range(100, 104):
            each.store(key_of(seed), payload_of(seed), soon())
            assert load(each, key_of(seed)) == payload_of(seed)


def test_zeros_are_not_taken_for_an_index_without_chunks(make_tier: MakeTier, size_class: Path) -> None:
    tier = make_tier()
    fill(tier)
    opened = tier._size_class.last_used()
    assert opened is not None
    used = opened.index.used
    made_sparse(size_class / "index")
    with pytest.raises(FileCut):
        opened.index._columns.reload()
    assert opened.index.used == used
    assert tier.store(key_of(50), payload_of(50), soon()) is StoreOutcome.STORED
    for seed in [*range(COUNT), 50]:
        assert load(tier, key_of(seed)) == payload_of(seed)


def test_an_index_that_was_cut_is_made_anew_from_the_header_table(make_tier: MakeTier, size_class: Path) -> None:
    tier = make_tier()
    fill(tier)
    cut(size_class / "index")
    assert tier.contains_now(KEYS) == [True] * COUNT, "what this process knows does not go with the file"
    assert load(tier, key_of(3)) == payload_of(3)
    assert tier.store(key_of(50), payload_of(50), soon()) is StoreOutcome.STORED
    assert (size_class / "index").stat().st_size > 0
    assert tier.contains(KEYS, soon()) == [True] * COUNT


def test_no_page_of_a_file_of_the_store_is_mapped(make_tier: MakeTier, size_class: Path) -> None:
    tier = make_tier()
    fill(tier)
    tier.use_session(SessionUse(NO_TENANT, b"12345678", KEYS[:3], False, 60.0, 120.0))
    tier.store(key_of(50), payload_of(50), soon())
    assert (size_class / "sessions").exists()
    assert str(size_class.parents[1]) not in Path("/proc/self/maps").read_text()


def test_a_process_whose_index_is_cut_lives(tmp_path: Path) -> None:
    """A process that maps the index ends with SIGBUS at the next look-up, without a line in the log."""
    program = (
        "import os, sys; from pathlib import Path\n"
        "from spillway_connector.testing.tier_contract import *\n"
        "from spillway_connector.tiers.disk.slab.tier import SlabTier\n"
        "root = Path(sys.argv[1]); tier = SlabTier(NAMESPACE, PAYLOAD_BYTES, root, max_bytes=8 << 20)\n"
        "tier.store(key_of(1), payload_of(1), soon())\n"
        "for path in root.glob('slab/*/*'):\n"
        "    if path.suffix != '.slab': os.truncate(path, 0)\n"
        "assert tier.contains_now([key_of(1)]) in ([True], None)\n"
        "assert load(tier, key_of(1)) == payload_of(1)\n"
        "tier.store(key_of(2), payload_of(2), soon())\n"
        "print('lives', flush=True); os._exit(0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "kv")], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "lives\n"), done.stderr


@pytest.mark.parametrize("number", [errno.EIO, errno.ENXIO])
def test_a_disk_that_does_not_read_the_index_back_costs_time(
    make_tier: MakeTier, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    tier, other = make_tier(), make_tier()
    fill(tier)
    assert other.contains(KEYS, soon()) == [True] * COUNT
    real = os.pread

    def failing(descriptor: int, size: int, offset: int) -> bytes:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(("/index", "/changes")):
            raise OSError(number, os.strerror(number))
        return real(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", failing)
    other.contains_now(KEYS)
    with pytest.raises(TierError):
        other.contains(KEYS, soon())
    monkeypatch.undo()
    assert other.contains(KEYS, soon()) == [True] * COUNT


# --- what other processes change --------------------------------------------------------------------------------------


def test_another_process_s_changes_are_seen_by_a_look_up_that_does_not_wait(
    make_tier: MakeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slab_tier, "FOLLOW_SECONDS", 0.0)
    tier, other = make_tier(), make_tier()
    tier.prepare(soon())
    other.prepare(soon())
    for seed in range(COUNT):
        tier.store(key_of(seed), payload_of(seed), soon())
        assert other.contains_now([key_of(seed)]) == [True]
        assert other.contains_now(KEYS) == [each <= seed for each in range(COUNT)]
    tier.discard(key_of(3), soon())
    assert other.contains_now([key_of(3)]) == [False]


def test_more_changes_than_the_ring_holds_are_read_from_the_index(
    make_tier: MakeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, other = make_tier(), make_tier()
    other.prepare(soon())
    for _ in range(40):
        tier.store(key_of(1), payload_of(1), soon())
        tier.discard(key_of(1), soon())
    records = other._size_class.last_used().index.shape.records  # type: ignore[union-attr]
    for seed in range(records // 10):
        tier.store(key_of(seed), payload_of(seed), soon())
    assert other.contains_now(KEYS) is None
    assert other.contains_now(KEYS) is None, "until somebody has read it"
    assert other.contains(KEYS, soon()) == tier.contains(KEYS, soon())
    assert other.contains_now(KEYS) == tier.contains_now(KEYS)


def test_changes_of_a_process_that_announces_none_are_found_under_the_lock(
    make_tier: MakeTier, size_class: Path
) -> None:
    """An earlier version of Spillway on the same directory, and a process that was killed before it announced."""
    tier, silent = make_tier(), make_tier()
    silent.prepare(soon())
    tier.prepare(soon())
    silent._size_class.last_used().index._columns._log = None  # type: ignore[union-attr]
    fill(silent)
    tier.store(key_of(100), payload_of(100), soon())
    assert tier.contains(KEYS, soon()) == [True] * COUNT
    for seed in range(COUNT):
        assert load(tier, key_of(seed)) == payload_of(seed)
    assert tier.store(key_of(3), payload_of(99), soon()) is StoreOutcome.PRESENT


def test_an_entry_that_another_process_used_is_not_the_next_to_leave(tmp_path: Path) -> None:
    """Hits are counted in the file without the lock, and read from there before an entry is evicted."""
    shape = SizeClassShape(8192, 8, 1)
    index = SlabIndex.create(tmp_path_size_class(tmp_path), shape)
    index.set_chunk(0, 1)
    for slot in range(8):
        index.claim(slot, (slot + 1, slot + 1), namespace=0, tenant=0, owner=1, now_s=1)
        index.publish(slot)
    SlabIndex.publish_file(tmp_path_size_class(tmp_path))
    other = SlabIndex.open(tmp_path_size_class(tmp_path), writable=True)
    assert other is not None
    for slot in range(8):
        if slot != 5:
            other.note_hit(slot, 2)
    assert index.victim() == 5


def tmp_path_size_class(tmp_path: Path) -> Path:
    folder = tmp_path / "slab" / "8192"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def test_two_processes_that_change_one_index_in_turn_always_agree(tmp_path: Path) -> None:
    """A random schedule of claims, publications, releases and evictions; the copies are those of a fresh reader."""
    folder, shape = tmp_path_size_class(tmp_path), SizeClassShape(8192, 64, 1)
    first = SlabIndex.create(folder, shape)
    first.set_chunk(0, 1)
    SlabIndex.publish_file(folder)
    first.announce()
    second = SlabIndex.open(folder, writable=True)
    assert second is not None
    lots = random.Random(7)
    for step in range(400):
        index, other = (first, second) if lots.random() < 0.5 else (second, first)
        with index.changing():
            slot = index.free_slot()
            if slot is None or lots.random() < 0.3:
                victim = index.victim()
                if victim is not None:
                    index.evict(victim)
            else:
                key = (lots.getrandbits(64), lots.getrandbits(64))
                index.claim(slot, key, namespace=1, tenant=lots.randrange(3), owner=9, now_s=step)
                if lots.random() < 0.9:
                    index.publish(slot)
        if lots.random() < 0.5:
            assert other.follow()
            assert bytes(other._columns._view[4096:]) == bytes(index._columns._view[4096:]), step
    reader = SlabIndex.open(folder, writable=False)
    assert reader is not None
    for index in (first, second):
        assert index.follow()
        assert bytes(index._columns._view) == bytes(reader._columns._view)


# --- the ring ---------------------------------------------------------------------------------------------------------


def ring(folder: Path) -> ChangeLog:
    return ChangeLog(folder / "changes", SizeClassShape(8192, 4, 1), writable=True)


def test_the_ring_on_disk_is_a_promise(tmp_path: Path) -> None:
    writer = ring(tmp_path_size_class(tmp_path))
    writer.append([(place(4096, 8), 7), (place(4161, 1), 255)])
    raw = (tmp_path_size_class(tmp_path) / "changes").read_bytes()
    assert len(raw) == 32 + 16 * 256
    assert raw[:32] == b"SPILLCHG" + (256).to_bytes(8, "little") + (2).to_bytes(8, "little") + bytes(8)
    assert raw[32:64] == np.array([[4096 << 4 | 8, 7], [4161 << 4 | 1, 255]], "<u8").tobytes()


def test_a_reader_gets_every_change_once_across_the_end_of_the_ring(tmp_path: Path) -> None:
    writer, reader = ring(tmp_path_size_class(tmp_path)), ring(tmp_path_size_class(tmp_path))
    wanted: list[list[int]] = []
    got: list[list[int]] = []
    for step in range(90):
        records = [(place(8 * (step + i), 8), step) for i in range(step % 12)]
        writer.append(records)
        wanted += [list(change) for change in records]
        if step % 5 == 0:
            news = reader.news()
            assert news is not None
            got += news.tolist()
    news = reader.news()
    assert news is not None
    assert got + news.tolist() == wanted


@pytest.mark.parametrize("damage", [b"", b"\xff" * 32, b"SPILLCHG" + (256).to_bytes(8, "little") + b"\xff" * 16])
def test_a_damaged_ring_is_missed_changes_and_made_again(tmp_path: Path, damage: bytes) -> None:
    folder = tmp_path_size_class(tmp_path)
    reader = ring(folder)
    (folder / "changes").write_bytes(damage)
    assert reader.news() is None
    assert reader.news() is None
    reader.renew()
    reader.skip()
    ring(folder).append([(place(0, 8), 1)])
    news = reader.news()
    assert news is not None and news.tolist() == [[place(0, 8), 1]]


@pytest.mark.parametrize(
    "change", [EVERYTHING, (place(1 << 50, 8), 1), (place(4093, 8), 1), (place(0, 3), 1), ((1 << 64) - 1, 0)]
)
def test_a_change_that_fits_no_element_changes_nothing(change: tuple[int, int]) -> None:
    memory = np.zeros(4096, np.uint8)
    assert apply(np.array([change], np.uint64), memory) is False
    assert not memory.any()


def test_of_several_changes_of_one_element_the_last_counts() -> None:
    memory = np.zeros(64, np.uint8)
    assert apply(np.array([(place(8, 8), value) for value in (3, 9, 5)] + [(place(3, 1), 300)], np.uint64), memory)
    assert memory.view(np.uint64)[1] == 5
    assert memory[3] == 300 % 256
    assert apply(change_log._NOTHING, memory)


def test_a_key_that_was_never_stored_stays_a_miss_after_all_of_it(make_tier: MakeTier, size_class: Path) -> None:
    tier = make_tier()
    fill(tier)
    overwritten(size_class / "index")
    assert isinstance(error_of(lambda: load(tier, key_of(1000))), TierMiss)
