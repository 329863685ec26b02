from __future__ import annotations

import gc
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash

from spillway_connector.errors import (
    CorruptReason,
    RefusedReason,
    TierCorrupt,
    TierMiss,
    TierTimeout,
    UnreachableReason,
)
from spillway_connector.namespace import Namespace
from spillway_connector.testing.cache_first import CacheFirst
from spillway_connector.testing.clock import SteppedClock
from spillway_connector.testing.directory_contract import DirectoryContract
from spillway_connector.testing.retention_contract import MakeRetaining, RenewedTier, RetentionContract
from spillway_connector.testing.tier_contract import (
    NAMESPACE,
    OTHER_NAMESPACE,
    PAYLOAD_BYTES,
    BoundedTierContract,
    error_of,
    key_of,
    load,
    payload_of,
    soon,
)
from spillway_connector.tiers.disk.clock import boot_tag
from spillway_connector.tiers.disk.slab.chunks import CachedFrame
from spillway_connector.tiers.disk.slab.columns import Columns
from spillway_connector.tiers.disk.slab.fingerprint import fingerprints, namespace_words
from spillway_connector.tiers.disk.slab.index import SlabIndex, tenant_place
from spillway_connector.tiers.disk.slab.inspect import SlabInspector
from spillway_connector.tiers.disk.slab.layout import COLUMNS, chunk_name, slot_bytes_of
from spillway_connector.tiers.disk.slab.tier import SlabTier
from spillway_connector.tiers.frame import HEADER_BYTES
from spillway_connector.tiers.tier import EvictionReason, StoreOutcome

SLOT_BYTES = slot_bytes_of(PAYLOAD_BYTES)
NEVER = 1e7  # a deadline for tiers on a stepped clock
MakeTier = Callable[..., SlabTier]


class SlabMedium:
    """Reaches behind a tier's back; the tiers of a test share ``root``."""

    frame_bytes = SLOT_BYTES

    def __init__(self, root: Path) -> None:
        self.root = root

    def index(self, slot_bytes: int = SLOT_BYTES) -> SlabIndex:
        index = SlabIndex.open(self.root / "slab" / str(slot_bytes), writable=True)
        assert index is not None
        return index

    def slot(self, namespace: Namespace, key: bytes) -> int:
        return int(self.index().find(fingerprints([key], namespace_words(namespace.digest16)))[0])

    def place(self, namespace: Namespace, key: bytes) -> tuple[Path, int, int, int]:
        """Chunk file, offset, slot bytes and chunk bytes of an entry."""
        slot, index = self.slot(namespace, key), self.index()
        assert slot >= 0
        chunk = index.shape.chunk_of(slot)
        path = self.root / "slab" / str(SLOT_BYTES) / chunk_name(chunk, int(index.chunk_epoch[chunk]))
        return path, index.shape.offset_of(slot), index.shape.slot_bytes, index.shape.chunk_bytes

    def read_frame(self, namespace: Namespace, key: bytes) -> bytes:
        path, offset, slot_bytes, _ = self.place(namespace, key)
        with path.open("rb") as file:
            return os.pread(file.fileno(), slot_bytes, offset)

    def write_frame(self, namespace: Namespace, key: bytes, frame: bytes) -> None:
        """A short frame is what a truncated chunk leaves of it, a long one what lengthens the chunk."""
        path, offset, slot_bytes, chunk_bytes = self.place(namespace, key)
        with path.open("r+b") as file:
            os.pwrite(file.fileno(), frame, offset)
            excess = len(frame) - slot_bytes
            os.truncate(file.fileno(), offset + len(frame) if excess < 0 else chunk_bytes + excess)

    def write_document(self, namespace: Namespace, document: bytes) -> None:
        (self.root / namespace.hex).mkdir(parents=True)
        (self.root / namespace.hex / "namespace.json").write_bytes(document)

    def bytes_on_disk(self) -> int:
        return sum(path.stat().st_size for path in self.root.rglob("*") if path.is_file())


@pytest.fixture
def medium(tmp_path: Path) -> SlabMedium:
    return SlabMedium(tmp_path / "kv")


@pytest.fixture(params=[False, True], ids=["direct", "page-cache"])
def make_tier(request: pytest.FixtureRequest, medium: SlabMedium) -> Iterator[MakeTier]:
    tiers: list[SlabTier] = []
    kind = CacheFirst if request.param else SlabTier

    def make(namespace: Namespace = NAMESPACE, payload_bytes: int = PAYLOAD_BYTES, **options: Any) -> SlabTier:
        options.setdefault("max_bytes", 64 << 20)
        options.setdefault("page_cache", request.param)
        tier = kind(namespace, payload_bytes, options.pop("root", medium.root), **options)
        tiers.append(tier)
        return tier

    yield make
    for tier in tiers:
        tier.close()


