from __future__ import annotations

import errno
import functools
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spillway_connector.errors import RefusedReason, TierMiss, TierTimeout, TierUnreachable, UnreachableReason
from spillway_connector.namespace import Namespace
from spillway_connector.testing.clock import SteppedClock
from spillway_connector.testing.directory_contract import DirectoryContract, sizes_below
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
from spillway_connector.tiers.disk.files.space import Space
from spillway_connector.tiers.disk.files.tier import FileTier
from spillway_connector.tiers.disk.frame_places import FramePlaces
from spillway_connector.tiers.disk.io import FrameFiles, tier_error
from spillway_connector.tiers.tier import Clock, EvictionReason, StoreOutcome

NEVER = 1e7  # a deadline for tiers on a stepped clock
FRAME_BYTES = FramePlaces.of(PAYLOAD_BYTES).frame_bytes
MakeTier = Callable[..., FileTier]


def _is_frame(path: Path) -> bool:
    return path.suffix == ".kv"


class _FileMedium:
    frame_bytes = FRAME_BYTES

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, namespace: Namespace, key: bytes) -> Path:
        name = key.hex()
        return self.root / namespace.hex / name[:2] / name[2:4] / f"{name}.kv"

    def read_frame(self, namespace: Namespace, key: bytes) -> bytes:
        return self.path(namespace, key).read_bytes()

    def write_frame(self, namespace: Namespace, key: bytes, frame: bytes) -> None:
        self.path(namespace, key).write_bytes(frame)

    def write_document(self, namespace: Namespace, document: bytes) -> None:
        (self.root / namespace.hex).mkdir(parents=True)
        (self.root / namespace.hex / "namespace.json").write_bytes(document)

    def frame_count(self) -> int:
        return len(sizes_below(self.root, _is_frame))

    def partial_files(self) -> list[Path]:
        return [path for path in self.root.glob("*/partial/*") if path.is_file()]

    def bytes_on_disk(self) -> int:
        return sum(sizes_below(self.root, _is_frame)) + sum(path.stat().st_size for path in self.partial_files())


@pytest.fixture
def medium(tmp_path: Path) -> _FileMedium:
    return _FileMedium(tmp_path / "kv")


@pytest.fixture
def make_tier(medium: _FileMedium) -> Iterator[MakeTier]:
    tiers: list[FileTier] = []

    def make(namespace: Namespace = NAMESPACE, payload_bytes: int = PAYLOAD_BYTES, **options: object) -> FileTier:
        tier = FileTier(namespace, payload_bytes, options.pop("root", medium.root), **options)  # type: ignore[arg-type]
        tiers.append(tier)
        return tier

    yield make
    for tier in tiers:
        tier.close()


@pytest.fixture
def make_small_tier(make_tier: MakeTier) -> Callable[[int], FileTier]:
    return lambda frames: make_tier(max_bytes=frames * FRAME_BYTES)


@pytest.fixture
def make_retaining(make_tier: MakeTier) -> MakeRetaining:
    """The tier's thread does not run, as it would evict between a step of the clock and the renewals that follow; the
    test does its work instead."""

    def make(chunks: int, clock: Clock, wall_clock: Clock) -> FileTier:
        tier = make_tier(max_bytes=chunks * FRAME_BYTES, clock=clock, wall_clock=wall_clock)
        tier._maintenance.stop()
        return tier

    return lambda chunks: RenewedTier.stepped(functools.partial(make, chunks), chunks, FileTier._maintain)


class TestFileTier(BoundedTierContract, RetentionContract):
    pass


class TestForeigners(DirectoryContract):
    pass


def test_the_layout_on_disk_is_a_promise(make_tier: MakeTier, medium: _FileMedium) -> None:
    tier = make_tier()
    tier.store(bytes(range(36)), payload_of(1), soon())
    names = {str(path.relative_to(medium.root)) for path in medium.root.rglob("*") if path.is_file()}
    assert names == {
        "space.ledger",
        *([f"bounds/{tier._space._bound._name}"] if tier._space.max_bytes else []),
        f"clock.{boot_tag()}",
        "store",
        f"{NAMESPACE.hex}/namespace.json",
        f"{NAMESPACE.hex}/00/01/{bytes(range(36)).hex()}.kv",
    }
    assert (medium.root / NAMESPACE.hex / "namespace.json").read_bytes() == NAMESPACE.document
    assert medium.bytes_on_disk() == FRAME_BYTES


