"""The promises of a sick, full, locked or killed disk tier, in both layouts. Real files, real kills; only errors that a
healthy kernel does not give on request (EIO) are injected, at the system call."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from spillway_connector.errors import (
    RefusedReason,
    TierCorrupt,
    TierMiss,
    TierRefused,
    TierUnreachable,
    UnreachableReason,
)
from spillway_connector.testing.cache_first import CacheFirst
from spillway_connector.testing.tier_contract import (
    NAMESPACE,
    PAYLOAD_BYTES,
    error_of,
    key_of,
    load,
    payload_of,
    soon,
)
from spillway_connector.tiers.disk.files.tier import FileTier
from spillway_connector.tiers.disk.frame_places import FramePlaces
from spillway_connector.tiers.disk.slab.tier import SlabTier
from spillway_connector.tiers.tier import StoreOutcome

DiskTier = FileTier | SlabTier
LAYOUTS: dict[str, type[DiskTier]] = {"files": FileTier, "slab": SlabTier, "slab, page cache first": CacheFirst}
FRAME = FramePlaces.of(PAYLOAD_BYTES)
MAX_BYTES = 2 << 20


@pytest.fixture(params=LAYOUTS)
def make_tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], DiskTier]]:
    tiers: list[DiskTier] = []

    def make(root: Path = tmp_path / "kv") -> DiskTier:
        tiers.append(LAYOUTS[request.param](NAMESPACE, PAYLOAD_BYTES, root, max_bytes=MAX_BYTES))
        return tiers[-1]

    yield make
    for tier in tiers:
        tier.close()


@contextmanager
def failing(call: str, number: int, *, after_bytes: int = 0) -> Iterator[list[str]]:
    """``os.preadv`` or ``os.pwritev`` fails on frames, after it has moved some bytes of what was asked for."""
    real = getattr(os, call)
    failed: list[str] = []

    def sick(descriptor: int, views: list[memoryview], offset: int, *flags: int) -> int:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if not any(name in path for name in (".kv", "partial", ".slab")):
            return int(real(descriptor, views, offset, *flags))
        if after_bytes and not failed:
            failed.append(path)
            return int(real(descriptor, [memoryview(views[0])[:after_bytes]], offset))
        failed.append(path)
        raise OSError(number, os.strerror(number), path)

    setattr(os, call, sick)
    try:
        yield failed
    finally:
        setattr(os, call, real)


# --- the disk ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENXIO])
@pytest.mark.parametrize("after_bytes", [0, 4096])
def test_a_disk_that_cannot_read_loses_nothing(
    make_tier: Callable[[], DiskTier], number: int, after_bytes: int
) -> None:
    tier = make_tier()
    for seed in range(3):
        tier.store(key_of(seed), payload_of(seed), soon())
    with failing("preadv", number, after_bytes=after_bytes) as failed:
        error = error_of(lambda: load(tier, key_of(1)))
    assert failed
    assert isinstance(error, TierUnreachable)
    assert error.reason == UnreachableReason.INPUT_OUTPUT
    assert all(load(tier, key_of(seed)) == payload_of(seed) for seed in range(3))


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS])
@pytest.mark.parametrize("after_bytes", [0, 4096])
def test_a_disk_that_cannot_write_serves_what_it_has_and_shows_no_part_of_the_new(
    make_tier: Callable[[], DiskTier], number: int, after_bytes: int
) -> None:
    tier = make_tier()
    for seed in range(3):
        tier.store(key_of(seed), payload_of(seed), soon())
    before = tier.resident_bytes(soon())
    with failing("pwritev", number, after_bytes=after_bytes):
        error = error_of(lambda: tier.store(key_of(9), payload_of(9), soon()))
        assert all(load(tier, key_of(seed)) == payload_of(seed) for seed in range(3))
    reasons = {errno.EIO: UnreachableReason.INPUT_OUTPUT, errno.EROFS: RefusedReason.READ_ONLY}
    assert error.reason == reasons.get(number, RefusedReason.NO_SPACE)
    assert tier.under_pressure == (error.reason == RefusedReason.NO_SPACE)
    assert tier.contains([key_of(9)], soon()) == [False]
    assert tier.resident_bytes(soon()) == before
    assert tier.store(key_of(9), payload_of(9), soon()) is StoreOutcome.STORED
    assert load(tier, key_of(9)) == payload_of(9)


def test_an_index_that_cannot_be_written_still_serves(tmp_path: Path) -> None:
    tier = SlabTier(NAMESPACE, PAYLOAD_BYTES, tmp_path / "kv", max_bytes=MAX_BYTES)
    tier.store(key_of(1), payload_of(1), soon())
    real = os.pwrite

    def sick(descriptor: int, raw: bytes, offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("/index"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, raw, offset)

    os.pwrite = sick
    try:
        assert error_of(lambda: tier.store(key_of(2), payload_of(2), soon())).reason == UnreachableReason.INPUT_OUTPUT
        assert load(tier, key_of(1)) == payload_of(1)
    finally:
        os.pwrite = real
    assert tier.store(key_of(2), payload_of(2), soon()) is StoreOutcome.STORED
    assert load(tier, key_of(2)) == payload_of(2)
    tier.close()


@pytest.mark.parametrize("sector_bytes", [512, 4096])
def test_a_write_torn_at_any_sector_is_never_served(make_tier: Callable[[], DiskTier], sector_bytes: int) -> None:
    """The frame of another block, noise or zeros lie where the write did not come to."""
    tier = make_tier()
    for seed in (1, 2):
        tier.store(key_of(seed), payload_of(seed), soon())
    raw = Path(next(path for path in _files_of(tier) if _find(path, key_of(1)) is not None))
    at = _find(raw, key_of(1))
    assert at is not None
    frame_bytes = FRAME.frame_bytes
    other = next(path for path in _files_of(tier) if _find(path, key_of(2)) is not None)
    new, old = _read(raw, at, frame_bytes), _read(other, _find(other, key_of(2)) or 0, frame_bytes)

    def meant(frame: bytes) -> bytes:
        return frame[FRAME.payload_at :][:PAYLOAD_BYTES] + frame[FRAME.header_at :][: FRAME.header_bytes]

    for before in (old, bytes(frame_bytes), os.urandom(frame_bytes)):
        for sector in range(0, frame_bytes, sector_bytes):
            for torn in (new[:sector] + before[sector:], before[:sector] + new[sector:]):
                _write(raw, at, torn)
                try:
                    assert load(tier, key_of(1)) == payload_of(1)
                    assert meant(torn) == meant(new)  # only padding was torn
                except TierCorrupt:
                    assert meant(torn) != meant(new)
    _write(raw, at, new)
    assert load(tier, key_of(1)) == payload_of(1)


def _files_of(tier: DiskTier) -> list[Path]:
    return [path for path in tier._root.rglob("*") if path.suffix in (".kv", ".slab")]


def _find(path: Path, key: bytes) -> int | None:
    """Find the beginning of a key's frame in a file of frames."""
    raw = path.read_bytes()
    at = raw.find(b"SPILLKV\n")
    while at >= 0:
        if raw[at + 32 : at + 32 + len(key)] == key:
            return at - FRAME.header_at
        at = raw.find(b"SPILLKV\n", at + 1)
    return None