# The index is the same for both, and what it points at is verified alike (BoundedTierContract, with either).
ONE_MEDIUM = pytest.mark.parametrize("make_tier", [False], indirect=True, ids=["direct"])


@pytest.fixture
def make_small_tier(make_tier: MakeTier) -> Callable[[int], SlabTier]:
    return lambda frames: make_tier(max_bytes=(frames + 1) * SLOT_BYTES)  # one for the index


@pytest.fixture
def make_retaining(make_tier: MakeTier) -> MakeRetaining:
    return lambda chunks: RenewedTier.stepped(
        lambda clock, wall_clock: make_tier(max_bytes=(chunks + 1) * SLOT_BYTES, clock=clock, wall_clock=wall_clock),
        chunks,
    )


class TestSlabTier(BoundedTierContract, RetentionContract):
    pass


class TestForeigners(DirectoryContract):
    writes_by_name = False  # its chunks and its index are open


# --- what lies on disk ------------------------------------------------------------------------------------------------


def test_the_layout_on_disk_is_a_promise(make_tier: MakeTier, medium: SlabMedium) -> None:
    tier = make_tier()
    tier.store(bytes(range(36)), payload_of(1), soon())
    names = {str(path.relative_to(medium.root)) for path in medium.root.rglob("*") if path.is_file()}
    assert names == {
        f"{NAMESPACE.hex}/namespace.json",
        f"clock.{boot_tag()}",
        "store",
        "slab/lock",
        f"slab/writers/{tier._size_class.lease.number:016x}",
        f"bounds/{tier._space._bound._name}",
        f"slab/{SLOT_BYTES}/index",
        f"slab/{SLOT_BYTES}/changes",
        f"slab/{SLOT_BYTES}/headers",
        f"slab/{SLOT_BYTES}/000000-00000001.slab",
    }
    raw = (medium.root / "slab" / str(SLOT_BYTES) / "index").read_bytes()
    assert raw[:12] == b"SPILLSLB\x02\x00\x00\x00"
    table = (medium.root / "slab" / str(SLOT_BYTES) / "headers").read_bytes()
    assert table[:12] == b"SPILLHDR\x02\x00\x00\x00"
    frame = medium.read_frame(NAMESPACE, bytes(range(36)))
    at = 4096 + 200 * medium.slot(NAMESPACE, bytes(range(36)))
    assert table[at : at + 192] == frame[-192:]
    assert table[at + 192 : at + 200] == xxhash.xxh3_64_digest(frame[-192:])
    slots_per_chunk, slot_bytes, chunks = struct.unpack_from("<IQI", raw, 12)
    assert slot_bytes == SLOT_BYTES
    assert slots_per_chunk * slot_bytes * chunks + len(raw) + len(table) <= 64 << 20
    assert len(table) == 4096 + 200 * slots_per_chunk * chunks
    assert (medium.root / f"slab/{SLOT_BYTES}/000000-00000001.slab").stat().st_size == slots_per_chunk * slot_bytes