def test_direct_io_and_the_page_cache_give_the_same_bytes(make_tier: MakeTier) -> None:
    tier = make_tier()
    tier.store(key_of(1), payload_of(1), soon())
    direct = tier.uses_direct_io
    tier._files.direct = not direct
    # Where direct I/O is not supported this exercises the way back from EINVAL.
    try:
        assert load(tier, key_of(1)) == payload_of(1)
        tier.store(key_of(2), payload_of(2), soon())
        assert load(tier, key_of(2)) == payload_of(2)
    finally:
        tier._files.direct = direct
    assert load(tier, key_of(2)) == payload_of(2)


def test_old_frames_of_any_namespace_make_room(make_tier: MakeTier, medium: _FileMedium) -> None:
    old = make_tier(OTHER_NAMESPACE, max_bytes=10 * FRAME_BYTES)
    new = make_tier(max_bytes=10 * FRAME_BYTES)
    for seed in range(8):
        old.store(key_of(seed), payload_of(seed), soon())
    for age, seed in enumerate((3, 0, 1, 2, 4, 5, 6, 7)):
        os.utime(medium.path(OTHER_NAMESPACE, key_of(seed)), (1000 + age, 1000 + age))
    load(old, key_of(0))  # now the youngest
    for seed in range(100, 105):
        assert new.store(key_of(seed), payload_of(seed), soon()) is StoreOutcome.STORED
    assert old.contains([key_of(seed) for seed in (3, 1, 0)], soon()) == [False, False, True]
    assert all(new.contains([key_of(seed) for seed in range(100, 105)], soon()))
    assert medium.bytes_on_disk() <= 10 * FRAME_BYTES


def test_the_bound_holds_at_every_moment(make_tier: MakeTier, medium: _FileMedium) -> None:
    tier = make_tier(max_bytes=7 * FRAME_BYTES)
    for seed in range(60):
        tier.store(key_of(seed), payload_of(seed), soon())
        assert medium.bytes_on_disk() <= 7 * FRAME_BYTES
        assert load(tier, key_of(seed)) == payload_of(seed)
    assert sum(tier.evictions.values()) >= 53
    tier.close()  # also ends the maintenance thread, which may be evicting in advance
    assert make_tier().resident_bytes(soon()) == medium.bytes_on_disk()


def present(tier: FileTier, seeds: range, deadline: float = NEVER) -> list[int]:
    found = tier.contains([key_of(seed) for seed in seeds], deadline)
    return [seed for seed, there in zip(seeds, found, strict=True) if there]


def test_what_others_remove_is_given_back_to_the_tenant(make_tier: MakeTier, medium: _FileMedium) -> None:
    clock = SteppedClock()
    tier = make_tier(tenant_max_bytes=5 * FRAME_BYTES, clock=clock)
    for seed in range(5):
        clock.advance(1)
        tier.store(key_of(seed), payload_of(seed), NEVER, b"tenant-a")
    medium.path(NAMESPACE, key_of(3)).unlink()
    tier.discard(key_of(4), NEVER)
    clock.advance(1000)  # no marker without a frame can be one of a frame being written
    for seed in (10, 11):
        assert tier.store(key_of(seed), payload_of(seed), NEVER, b"tenant-a") is StoreOutcome.STORED
    assert present(tier, range(20)) == [0, 1, 2, 10, 11]
    markers = [path.name for path in (medium.root / "tenants").rglob("*") if path.is_file() and path.name != "ledger"]
    assert sorted(markers) == sorted(key_of(seed).hex() for seed in (0, 1, 2, 10, 11))


