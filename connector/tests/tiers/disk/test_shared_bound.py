from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from spillway_connector.testing.clock import SteppedClock
from spillway_connector.tiers.disk.shared_bound import BOUNDS_FOLDER, CHECK_SECONDS, SharedBound


def test_a_bound_on_disk_is_a_promise(tmp_path: Path) -> None:
    bound = SharedBound(tmp_path, 123, SteppedClock())
    assert bound.smallest() == 123
    [file] = (tmp_path / BOUNDS_FOLDER).iterdir()
    assert len(file.name) == 16 and file.read_bytes() == b"123"
    bound.close()
    assert list((tmp_path / BOUNDS_FOLDER).iterdir()) == []


def folder_changed(root: Path, clock: SteppedClock) -> None:
    """Let the folder's change be seen, as it is after the next tick of the kernel's clock."""
    os.utime(root / BOUNDS_FOLDER, ns=(int(clock() * 1e9), int(clock() * 1e9)))
    clock.advance(0.001)


def unseen_change(_root: Path, clock: SteppedClock) -> None:
    """Leave the folder's change unseen for a while, as a network file system does."""
    clock.advance(CHECK_SECONDS)


@pytest.mark.parametrize("later", [folder_changed, unseen_change])
def test_the_smallest_counts_from_the_next_look_on_and_until_its_process_ends(
    tmp_path: Path, later: Callable[[Path, SteppedClock], None]
) -> None:
    clock = SteppedClock()
    large, none = SharedBound(tmp_path, 300, clock), SharedBound(tmp_path, None, clock)
    assert (large.smallest(), none.smallest()) == (300, 300)
    small = SharedBound(tmp_path, 200, clock)
    assert small.smallest() == 200
    later(tmp_path, clock)
    assert (small.smallest(), large.smallest(), none.smallest()) == (200, 200, 200)
    small.close()
    later(tmp_path, clock)
    assert (large.smallest(), none.smallest()) == (300, 300)
    large.close()
    later(tmp_path, clock)
    assert none.smallest() is None


def test_the_bound_of_a_killed_process_goes_with_it(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path\n"
        "from spillway_connector.tiers.disk.shared_bound import SharedBound\n"
        "bound = SharedBound(Path(sys.argv[1]), 100, time.monotonic); bound.smallest(); print('said', flush=True)\n"
        "time.sleep(600)\n"
    )
    clock = SteppedClock()
    bound = SharedBound(tmp_path, 300, clock)
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"said\n"
        assert bound.smallest() == 100
        other.kill()
    clock.advance(CHECK_SECONDS)
    assert bound.smallest() == 300
    assert len(list((tmp_path / BOUNDS_FOLDER).iterdir())) == 1


@pytest.mark.parametrize("contents", [b"", b"0", b"-5", b"many", b"9" * 400, b"\xff" * 8])
def test_a_bound_that_is_none_does_not_count(tmp_path: Path, contents: bytes) -> None:
    clock = SteppedClock()
    other, bound = SharedBound(tmp_path, 200, clock), SharedBound(tmp_path, 300, clock)
    assert other.smallest() == 200
    [file] = (tmp_path / BOUNDS_FOLDER).iterdir()
    file.write_bytes(contents)
    assert bound.smallest() == 300


def test_what_is_no_file_there_is_neither_waited_for_nor_followed(tmp_path: Path) -> None:
    folder, victim = tmp_path / BOUNDS_FOLDER, tmp_path / "victim"
    folder.mkdir()
    victim.write_bytes(b"7")
    os.mkfifo(folder / ("0" * 16))
    (folder / ("1" * 16)).symlink_to(victim)
    assert SharedBound(tmp_path, 300, SteppedClock()).smallest() == 300
    assert victim.read_bytes() == b"7"


def test_a_bound_whose_file_was_removed_is_written_again(tmp_path: Path) -> None:
    clock = SteppedClock()
    bound = SharedBound(tmp_path, 300, clock)
    bound.smallest()
    for file in (tmp_path / BOUNDS_FOLDER).iterdir():
        file.unlink()
    clock.advance(CHECK_SECONDS)
    assert bound.smallest() == 300
    assert len(list((tmp_path / BOUNDS_FOLDER).iterdir())) == 1


def test_a_directory_that_is_missing_leaves_each_process_its_own(tmp_path: Path) -> None:
    assert SharedBound(tmp_path / "missing", 300, SteppedClock()).smallest() == 300