def test_direct_io_is_used_where_the_file_system_takes_it(make_tier: MakeTier, tmp_path: Path) -> None:
    tier = make_tier()
    tier.prepare(soon())
    try:
        os.close(os.open(tmp_path / "probe", os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
        direct = True
    except OSError:
        direct = False
    assert tier.uses_direct_io == direct


# --- room -------------------------------------------------------------------------------------------------------------


def test_the_bound_holds_at_every_moment_and_counts_the_index(make_tier: MakeTier, medium: SlabMedium) -> None:
    max_bytes = 30 * SLOT_BYTES
    tier = make_tier(max_bytes=max_bytes)
    for seed in range(120):
        tier.store(key_of(seed), payload_of(seed), soon())
        assert medium.bytes_on_disk() <= max_bytes
        assert load(tier, key_of(seed)) == payload_of(seed)
    assert sum(tier.evictions.values()) >= 90
    assert tier.resident_bytes(soon()) >= 24 * SLOT_BYTES


def test_a_bound_that_holds_no_slot_is_refused_with_the_remedy(make_tier: MakeTier) -> None:
    error = error_of(lambda: make_tier(max_bytes=SLOT_BYTES).store(key_of(1), payload_of(1), soon()))
    assert error.reason == RefusedReason.NO_SPACE
    assert "raise max_bytes" in str(error)


def test_a_raised_bound_gives_more_room_and_keeps_what_is_there(make_tier: MakeTier, medium: SlabMedium) -> None:
    small = make_tier(max_bytes=20 * SLOT_BYTES)
    for seed in range(10):
        small.store(key_of(seed), payload_of(seed), soon())
    small.close()
    large, other = (make_tier(max_bytes=100 * SLOT_BYTES) for _ in range(2))
    for seed in range(10, 60):
        large.store(key_of(seed), payload_of(seed), soon())
    assert all(load(tier, key_of(seed)) == payload_of(seed) for tier in (other, large) for seed in range(60))
    assert medium.bytes_on_disk() <= 100 * SLOT_BYTES


def test_a_lowered_bound_drops_what_went_unused_for_longest(make_tier: MakeTier, medium: SlabMedium) -> None:
    clock = SteppedClock()
    large = make_tier(max_bytes=100 * SLOT_BYTES, clock=clock)
    for seed in range(60):
        clock.advance(1)
        large.store(key_of(seed), payload_of(seed), NEVER)
    small = make_tier(max_bytes=40 * SLOT_BYTES, clock=clock)
    small.store(key_of(60), payload_of(60), NEVER)
    assert medium.bytes_on_disk() <= 40 * SLOT_BYTES
    assert small.contains([key_of(0), key_of(59), key_of(60)], NEVER) == [False, True, True]


def test_blocks_that_are_asked_for_outlive_a_flood_of_others(make_tier: MakeTier) -> None:
    tier = make_tier(max_bytes=40 * SLOT_BYTES)
    wanted = range(5)
    for seed in wanted:
        tier.store(key_of(seed), payload_of(seed), soon())
    for seed in wanted:
        load(tier, key_of(seed))
    for seed in range(100, 400):
        tier.store(key_of(seed), payload_of(seed), soon())
        if seed % 20 == 0:
            for other in wanted:
                load(tier, key_of(other))
    assert all(tier.contains([key_of(seed) for seed in wanted], soon()))


def test_entries_of_an_unused_namespace_are_evicted(make_tier: MakeTier) -> None:
    old, new = make_tier(OTHER_NAMESPACE, max_bytes=30 * SLOT_BYTES), make_tier(max_bytes=30 * SLOT_BYTES)
    for seed in range(20):
        old.store(key_of(seed), payload_of(seed), soon())
    for seed in range(100, 160):
        assert new.store(key_of(seed), payload_of(seed), soon()) is StoreOutcome.STORED
    assert sum(old.contains([key_of(seed) for seed in range(20)], soon())) < 5


def test_blocks_of_another_size_share_the_bound_and_the_staler_ones_go(make_tier: MakeTier, medium: SlabMedium) -> None:
    clock = SteppedClock()
    max_bytes = 64 * SLOT_BYTES
    options: dict[str, Any] = {"max_bytes": max_bytes, "clock": clock}
    old = make_tier(**options)
    for seed in range(60):
        clock.advance(1)
        old.store(key_of(seed), payload_of(seed), NEVER)
    larger = Namespace.of({"size": 40_000})
    new = make_tier(larger, 40_000, **options)
    target = memoryview(bytearray(40_000))
    for seed in range(40):
        clock.advance(10)
        assert new.store(key_of(seed), payload_of(seed, 40_000), NEVER) is StoreOutcome.STORED
        assert medium.bytes_on_disk() <= max_bytes
        new.load(key_of(seed), target, NEVER)
        assert target == payload_of(seed, 40_000)
    assert sum(new.contains([key_of(seed) for seed in range(40)], NEVER)) >= 12
    target = memoryview(bytearray(PAYLOAD_BYTES))
    for seed in range(60):
        try:
            old.load(key_of(seed), target, NEVER)
            assert target == payload_of(seed)
        except TierMiss:
            pass


def test_what_a_tenant_uses_stays_and_what_it_once_used_does_not(make_tier: MakeTier) -> None:
    clock = SteppedClock()
    tier = make_tier(tenant_max_bytes=4 * SLOT_BYTES, clock=clock)
    target = memoryview(bytearray(PAYLOAD_BYTES))
    for seed in range(4):
        tier.store(key_of(seed), payload_of(seed), NEVER, b"tenant-a")
        for _ in range(3):
            tier.load(key_of(seed), target, NEVER)
    for seed in range(4, 10):
        clock.advance(10)
        tier.load(key_of(0), target, NEVER)
        clock.advance(10)
        tier.store(key_of(seed), payload_of(seed), NEVER, b"tenant-a")
    assert tier.contains([key_of(seed) for seed in range(10)], NEVER) == [True, *[False] * 6, True, True, True]


def test_a_quota_counts_blocks_of_every_size(make_tier: MakeTier) -> None:
    quota = 6 * SLOT_BYTES
    small = make_tier(tenant_max_bytes=quota)
    large = make_tier(Namespace.of({"size": 40_000}), 40_000, tenant_max_bytes=quota)
    for seed in range(6):
        small.store(key_of(seed), payload_of(seed), soon(), b"tenant-a")
    for seed in range(2):
        large.store(key_of(seed), payload_of(seed, 40_000), soon(), b"tenant-a")
        assert load(large, key_of(seed)) == payload_of(seed, 40_000)
    assert sum(small.contains([key_of(seed) for seed in range(6)], soon())) == 1  # 5 slots made room for 2 of 11 pages
    for seed in range(10, 13):
        assert small.store(key_of(seed), payload_of(seed), soon(), b"tenant-a") is StoreOutcome.STORED
        assert sum(small.contains([key_of(seed) for seed in range(20)], soon())) * SLOT_BYTES <= quota


def test_quotas_outlive_a_crash_and_the_loss_of_the_index(make_tier: MakeTier, medium: SlabMedium) -> None:
    for seed in range(8):
        make_tier().store(key_of(seed), payload_of(seed), soon(), b"tenant-a" if seed % 2 else b"tenant-b")
    medium.index().put("dirty", 0, 1)
    tag = int.from_bytes(b"tenant-a", "little")
    for loss in (lambda: None, (medium.root / "slab" / str(SLOT_BYTES) / "index").unlink):
        medium.index().put("tenant_used", tenant_place(tag), 77)
        loss()
        make_tier().prepare(soon())
        assert medium.index().tenant_bytes_at_most(tag) == 4 * SLOT_BYTES
    tier = make_tier(tenant_max_bytes=4 * SLOT_BYTES)
    tier.store(key_of(9), payload_of(9), soon(), b"tenant-a")
    assert sum(tier.contains([key_of(seed) for seed in (1, 3, 5, 7)], soon())) == 3
    assert all(tier.contains([key_of(seed) for seed in (0, 2, 4, 6, 9)], soon()))


def test_an_entry_expires_after_its_last_use(make_tier: MakeTier) -> None:
    clock = SteppedClock()
    tier = make_tier(ttl_seconds=100, clock=clock)
    target = memoryview(bytearray(PAYLOAD_BYTES))
    for seed in (1, 2, 3):
        tier.store(key_of(seed), payload_of(seed), NEVER)
    clock.advance(80)
    tier.load(key_of(1), target, NEVER)
    clock.advance(80)
    keys = [key_of(seed) for seed in (1, 2, 3)]
    assert tier.contains(keys, NEVER) == tier.contains_now(keys) == [True, False, False]
    assert [tier.contains_now([key]) for key in keys] == [[True], [False], [False]]
    assert isinstance(error_of(lambda: tier.load(key_of(2), target, NEVER)), TierMiss)
    assert tier.store(key_of(2), payload_of(2), NEVER) is StoreOutcome.STORED
    tier.load(key_of(2), target, NEVER)
    assert target == payload_of(2)
    assert tier.evictions[EvictionReason.TTL] == 2  # the one stored again, and the other by that store's maintenance
    assert tier.resident_bytes(NEVER) == 2 * SLOT_BYTES


def test_the_answer_from_memory_is_the_answer(make_tier: MakeTier, medium: SlabMedium) -> None:
    tier = make_tier()
    keys = [key_of(seed) for seed in range(30)]
    assert tier.contains_now(keys) is None
    for seed in range(0, 30, 2):
        make_tier().store(key_of(seed), payload_of(seed), soon())
    tier.prepare(soon())
    shutil.move(medium.root, medium.root.with_name("away"))  # nothing on the disk is looked at
    assert tier.contains_now(keys) == [seed % 2 == 0 for seed in range(30)]
    assert [tier.contains_now([key]) for key in keys] == [[seed % 2 == 0] for seed in range(30)]
    assert tier.contains_now([]) == []
    tier.close()
    assert tier.contains_now(keys) is None


def test_a_tier_short_of_room_is_under_pressure(make_tier: MakeTier) -> None:
    clock = SteppedClock()
    tier = make_tier(max_bytes=12 * SLOT_BYTES, clock=clock)
    seeds = iter(range(100))
    while not tier.evictions:
        assert not tier.under_pressure
        seed = next(seeds)
        tier.store(key_of(seed), payload_of(seed), NEVER)
    assert tier.under_pressure
    clock.advance(5.1)
    assert not tier.under_pressure


# --- faults -----------------------------------------------------------------------------------------------------------


def counted(frame: bytes) -> bytes:
    """Payload and header of a frame, without the zeros between them."""
    return frame[:PAYLOAD_BYTES] + frame[-HEADER_BYTES:]


def test_a_write_torn_at_any_sector_is_never_served(make_tier: MakeTier, medium: SlabMedium) -> None:
    tier = make_tier()
    tier.store(key_of(1), payload_of(1), soon())
    new = medium.read_frame(NAMESPACE, key_of(1))
    for sector in range(0, len(new), 512):
        # The sectors before it are of the new frame, the rest what lay there before; and the other way round.
        for torn in (new[:sector] + b"\xa5" * (len(new) - sector), b"\xa5" * sector + new[sector:]):
            if torn == new:
                continue
            medium.write_frame(NAMESPACE, key_of(1), torn)
            try:
                assert load(tier, key_of(1)) == payload_of(1)  # only the zeros behind the payload were torn
                assert counted(torn) == counted(new)
            except TierCorrupt:
                pass


def test_a_write_torn_over_another_block_is_never_served(make_tier: MakeTier, medium: SlabMedium) -> None:
    tier = make_tier()
    for seed in (1, 2):
        tier.store(key_of(seed), payload_of(seed), soon())
    old, new = (medium.read_frame(NAMESPACE, key_of(seed)) for seed in (1, 2))
    for sector in range(512, PAYLOAD_BYTES, 512):
        medium.write_frame(NAMESPACE, key_of(1), new[:sector] + old[sector:])
        assert isinstance(error_of(lambda: load(tier, key_of(1))), TierCorrupt)


@ONE_MEDIUM
@pytest.mark.parametrize("column", [column.name for column in COLUMNS if column.per != "entry"])
def test_a_flipped_bit_in_the_index_never_serves_a_wrong_byte(
    make_tier: MakeTier, medium: SlabMedium, column: str
) -> None:
    tier = make_tier(max_bytes=40 * SLOT_BYTES)
    for seed in range(6):
        tier.store(key_of(seed), payload_of(seed), soon())
    path = medium.root / "slab" / str(SLOT_BYTES) / "index"
    index = medium.index()
    offset = index.shape.offsets()[0][column]
    item_bytes = next(item.item_bytes for item in COLUMNS if item.name == column)
    per_slot = next(item.per for item in COLUMNS if item.name == column) == "slot"
    at = offset + (medium.slot(NAMESPACE, key_of(1)) if per_slot else 0) * item_bytes
    whole = path.read_bytes()
    for bit in range(8 * item_bytes):
        for restarted in (False, True):
            with path.open("r+b") as file:
                os.pwrite(file.fileno(), bytes([whole[at + bit // 8] ^ 1 << bit % 8]), at + bit // 8)
            reader = make_tier(max_bytes=40 * SLOT_BYTES) if restarted else tier
            for seed in range(6):
                try:
                    assert load(reader, key_of(seed)) == payload_of(seed)
                except (TierMiss, TierCorrupt):
                    pass
            reader.store(key_of(1), payload_of(1), soon())
            for seed in range(6):
                reader.store(key_of(seed), payload_of(seed), soon())
            with path.open("r+b") as file:
                os.pwrite(file.fileno(), whole, 0)


@ONE_MEDIUM
def test_flipped_bits_in_the_hash_table_never_serve_a_wrong_byte(make_tier: MakeTier, medium: SlabMedium) -> None:
    tier = make_tier(max_bytes=40 * SLOT_BYTES)
    for seed in range(6):
        tier.store(key_of(seed), payload_of(seed), soon())
    path = medium.root / "slab" / str(SLOT_BYTES) / "index"
    offsets, size = medium.index().shape.offsets()
    whole = path.read_bytes()
    for at in range(offsets["bucket_tag"], size):
        with path.open("r+b") as file:
            os.pwrite(file.fileno(), bytes([whole[at] ^ 1 << at % 8]), at)
            for seed in range(6):
                try:
                    assert load(tier, key_of(seed)) == payload_of(seed)
                except TierMiss:
                    pass
            os.pwrite(file.fileno(), whole, 0)


def test_records_swapped_in_the_index_are_corrupt_not_wrong(make_tier: MakeTier, medium: SlabMedium) -> None:
    tier = make_tier()
    for seed in (1, 2):
        tier.store(key_of(seed), payload_of(seed), soon())
    index = medium.index()
    first, second = (medium.slot(NAMESPACE, key_of(seed)) for seed in (1, 2))
    for name in ("key_low", "key_high"):
        values = [int(getattr(index, name)[slot]) for slot in (first, second)]
        index.put(name, first, values[1])
        index.put(name, second, values[0])
    table = index.buckets.slots.tolist()
    index.put("bucket_slot", table.index(first + 1), second + 1)
    index.put("bucket_slot", table.index(second + 1), first + 1)
    index.announce()
    for seed in (1, 2):
        assert error_of(lambda seed=seed: load(tier, key_of(seed))).reason == CorruptReason.KEY  # type: ignore[misc]
    assert make_tier().contains([key_of(1), key_of(2)], soon()) == [False, False]  # a start checks the records


def test_a_truncated_chunk_loses_only_what_was_cut_off(make_tier: MakeTier, medium: SlabMedium) -> None:
    tier = make_tier()
    for seed in range(10):
        tier.store(key_of(seed), payload_of(seed), soon())
    by_offset = sorted(range(10), key=lambda seed: medium.place(NAMESPACE, key_of(seed))[1])
    path, offset, _, _ = medium.place(NAMESPACE, key_of(by_offset[5]))
    os.truncate(path, offset + 4096)
    for seed in by_offset[:5]:
        assert load(tier, key_of(seed)) == payload_of(seed)
    for seed in by_offset[5:]:
        assert isinstance(error_of(lambda seed=seed: load(tier, key_of(seed))), TierCorrupt)  # type: ignore[misc]
        tier.discard(key_of(seed), soon())
        assert tier.store(key_of(seed), payload_of(seed), soon()) is StoreOutcome.STORED
        assert load(tier, key_of(seed)) == payload_of(seed)


@pytest.mark.parametrize("table", ["whole", "lost", "of another shape"])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "other version", "header bit", "noise"])
def test_an_index_that_is_lost_is_made_again_from_the_headers(
    make_tier: MakeTier, medium: SlabMedium, damage: str, table: str
) -> None:
    tier = make_tier()
    for seed in range(20):
        tier.store(key_of(seed), payload_of(seed), soon())
    make_tier(OTHER_NAMESPACE).store(key_of(1), payload_of(99), soon())
    tier.discard(key_of(7), soon())
    path = medium.root / "slab" / str(SLOT_BYTES) / "index"
    whole = path.read_bytes()
    path.unlink()
    headers = path.with_name("headers")
    if table == "lost":
        headers.unlink()
    elif table == "of another shape":
        headers.write_bytes(headers.read_bytes()[:12] + bytes(100))
    damaged = {
        "empty": b"",
        "cut": whole[:-4096],
        "other version": whole[:8] + b"\x02" + whole[9:],
        "header bit": whole[:14] + bytes([whole[14] ^ 1]) + whole[15:],
        "noise": os.urandom(len(whole)),
    }
    if damage in damaged:
        path.write_bytes(damaged[damage])
    for reader in (tier, make_tier()):
        reader.prepare(soon())
        assert reader.contains([key_of(seed) for seed in range(20)], soon()) == [seed != 7 for seed in range(20)]
        assert all(load(reader, key_of(seed)) == payload_of(seed) for seed in range(20) if seed != 7)
    assert load(make_tier(OTHER_NAMESPACE), key_of(1)) == payload_of(99)
    assert tier.store(key_of(7), payload_of(7), soon()) is StoreOutcome.STORED


def test_a_slot_overwritten_while_it_is_read_is_a_miss(make_tier: MakeTier) -> None:
    tier = make_tier(max_bytes=12 * SLOT_BYTES)
    tier.store(key_of(1), payload_of(1), soon())
    size_class = tier._size_class.writable(soon())
    read, cached = size_class.chunks.read, size_class.chunks.cached

    def overwrite() -> None:
        for seed in range(100, 200):  # every slot changes hands between the lookup and the read
            other.store(key_of(seed), payload_of(seed), soon())

    def read_after_others(*arguments: Any) -> memoryview:
        overwrite()
        return read(*arguments)

    def cached_before_others(*arguments: Any) -> CachedFrame | None:
        frame = cached(*arguments)
        overwrite()
        return frame

    other = make_tier(max_bytes=12 * SLOT_BYTES)
    size_class.chunks.read = read_after_others  # type: ignore[method-assign]
    size_class.chunks.cached = cached_before_others  # type: ignore[method-assign]
    assert isinstance(error_of(lambda: load(tier, key_of(1))), TierMiss)


def _purged(medium: SlabMedium, other: SlabTier) -> None:
    inspector = SlabInspector(medium.root)
    assert inspector.remove(list(inspector.frames(headers=False)), only_unused=False).frames == 1
    inspector.close()


def _discarded(medium: SlabMedium, other: SlabTier) -> None:
    other.discard(key_of(1), soon())


def _dropped(medium: SlabMedium, other: SlabTier) -> None:
    with other._claims.locked(soon()) as size_class:
        assert other._space.drop_stalest(None, also=size_class) > 0


@pytest.mark.parametrize("remove", [_purged, _discarded, _dropped])
def test_a_frame_that_is_gone_before_its_removal_is_announced_is_a_miss(
    make_tier: MakeTier,
    medium: SlabMedium,
    monkeypatch: pytest.MonkeyPatch,
    remove: Callable[[SlabMedium, SlabTier], None],
) -> None:
    answers: list[object] = []
    removing = False
    announce = Columns.announce

    def announce_after_a_load(columns: Columns) -> None:
        if removing:
            answers.append(error_of(lambda: load(tier, key_of(1))))
            if held is not None:
                assert not held.copy_to(memoryview(bytearray(PAYLOAD_BYTES)))
        announce(columns)

    monkeypatch.setattr(Columns, "announce", announce_after_a_load)
    tier, other = make_tier(), make_tier()
    tier.store(key_of(1), payload_of(1), soon())
    other.prepare(soon())
    assert load(tier, key_of(1)) == payload_of(1)  # which reads all that was announced so far
    held = tier.in_memory(key_of(1), soon())
    removing = True
    remove(medium, other)
    removing = False
    assert answers and all(isinstance(answer, TierMiss) for answer in answers)
    assert not tier._size_class.suspected  # else its next store would compare all of the index and the files
    assert tier.contains([key_of(1)], soon()) == [False]
    assert tier.store(key_of(1), payload_of(1), soon()) is StoreOutcome.STORED
    assert load(tier, key_of(1)) == load(other, key_of(1)) == payload_of(1)


def test_a_killed_holder_of_the_lock_leaves_no_trace(make_tier: MakeTier, medium: SlabMedium) -> None:
    tier = make_tier()
    for seed in range(10):
        tier.store(key_of(seed), payload_of(seed), soon())
    index = medium.index()
    slot = medium.slot(NAMESPACE, key_of(3))
    index.put("dirty", 0, 1)  # killed while releasing: the entry is free, its place in the table and the counts are not
    index.put("state", slot, 0)
    assert tier.store(key_of(50), payload_of(50), soon()) is StoreOutcome.STORED  # the next holder of the lock
    assert tier.store(key_of(3), payload_of(3), soon()) is StoreOutcome.STORED
    assert medium.index().counter("dirty") == 0
    assert medium.index().used == 11
    assert all(load(tier, key_of(seed)) == payload_of(seed) for seed in range(10))


def test_a_full_file_system_is_refused_and_recovers(make_tier: MakeTier, full_disk: Any) -> None:
    tier = make_tier(root=full_disk.path / "kv", max_bytes=None)
    full_disk.fill()
    assert error_of(lambda: tier.store(key_of(1), payload_of(1), soon())).reason == RefusedReason.NO_SPACE
    assert tier.contains([key_of(1)], soon()) == [False]
    full_disk.free()
    assert tier.store(key_of(1), payload_of(1), soon()) is StoreOutcome.STORED
    full_disk.fill()
    for seed in range(2, 40):  # what is preallocated needs nothing of the file system
        assert tier.store(key_of(seed), payload_of(seed), soon()) is StoreOutcome.STORED
    assert load(tier, key_of(39)) == payload_of(39)


def test_a_removed_directory_is_a_miss_and_made_again(make_tier: MakeTier, medium: SlabMedium) -> None:
    tier = make_tier()
    tier.store(key_of(1), payload_of(1), soon())
    shutil.rmtree(medium.root)
    assert isinstance(error_of(lambda: load(tier, key_of(1))), TierMiss)
    shutil.rmtree(medium.root)
    assert tier.store(key_of(1), payload_of(1), soon()) is StoreOutcome.STORED
    assert load(tier, key_of(1)) == payload_of(1)


def test_a_jumping_clock_loses_no_byte_and_keeps_no_entry_for_ever(make_tier: MakeTier) -> None:
    wall, clock = [1_000_000_000.0], SteppedClock()
    options: dict[str, Any] = {"ttl_seconds": 1000, "wall_clock": lambda: wall[0], "clock": clock}
    tier = make_tier(**options)
    target = memoryview(bytearray(PAYLOAD_BYTES))
    jumps = (0, 10**8, -(10**9), 5 * 10**8, -(5 * 10**8), 6 * 3600, -6 * 3600)
    for seed, jump in enumerate(jumps):
        wall[0] = max(0.0, wall[0] + jump)
        clock.advance(61)  # the next store also looks at ages
        later = make_tier(**options)  # a process started after the jump tells ages as the one before it does
        for user in (tier, later):
            user.store(key_of(seed), payload_of(seed), NEVER)
            assert all(user.contains([key_of(other) for other in range(seed + 1)], NEVER))
        tier.load(key_of(seed), target, NEVER)
        assert target == payload_of(seed)
    clock.advance(1001)
    assert not any(tier.contains([key_of(seed) for seed in range(len(jumps))], NEVER))
    tier.store(key_of(51), payload_of(51), NEVER)
    assert tier.resident_bytes(NEVER) == SLOT_BYTES


@pytest.mark.parametrize(("off_seconds", "lives_on"), [(600, True), (5000, False), (-(10**6), True)])
def test_time_passes_while_the_node_is_off_and_never_backwards(
    make_tier: MakeTier, monkeypatch: pytest.MonkeyPatch, off_seconds: int, lives_on: bool
) -> None:
    wall = 2_000_000.0
    options: dict[str, Any] = {"ttl_seconds": 1000}
    make_tier(clock=SteppedClock(), wall_clock=lambda: wall, **options).store(key_of(1), payload_of(1), NEVER)
    monkeypatch.setattr("spillway_connector.tiers.disk.clock.boot_tag", lambda: "0123456789abcdef")
    clock = SteppedClock(5.0)  # counts from the boot
    tier = make_tier(clock=clock, wall_clock=lambda: wall + off_seconds, **options)
    assert tier.contains([key_of(1)], NEVER) == [lives_on]
    tier.store(key_of(2), payload_of(2), NEVER)  # brings stamps of the future back to now
    clock.advance(1001)
    assert tier.contains([key_of(1), key_of(2)], NEVER) == [False, False]


def test_a_chunk_removed_while_in_use_costs_its_blocks_and_one_store(make_tier: MakeTier, medium: SlabMedium) -> None:
    make_tier().store(key_of(1), payload_of(1), soon())
    tier = make_tier()
    tier.prepare(soon())
    for path in (medium.root / "slab" / str(SLOT_BYTES)).glob("*.slab"):
        path.unlink()
    assert isinstance(error_of(lambda: load(tier, key_of(1))), TierMiss)
    again = make_tier()
    again._size_class._size_class = tier._size_class._size_class  # attached before the removal
    assert error_of(lambda: again.store(key_of(2), payload_of(2), soon())).reason == UnreachableReason.ROOT_MISSING
    for seed in (1, 2):
        assert again.store(key_of(seed), payload_of(seed), soon()) is StoreOutcome.STORED
        assert load(tier, key_of(seed)) == payload_of(seed)


def test_a_write_that_misses_its_deadline_gives_its_slot_back(make_tier: MakeTier, medium: SlabMedium) -> None:
    now = [100.0]
    tier = make_tier(clock=lambda: now[0])
    tier.prepare(1e9)
    size_class = tier._size_class.writable(1e9)
    write = size_class.chunks.write

    def slow(*arguments: Any) -> None:
        now[0] += 50
        write(*arguments)

    size_class.chunks.write = slow  # type: ignore[method-assign]
    assert isinstance(error_of(lambda: tier.store(key_of(1), payload_of(1), 120.0)), TierTimeout)
    assert tier.contains([key_of(1)], 1e9) == [False]
    assert tier.store(key_of(1), payload_of(1), 1e9) is StoreOutcome.STORED
    assert medium.index().used == 1


def test_a_directory_that_is_removed_again_and_again_leaves_nothing_open(
    make_tier: MakeTier, medium: SlabMedium
) -> None:
    """Files that were let go of are closed at once, not by the garbage collector, which engines rarely run."""
    tier = make_tier()
    open_files = []
    gc.collect()
    gc.disable()
    try:
        for number in range(8):
            assert tier.store(key_of(number), payload_of(number), soon()) is StoreOutcome.STORED
            load(tier, key_of(number))
            open_files.append(len(os.listdir("/proc/self/fd")))
            shutil.rmtree(medium.root)
    finally:
        gc.enable()
    assert open_files[-1] == open_files[1], open_files
