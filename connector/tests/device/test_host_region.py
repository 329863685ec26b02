from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from spillway_connector.device.host_region import HostRegion, region_path
from spillway_connector.errors import HostMemoryError
from spillway_connector.testing.memory import mapped_bytes


@pytest.fixture
def path():
    path = region_path(f"test-{os.getpid()}")
    yield path
    path.unlink(missing_ok=True)


def test_two_openers_see_the_same_rows(path: Path):
    first = HostRegion(path, 4, 4096)
    second = HostRegion(path, 4, 4096)
    first.populate(0, first.size_bytes)
    rows = first.create_kv_memoryview()
    assert rows.shape == (4, 4096)
    rows.cast("B")[4096:4100] = b"kept"
    assert bytes(second.create_kv_memoryview().cast("B")[4096:4100]) == b"kept"


def test_the_name_goes_and_the_memory_stays(path: Path):
    first = HostRegion(path, 1, 4096)
    second = HostRegion(path, 1, 4096)
    second.unlink_name()
    assert not path.exists()
    second.create_kv_memoryview().cast("B")[:4] = b"kept"
    assert bytes(first.create_kv_memoryview().cast("B")[:4]) == b"kept"


def test_each_process_takes_its_page_faults_ahead(path: Path):
    first, second = HostRegion(path, 3, 3 << 20), HostRegion(path, 3, 3 << 20)
    first.populate(0, first.size_bytes)
    assert mapped_bytes(first.address) == first.size_bytes
    assert mapped_bytes(second.address) == 0
    second.populate_behind()
    deadline = time.monotonic() + 60
    while mapped_bytes(second.address) < second.size_bytes:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    second.cleanup()


def test_a_region_can_be_closed_while_its_pages_are_being_mapped(path: Path):
    for _ in range(20):
        region = HostRegion(path, 16, 4 << 20)
        region.populate_behind()
        region.cleanup()
        assert not [thread for thread in threading.enumerate() if thread.name == "spillway-populate"]


def test_another_engines_file_of_that_name_is_left_alone(path: Path):
    region = HostRegion(path, 1, 4096)
    region.unlink_name()
    other = HostRegion(path, 1, 4096)
    region.unlink_name()
    region.cleanup()
    assert path.exists()
    other.cleanup()
    assert not path.exists()


def test_cleanup_twice_and_with_a_view_held(path: Path):
    region = HostRegion(path, 1, 4096)
    view = region.create_kv_memoryview()
    region.cleanup()
    region.cleanup()
    assert view[0, 0] == 0
    assert not path.exists()


def test_too_much_is_refused_with_figures_and_leaves_nothing(path: Path):
    with pytest.raises(HostMemoryError, match="lower num_cpu_blocks"):
        HostRegion(path, 1 << 20, 1 << 22)  # 4 TiB
    assert not path.exists()


def _open_unlink_and_hang(path: Path, ready: multiprocessing.synchronize.Event) -> None:
    region = HostRegion(path, 1, 4096)
    region.unlink_name()
    ready.set()
    signal.pause()


def test_a_killed_process_leaves_nothing(path: Path):
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=_open_unlink_and_hang, args=(path, ready))
    process.start()
    assert ready.wait(30)
    process.kill()
    process.join()
    assert not path.exists()