def _read(path: Path, at: int, size: int) -> bytes:
    with path.open("rb") as file:
        return os.pread(file.fileno(), size, at)


def _write(path: Path, at: int, raw: bytes) -> None:
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), raw, at)


# --- who may ----------------------------------------------------------------------------------------------------------


@contextmanager
def unprivileged() -> Iterator[None]:
    """Run the block without root's rights, because permissions do not bind root."""
    was_root = os.geteuid() == 0
    if was_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if was_root:
            os.seteuid(0)


@pytest.fixture
def open_path(tmp_path: Path) -> Path:
    """A folder below which everyone may look things up, so that only ``kv`` decides."""
    for folder in [tmp_path, *tmp_path.parents]:
        if folder.stat().st_uid == os.getuid() and folder.stat().st_mode & 0o011 != 0o011:
            folder.chmod(folder.stat().st_mode | 0o011)
    return tmp_path


def test_a_directory_that_may_not_be_entered_is_refused_by_name(
    make_tier: Callable[..., DiskTier], open_path: Path
) -> None:
    root = open_path / "kv"
    make_tier(root).store(key_of(1), payload_of(1), soon())
    root.chmod(0o000)
    try:
        with unprivileged():
            tier = make_tier(root)
            for call in (
                lambda: tier.prepare(soon()),
                lambda: tier.store(key_of(2), payload_of(2), soon()),
                lambda: load(tier, key_of(1)),
            ):
                error = error_of(call)
                assert isinstance(error, TierRefused)
                assert error.reason == RefusedReason.PERMISSION
                assert str(root) in str(error)
    finally:
        root.chmod(0o755)
    assert load(make_tier(root), key_of(1)) == payload_of(1)


