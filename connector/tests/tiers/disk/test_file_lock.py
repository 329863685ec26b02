from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from spillway_connector.errors import TierTimeout
from spillway_connector.testing.tier_contract import soon
from spillway_connector.tiers.disk.file_lock import FileLock


def past() -> float:
    return time.monotonic() - 1.0


def test_one_holder_among_objects_and_threads(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first, second = FileLock(path, time.monotonic), FileLock(path, time.monotonic)
    with first.held(soon()) as descriptor:
        os.pwrite(descriptor, b"held", 0)
        with pytest.raises(TierTimeout, match="another process held the lock"), second.held(past()):
            raise AssertionError("held twice")
        with pytest.raises(TierTimeout, match="another thread held the lock"), first.held(past()):
            raise AssertionError("held twice")
    with second.held(soon()) as descriptor:
        assert os.pread(descriptor, 4, 0) == b"held"
    first.close()
    second.close()


def test_waiting_ends_with_the_release(tmp_path: Path) -> None:
    first, second = (FileLock(tmp_path / "lock", time.monotonic) for _ in range(2))
    order: list[str] = []

    def wait() -> None:
        with second.held(soon()):
            order.append("second")

    with first.held(soon()):
        thread = threading.Thread(target=wait)
        thread.start()
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_a_killed_holder_releases_it(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from spillway_connector.tiers.disk.file_lock import FileLock\n"
        "with FileLock(Path(sys.argv[1]), time.monotonic).held(time.monotonic() + 30):\n"
        "    print('held', flush=True); time.sleep(1000)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "lock")], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == "held\n"
        lock = FileLock(tmp_path / "lock", time.monotonic)
        with pytest.raises(TierTimeout), lock.held(past()):
            raise AssertionError("held twice")
        child.kill()
        with lock.held(soon()):
            pass


def test_a_replaced_file_is_locked_anew(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock, other = FileLock(path, time.monotonic), FileLock(path, time.monotonic)
    with lock.held(soon()):
        pass
    path.unlink()
    with other.held(soon()), pytest.raises(TierTimeout), lock.held(past()):
        raise AssertionError("locks the removed file")
    with lock.held(soon()) as descriptor:
        assert os.fstat(descriptor).st_ino == path.stat().st_ino


def test_a_missing_folder_is_an_error_and_closing_twice_is_not(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "missing" / "lock", time.monotonic)
    with pytest.raises(FileNotFoundError), lock.held(soon()):
        raise AssertionError("held without a file")
    lock.close()
    lock.close()
    (tmp_path / "missing").mkdir()
    with lock.held(soon()):
        pass
