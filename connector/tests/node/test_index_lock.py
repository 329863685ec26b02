"""The lock of an index: on which file it is, and what a killed holder leaves."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path

import pytest

from spillway_connector.errors import TierTimeout
from spillway_connector.node.index_lock import IndexLock


def lock_on(path: Path) -> IndexLock:
    return IndexLock(path, os.open(path, os.O_CREAT | os.O_RDWR))


def test_it_stays_on_the_file_that_was_opened_when_its_name_is_given_to_another(tmp_path: Path) -> None:
    path = tmp_path / "index"
    first, second = lock_on(path), lock_on(path)
    path.unlink()
    other = lock_on(path)
    first.acquire(0.0)
    other.acquire(0.0)
    with pytest.raises(TierTimeout, match="another process held the lock"):
        second.acquire(0.0)
    first.release()
    second.acquire(0.0)
    for lock in (first, second, other, other):
        lock.close()


def test_a_killed_holder_leaves_it(tmp_path: Path) -> None:
    path = tmp_path / "index"
    lock = lock_on(path)
    ready, said = os.pipe()
    holder = os.fork()
    if not holder:
        try:
            lock_on(path).acquire(60.0)
            os.write(said, b"1")
            time.sleep(60)
        finally:
            os._exit(1)
    assert os.read(ready, 1) == b"1"
    with pytest.raises(TierTimeout):
        lock.acquire(0.01)
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    lock.acquire(60.0)
    lock.close()
    os.close(ready)
    os.close(said)


def test_another_failure_than_a_holder_is_an_error_of_the_system(tmp_path: Path) -> None:
    lock = IndexLock(tmp_path, os.open(tmp_path, os.O_PATH))
    with pytest.raises(OSError, match="descriptor") as raised:
        lock.acquire(60.0)
    assert raised.value.errno == errno.EBADF
    lock.close()