def test_a_store_that_fails_gives_its_share_of_the_quota_back(make_tier: MakeTier, medium: _FileMedium) -> None:
    tier = make_tier(tenant_max_bytes=2 * FRAME_BYTES)
    tier.store(key_of(0), payload_of(0), soon(), b"tenant-a")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * 4096, hard))
    try:
        error_of(lambda: tier.store(key_of(1), payload_of(1), soon(), b"tenant-a"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert tier.store(key_of(2), payload_of(2), soon(), b"tenant-a") is StoreOutcome.STORED
    assert present(tier, range(3), soon()) == [0, 2]


def test_a_frame_expires_after_its_last_use(make_tier: MakeTier, medium: _FileMedium) -> None:
    clock = SteppedClock()
    tier = make_tier(ttl_seconds=100, clock=clock)
    target = memoryview(bytearray(PAYLOAD_BYTES))
    for seed in range(40):
        tier.store(key_of(seed), payload_of(seed), NEVER)
    clock.advance(80)
    tier.load(key_of(1), target, NEVER)
    assert tier.store(key_of(2), payload_of(2), NEVER) is StoreOutcome.PRESENT
    clock.advance(80)
    assert present(tier, range(40)) == [1, 2]
    assert isinstance(error_of(lambda: tier.load(key_of(3), target, NEVER)), TierMiss)
    tier._space.rescan(NEVER)
    while tier._space.remove_expired(NEVER):
        pass
    assert medium.frame_count() == 2
    assert tier.evictions == {EvictionReason.TTL: 38}
    assert tier.resident_bytes(NEVER) == 2 * FRAME_BYTES
    assert tier.contains_now([key_of(1)]) is None


def test_a_jumping_wall_clock_changes_no_age(make_tier: MakeTier) -> None:
    wall, clock = [1_000_000_000.0], SteppedClock()
    options: dict[str, Any] = {"ttl_seconds": 1000, "wall_clock": lambda: wall[0], "clock": clock}
    tier = make_tier(**options)
    for seed, jump in enumerate((0, 6 * 3600, -6 * 3600, 10**8, -(10**9), 5 * 10**8)):
        wall[0] = max(0.0, wall[0] + jump)
        clock.advance(61)
        for user in (tier, make_tier(**options)):  # one started after the jump tells ages as the one before it does
            user.store(key_of(seed), payload_of(seed), NEVER)
            user._space.rescan(NEVER)
            user._space.remove_expired(NEVER)
            assert present(user, range(10)) == list(range(seed + 1))
    clock.advance(1001)
    assert present(tier, range(10)) == []


@pytest.mark.parametrize(("off_seconds", "lives_on"), [(600, True), (5000, False), (-(10**6), True)])
def test_time_passes_while_the_node_is_off_and_never_backwards(
    make_tier: MakeTier, monkeypatch: pytest.MonkeyPatch, off_seconds: int, lives_on: bool
) -> None:
    wall = 2_000_000.0
    make_tier(ttl_seconds=1000, clock=SteppedClock(), wall_clock=lambda: wall).store(key_of(1), payload_of(1), NEVER)
    monkeypatch.setattr("spillway_connector.tiers.disk.clock.boot_tag", lambda: "0123456789abcdef")
    clock = SteppedClock(5.0)  # counts from the boot
    tier = make_tier(ttl_seconds=1000, clock=clock, wall_clock=lambda: wall + off_seconds)
    assert present(tier, range(1, 2)) == [1] * lives_on
    tier._space.rescan(NEVER)  # brings stamps of the future back to now
    clock.advance(1001)
    assert present(tier, range(1, 2)) == []


def test_a_tier_short_of_room_is_under_pressure(make_tier: MakeTier) -> None:
    clock = SteppedClock()
    tier = make_tier(max_bytes=6 * FRAME_BYTES, clock=clock)
    for seed in range(3):
        tier.store(key_of(seed), payload_of(seed), NEVER)
    assert not tier.under_pressure
    for seed in range(3, 10):
        tier.store(key_of(seed), payload_of(seed), NEVER)
    assert tier.under_pressure
    tier.close()  # ends the maintenance thread, which evicts in advance
    clock.advance(5.1)
    assert not tier.under_pressure


def test_a_frame_larger_than_the_bound_is_refused_with_the_remedy(make_tier: MakeTier) -> None:
    error = error_of(lambda: make_tier(max_bytes=FRAME_BYTES - 1).store(key_of(1), payload_of(1), soon()))
    assert error.reason == RefusedReason.NO_SPACE
    assert "raise max_bytes" in str(error)


def test_room_is_found_although_others_replace_what_a_scan_saw(
    medium: _FileMedium, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that evict in one directory at once: what one of them is about to remove, another has removed."""
    folder = medium.root / NAMESPACE.hex / "ab" / "cd"
    folder.mkdir(parents=True)
    generations = [[folder / f"abcd{generation}{number}.kv" for number in range(10)] for generation in range(3)]
    space = Space(medium.root, 10 * FRAME_BYTES, time.monotonic)
    scan, seen = space._scan, iter(generations)

    def replace_after_scan(deadline: float) -> None:
        scan(deadline)
        old, new = next(seen), generations[min(space.scans, 2)]
        if old is not new:
            for before, after in zip(old, new, strict=True):
                before.rename(after)

    monkeypatch.setattr(space, "_scan", replace_after_scan)
    for file in generations[0]:
        file.write_bytes(bytes(FRAME_BYTES))
    space.make_room(FRAME_BYTES, soon())
    assert space.scans == 3
    assert medium.frame_count() == 9
    space.close()


def test_frames_that_are_always_in_use_are_waited_for_until_the_deadline(
    medium: _FileMedium, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = medium.root / NAMESPACE.hex / "ab" / "cd" / "abcd.kv"
    file.parent.mkdir(parents=True)
    file.write_bytes(bytes(FRAME_BYTES))
    clock = SteppedClock()
    space = Space(medium.root, FRAME_BYTES, clock)
    scan = space._scan

    def use_after_scan(deadline: float) -> None:
        scan(deadline)
        os.utime(file, ns=(space.scans, space.scans))
        clock.advance(1)

    monkeypatch.setattr(space, "_scan", use_after_scan)
    error = error_of(lambda: space.make_room(FRAME_BYTES, clock() + 5))
    assert isinstance(error, TierTimeout)
    assert space.scans == 5
    assert file.exists()
    space.close()


def test_a_lost_or_damaged_ledger_is_counted_anew(make_tier: MakeTier, medium: _FileMedium) -> None:
    tier = make_tier(max_bytes=10 * FRAME_BYTES)
    for seed in range(5):
        tier.store(key_of(seed), payload_of(seed), soon())
    ledger = medium.root / "space.ledger"
    for damage in (ledger.unlink, lambda: ledger.write_bytes(b"x" * 40), lambda: ledger.write_bytes(b"")):
        damage()
        assert tier.resident_bytes(soon()) == 5 * FRAME_BYTES
        assert make_tier().resident_bytes(soon()) == 5 * FRAME_BYTES


def test_partial_files_of_ended_writers_are_swept_and_of_running_ones_are_not(
    make_tier: MakeTier, medium: _FileMedium
) -> None:
    tier = make_tier()
    tier.store(key_of(1), payload_of(1), soon())
    stale = medium.root / NAMESPACE.hex / "partial" / "of-a-dead-writer"
    stale.write_bytes(bytes(100))
    living = medium.root / NAMESPACE.hex / "partial" / "of-a-living-writer"
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    descriptor = tier._space.take(4096, str(living), lambda: os.open(living, flags), soon())
    try:
        make_tier()._space.rescan(soon())
        assert medium.partial_files() == [living]
        assert tier.resident_bytes(soon()) == FRAME_BYTES + 4096
    finally:
        os.close(descriptor)


def test_a_failed_write_leaves_nothing_behind(
    make_tier: MakeTier, medium: _FileMedium, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A real limit of the kernel, so that the real write fails half way: EFBIG after two of five pages.
    tier = make_tier()
    tier.store(key_of(1), payload_of(1), soon())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * 4096, hard))
    try:
        error = error_of(lambda: tier.store(key_of(2), payload_of(2), soon()))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert error.reason == RefusedReason.NO_SPACE
    assert tier.contains([key_of(1), key_of(2)], soon()) == [True, False]
    assert tier.store(key_of(2), payload_of(2), soon()) is StoreOutcome.STORED
    make_tier()._space.rescan(soon())
    assert medium.partial_files() == []
    assert tier.resident_bytes(soon()) == 2 * FRAME_BYTES


def test_a_full_file_system_is_refused_and_recovers(make_tier: MakeTier, full_disk: Any) -> None:
    tier = make_tier(root=full_disk.path / "kv")
    for seed in range(20):
        tier.store(key_of(seed), payload_of(seed), soon())
    full_disk.fill()
    assert error_of(lambda: tier.store(key_of(20), payload_of(20), soon())).reason == RefusedReason.NO_SPACE
    # Maintenance may have begun to evict for the other user of the file system, oldest frames first.
    assert all(load(tier, key_of(seed)) == payload_of(seed) for seed in range(10, 20))
    full_disk.free()
    assert tier.store(key_of(20), payload_of(20), soon()) is StoreOutcome.STORED
    assert load(tier, key_of(20)) == payload_of(20)


def test_a_removed_directory_is_a_miss_and_made_again(make_tier: MakeTier, medium: _FileMedium) -> None:
    tier = make_tier()
    tier.store(key_of(1), payload_of(1), soon())
    shutil.rmtree(medium.root)
    assert isinstance(error_of(lambda: load(tier, key_of(1))), TierMiss)
    error = error_of(lambda: tier.store(key_of(1), payload_of(1), soon()))
    assert isinstance(error, TierUnreachable)
    assert error.reason == UnreachableReason.ROOT_MISSING
    assert tier.store(key_of(1), payload_of(1), soon()) is StoreOutcome.STORED
    assert load(tier, key_of(1)) == payload_of(1)


def test_running_out_of_descriptors_deletes_nothing(make_tier: MakeTier) -> None:
    tier = make_tier()
    tier.store(key_of(1), payload_of(1), soon())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        error = error_of(lambda: load(tier, key_of(1)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert error.reason == RefusedReason.RESOURCES
    assert load(tier, key_of(1)) == payload_of(1)


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.ENOSPC, RefusedReason.NO_SPACE),
        (errno.EDQUOT, RefusedReason.NO_SPACE),
        (errno.EROFS, RefusedReason.READ_ONLY),
        (errno.EACCES, RefusedReason.PERMISSION),
        (errno.EMFILE, RefusedReason.RESOURCES),
        (errno.EINVAL, RefusedReason.OTHER),
        (errno.EIO, UnreachableReason.INPUT_OUTPUT),
        (errno.ESTALE, UnreachableReason.INPUT_OUTPUT),
    ],
)
def test_each_errno_has_its_reason(number: int, reason: str) -> None:
    assert tier_error(OSError(number, os.strerror(number)), "reading").reason == reason


def test_short_counts_are_continued_from_where_they_ended(tmp_path: Path) -> None:
    files = FrameFiles(PAYLOAD_BYTES, clock=lambda: 0.0, wall_clock=lambda: 0.0)
    views = [memoryview(bytearray(payload_of(seed, size))) for seed, size in enumerate((10, 1, 4096, 77))]
    wanted = b"".join(views)
    written = bytearray(len(wanted))

    def stingy(_: int, given: list[memoryview], offset: int) -> int:
        taken = b"".join(given)[:13]
        written[offset : offset + len(taken)] = taken
        return len(taken)

    files._move(stingy, -1, views, 1.0)
    assert written == wanted


_CHILD = """
import json, os, sys
from pathlib import Path
from spillway_connector.testing.directory_contract import sizes_below
from spillway_connector.testing.tier_contract import NAMESPACE, PAYLOAD_BYTES, key_of, payload_of, soon
from spillway_connector.tiers.disk.files.tier import FileTier
from spillway_connector.errors import TierMiss
root, max_bytes, first = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
tier = FileTier(NAMESPACE, PAYLOAD_BYTES, root, max_bytes=max_bytes)
target = memoryview(bytearray(PAYLOAD_BYTES))
wrong = highest = hits = 0
print("ready", flush=True)
sys.stdin.readline()
for step in range(150):
    seed = first + step % 40
    tier.store(key_of(seed), payload_of(seed), soon())
    highest = max(highest, sum(sizes_below(root, lambda path: path.suffix == '.kv')))
    for other in (seed, first + 20 - step % 20):
        try:
            tier.load(key_of(other), target, soon())
            hits += 1
            wrong += target != payload_of(other)
        except TierMiss:
            pass
tier.close()
print(json.dumps({"wrong": wrong, "highest": highest, "hits": hits, "evicted": sum(tier.evictions.values())}))
"""


def _child(root: Path, max_bytes: int, first: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            sys.executable,
            "-c",
            _CHILD,
            str(root),
            str(max_bytes),
            str(first),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_two_processes_share_and_evict_in_one_directory(medium: _FileMedium, make_tier: MakeTier) -> None:
    max_bytes = 20 * FRAME_BYTES
    children = [_child(medium.root, max_bytes, first) for first in (0, 20)]
    for child in children:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
    reports = [json.loads(child.communicate("go\n", timeout=120)[0]) for child in children]
    assert [report["wrong"] for report in reports] == [0, 0]
    assert all(report["highest"] <= max_bytes for report in reports)
    assert all(report["evicted"] > 0 and report["hits"] > 0 for report in reports)
    assert medium.partial_files() == []
    tier = make_tier(max_bytes=max_bytes)
    tier._space.rescan(soon())
    assert tier.resident_bytes(soon()) == medium.bytes_on_disk() <= max_bytes