def test_a_directory_that_may_only_be_read_is_read(make_tier: Callable[..., DiskTier], open_path: Path) -> None:
    root = open_path / "kv"
    make_tier(root).store(key_of(1), payload_of(1), soon())
    for folder, _, names in os.walk(root):
        os.chmod(folder, 0o555)
        for name in names:
            os.chmod(os.path.join(folder, name), 0o444)
    with unprivileged():
        tier = make_tier(root)
        assert load(tier, key_of(1)) == payload_of(1)
        assert error_of(lambda: tier.store(key_of(2), payload_of(2), soon())).reason == RefusedReason.PERMISSION
        assert load(tier, key_of(1)) == payload_of(1)
    for folder, _, _ in os.walk(root):
        os.chmod(folder, 0o755)


# --- processes --------------------------------------------------------------------------------------------------------

_KILLS = """
import json, os, random, signal, sys, time
from pathlib import Path
from spillway_connector.errors import TierMiss
from spillway_connector.testing.cache_first import CacheFirst
from spillway_connector.testing.tier_contract import NAMESPACE, PAYLOAD_BYTES, key_of, payload_of, soon
from spillway_connector.tiers.disk.files.tier import FileTier
from spillway_connector.tiers.disk.files.space import Space
from spillway_connector.tiers.disk.slab.tier import SlabTier
layout, root, max_bytes, kills = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
kind = {"files": FileTier, "slab": SlabTier, "slab, page cache first": CacheFirst}[layout]
payloads = [payload_of(seed) for seed in range(90)]
target = memoryview(bytearray(PAYLOAD_BYTES))
lots = random.Random(5)
report = {"wrong": 0, "served": 0, "highest": 0, "lost_index": 0, "misjudged": 0, "scans": 0, "errors": []}

def open_tier():
    return kind(NAMESPACE, PAYLOAD_BYTES, root, max_bytes=max_bytes, tenant_max_bytes=max_bytes // 2)

def worker(progress, first):
    tier = open_tier()
    while True:
        for step in range(90):
            seed = (first + step) % 90
            tier.store(key_of(seed), payloads[seed], soon(), b"tenant-%d" % (seed % 3))
            os.write(progress, b".")
            if step % 7 == 0:
                tier.discard(key_of((seed + 50) % 90), soon())

def sizes():
    for folder, _, names in os.walk(root):
        for name in names:
            if layout != "files" or name.endswith(".kv") or folder.endswith("partial"):
                yield os.stat(os.path.join(folder, name)).st_size

for kill in range(kills):
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        try:
            worker(write_end, lots.randrange(90))
        finally:
            os._exit(1)
    os.close(write_end)
    for _ in range(lots.randint(1, 25)):
        if not os.read(read_end, 1):
            report["errors"].append("the worker ended by itself")
            break
    instant = time.perf_counter() + lots.random() * 0.003
    while time.perf_counter() < instant:
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(read_end)
    report["highest"] = max(report["highest"], sum(sizes()))
    if layout == "files":
        survivor = Space(root, max_bytes, time.monotonic)
        report["misjudged"] += survivor.resident_bytes(soon()) != sum(sizes())
        report["scans"] += survivor.scans
        survivor.close()
    if layout != "files" and kill % 5 == 4:
        next(root.glob("slab/*/index")).unlink()
        report["lost_index"] += 1
    tier = open_tier()
    for seed in range(90):
        try:
            tier.load(key_of(seed), target, soon())
            report["served"] += 1
            report["wrong"] += target != payloads[seed]
        except TierMiss:
            pass
        except Exception as error:
            report["errors"].append(repr(error))
    tier.close()
print(json.dumps(report))
"""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sixty_kills_at_random_instants_leave_only_whole_frames(layout: str, tmp_path: Path) -> None:
    """Stores, evictions, quotas and discards are cut off anywhere; the slab's index is lost as well now and then."""
    result = subprocess.run(
        [sys.executable, "-c", _KILLS, layout, str(tmp_path / "kv"), str(MAX_BYTES), "60"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["errors"] == []
    assert report["wrong"] == 0
    assert report["served"] > 600
    assert report["highest"] <= MAX_BYTES
    assert report["misjudged"] == 0, "the ledger, once someone has looked"
    assert report["scans"] == 0
    assert report["lost_index"] == (12 if layout != "files" else 0)


_UNLOCKED = """
import fcntl, json, random, sys
from pathlib import Path
from spillway_connector.errors import TierMiss, TierRefused, TierUnreachable
from spillway_connector.testing.tier_contract import NAMESPACE, PAYLOAD_BYTES, key_of, payload_of, soon
from spillway_connector.tiers.disk.files.tier import FileTier
fcntl.flock = lambda descriptor, how: None
root, max_bytes, first = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
tier = FileTier(NAMESPACE, PAYLOAD_BYTES, root, max_bytes=max_bytes)
target = memoryview(bytearray(PAYLOAD_BYTES))
report = {"wrong": 0, "hits": 0, "stored": 0, "lost_stores": 0}
print("ready", flush=True)
sys.stdin.readline()
for step in range(150):
    seed = (first + step) % 60
    try:
        tier.store(key_of(seed), payload_of(seed), soon())
        report["stored"] += 1
    except (TierUnreachable, TierRefused) as lost:
        assert lost.reason in ("root_missing", "no_space"), lost
        report["lost_stores"] += 1
    if step % 25 == 0:
        tier._space.rescan(soon())
    for other in (seed, (first + 40 - step) % 60):
        try:
            tier.load(key_of(other), target, soon())
            report["hits"] += 1
            report["wrong"] += target != payload_of(other)
        except TierMiss:
            pass
tier.close()
print(json.dumps(report))
"""


def _frame_bytes(root: Path) -> int:
    """Count the bytes of frames while the maintenance thread may remove files and folders."""
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.stat(f"{folder}/{name}").st_size if name.endswith(".kv") else 0
    return total


def test_files_on_a_mount_without_locks_serve_no_wrong_byte(tmp_path: Path) -> None:
    """Some shared mounts take flock and do nothing, or lock each node for itself.

    Then the bound is kept only as well as each node can count, and a sweep may take the file another is writing, or the
    count may say that nothing fits, which costs that store; no byte is wrong.
    """
    root = tmp_path / "kv"
    children = [
        subprocess.Popen(
            [sys.executable, "-c", _UNLOCKED, str(root), str(20 * 20480), str(first)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for first in (0, 20, 40)
    ]
    for child in children:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    reports = [json.loads(child.communicate(timeout=120)[0]) for child in children]
    assert [report["wrong"] for report in reports] == [0, 0, 0]
    assert all(report["hits"] > 0 and report["stored"] > report["lost_stores"] for report in reports)
    tier = FileTier(NAMESPACE, PAYLOAD_BYTES, root, max_bytes=20 * 20480)
    tier._space.rescan(soon())
    tier.store(key_of(99), payload_of(99), soon())  # brings the directory back within its bound
    assert _frame_bytes(root) <= 20 * 20480
    for seed in range(60):
        try:
            assert load(tier, key_of(seed)) == payload_of(seed)
        except TierMiss:
            pass
    tier.close()
