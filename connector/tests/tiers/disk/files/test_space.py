"""Count of a directory's bytes, after kills at any instant and with changes during a scan."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from spillway_connector.testing.tier_contract import NAMESPACE, PAYLOAD_BYTES, key_of, payload_of, soon
from spillway_connector.tiers.disk.files.space import Space
from spillway_connector.tiers.disk.files.tier import FileTier
from spillway_connector.tiers.disk.files.tree import frame_path
from spillway_connector.tiers.disk.frame_places import FramePlaces

FRAME_BYTES = FramePlaces.of(PAYLOAD_BYTES).frame_bytes


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory with two frames."""
    tier = FileTier(NAMESPACE, PAYLOAD_BYTES, tmp_path / "kv", max_bytes=100 * FRAME_BYTES)
    for seed in range(2):
        tier.store(key_of(seed), payload_of(seed), soon())
    tier.close()
    return tmp_path / "kv"


def space_at(root: Path) -> Space:
    return Space(root, 100 * FRAME_BYTES, time.monotonic)


@pytest.mark.parametrize("moment", ["before the frames", "between two frames", "after the frames"])
def test_a_frame_that_is_published_during_a_scan_is_counted_once(
    root: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial, path = f"{root}/{NAMESPACE.hex}/partial/mine", frame_path(root / NAMESPACE.hex, key_of(9).hex())
    writer, scanner = space_at(root), space_at(root)
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    descriptor = writer.take(FRAME_BYTES, partial, lambda: os.open(partial, flags), soon())
    frames = scanner._frames

    def publish() -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.link(partial, path)
        os.unlink(partial)

    def frames_meanwhile() -> Iterator[os.DirEntry[str]]:
        if moment == "before the frames":
            publish()
        for number, entry in enumerate(frames()):
            if number == 1 and moment == "between two frames":
                publish()
            yield entry
        if moment == "after the frames":
            publish()

    monkeypatch.setattr(scanner, "_frames", frames_meanwhile)
    scanner.rescan(soon())
    assert writer.resident_bytes(soon()) == 3 * FRAME_BYTES
    os.close(descriptor)
    for space in (writer, scanner):
        space.close()


def test_the_room_of_an_abandoned_partial_file_is_returned_without_a_scan(root: Path) -> None:
    partial = f"{root}/{NAMESPACE.hex}/partial/mine"
    writer, other = space_at(root), space_at(root)
    other.rescan(soon())
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    descriptor = writer.take(FRAME_BYTES, partial, lambda: os.open(partial, flags), soon())
    assert space_at(root).resident_bytes(soon()) == 3 * FRAME_BYTES
    os.close(descriptor)  # as by the kernel when it dies
    assert other.resident_bytes(soon()) == 2 * FRAME_BYTES
    assert other.scans == 1
    assert not os.path.exists(partial)
    for space in (writer, other):
        space.close()


def test_abandoned_partial_files_are_removed_before_any_frame(root: Path) -> None:
    partials = [f"{root}/{NAMESPACE.hex}/partial/{number}" for number in range(3)]
    space = Space(root, 3 * FRAME_BYTES, time.monotonic)
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    os.close(space.take(FRAME_BYTES, partials[0], lambda: os.open(partials[0], flags), soon()))
    descriptor = space.take(FRAME_BYTES, partials[1], lambda: os.open(partials[1], flags), soon())
    assert not space.evictions
    assert space.resident_bytes(soon()) == 3 * FRAME_BYTES
    os.close(descriptor)
    space.close()


# Each operation is cut off before each of its system calls in turn, which is also after the one before. A process that
# ran all the time then compares what is left: the bytes on the disk, the bound, and the ledger's count.
_CUT_OFF = """
import fcntl, json, os, sys, time
from pathlib import Path
from spillway_connector.errors import TierError
from spillway_connector.testing.tier_contract import NAMESPACE, PAYLOAD_BYTES, key_of, payload_of, soon
from spillway_connector.tiers.disk.files.tier import FileTier
from spillway_connector.tiers.disk.files.space import Space
from spillway_connector.tiers.disk.frame_places import FramePlaces
base, max_frames = Path(sys.argv[1]), 6
FRAME_BYTES = FramePlaces.of(PAYLOAD_BYTES).frame_bytes
CALLS = [(os, name) for name in ("open", "close", "pwrite", "pwritev", "ftruncate", "link", "unlink", "rmdir", "utime")]
CALLS.append((fcntl, "flock"))

def cut_off_at(moment):
    left = [moment]
    def step():
        if not left[0]:
            os._exit(9)
        left[0] -= 1
    def wrap(call):
        def wrapped(*args, **options):
            step()
            return call(*args, **options)
        return wrapped
    for module, name in CALLS:
        setattr(module, name, wrap(getattr(module, name)))

def tier_on(root):
    tier = FileTier(NAMESPACE, PAYLOAD_BYTES, root, max_bytes=max_frames * FRAME_BYTES)
    tier._maintenance.start = lambda: None
    return tier

def store(tier):
    tier.store(key_of(50), payload_of(50), soon())

def evict(tier):
    tier._space.make_room(3 * FRAME_BYTES, soon())

def discard(tier):
    tier.discard(key_of(1), soon())

def fail(tier):
    def refuse(*_):
        raise OSError(5, "sick")
    tier._files.write = refuse
    try:
        tier.store(key_of(51), payload_of(51), soon())
    except TierError:
        pass

def sizes(root):
    for folder, _, names in os.walk(root):
        for name in names:
            if name.endswith(".kv") or (folder.endswith("partial") and not name.startswith("document-")):
                yield os.stat(os.path.join(folder, name))

report = []
for operation, frames in ((store, 3), (evict, 6), (discard, 3), (fail, 3)):
    for moment in range(10_000):
        root = base / f"{operation.__name__}-{moment}"
        tier = tier_on(root)
        for seed in range(frames):
            tier.store(key_of(seed), payload_of(seed), soon())
        survivor = Space(root, max_frames * FRAME_BYTES, time.monotonic)
        survivor.resident_bytes(soon())
        survivor._reclaimed_at = float("-inf")
        tier.close()
        child = os.fork()
        if not child:
            tier = tier_on(root)  # with descriptors, and so locks, of its own
            tier.prepare(soon())
            tier._space.rescan(soon())
            cut_off_at(moment)
            operation(tier)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        before = sum({found.st_ino: found.st_size for found in sizes(root)}.values())
        counted = survivor.resident_bytes(soon())
        there = sum(found.st_size for found in sizes(root))
        report.append([operation.__name__, moment, before // 4096, counted // 4096, there // 4096, survivor.scans])
        survivor.close()
        if os.WEXITSTATUS(status) == 0:
            break
        assert os.WEXITSTATUS(status) == 9, status
print(json.dumps(report))
"""


def test_an_operation_cut_off_at_any_call_leaves_the_ledger_right(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", _CUT_OFF, str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout)
    assert [row for row in report if row[3] != row[4]] == [], "the ledger does not count what is there"
    assert [row for row in report if row[2] * 4096 > 6 * FRAME_BYTES] == [], "above the bound"
    assert [row for row in report if row[5]] == [], "a scan was needed"
    moments = {name: sum(row[0] == name for row in report) for name in ("store", "evict", "discard", "fail")}
    assert min(moments.values()) > 5, moments
