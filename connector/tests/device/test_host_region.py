from __future__ import annotations

import errno
import mmap
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from spillway_connector.device import host_region
from spillway_connector.device.host_region import HostRegion, region_path
from spillway_connector.errors import HostMemoryError
from spillway_connector.plan.geometry import ChunkGeometry
from spillway_connector.testing.memory import mapped_bytes

PAGE = mmap.PAGESIZE


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


def test_each_rank_takes_the_pages_of_its_own_cells(path: Path):
    """The opener that makes the file decides nothing for the others."""
    geometry = ChunkGeometry(3 * PAGE + 100, 1, 3)
    regions = [HostRegion(path, 5, geometry.row_bytes) for _ in range(3)]
    assert regions[0].taken_bytes == 0
    for rank, region in enumerate(regions):
        before = region.taken_bytes
        region.claim(*geometry.own_pages(rank))
        assert region.taken_bytes - before == 5 * geometry.own_pages(rank)[1] > 0
    assert regions[0].taken_bytes == regions[0].size_bytes
    for region in regions:
        region.claim_rest(patience_seconds=0)
        region.cleanup()


def test_what_no_rank_takes_is_taken_by_the_others(path: Path):
    first, second = HostRegion(path, 4, 2 * PAGE), HostRegion(path, 4, 2 * PAGE)
    first.claim(0, PAGE)
    assert first.taken_bytes == 4 * PAGE
    first.claim_rest(patience_seconds=0.01)
    assert second.taken_bytes == second.size_bytes
    second.cleanup()


def test_a_rank_waits_for_the_pages_of_the_others(path: Path, monkeypatch: pytest.MonkeyPatch):
    first, second = HostRegion(path, 4, 2 * PAGE), HostRegion(path, 4, 2 * PAGE)
    first.claim(0, PAGE)
    taken_by_first: list[tuple[int, int]] = []
    monkeypatch.setattr(first, "_take", lambda *piece: taken_by_first.append((first.taken_bytes, *piece)))
    other = threading.Timer(0.05, second.claim, (PAGE, PAGE))
    other.start()
    first.claim_rest(patience_seconds=60)
    other.join()
    assert taken_by_first == [(first.size_bytes, 0, first.size_bytes)]
    first.cleanup()


def test_shared_memory_that_fills_up_meanwhile_is_an_error_and_no_signal(path: Path, monkeypatch: pytest.MonkeyPatch):
    region = HostRegion(path, 4, 2 * PAGE)

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(HostMemoryError, match=r"needs \d+ bytes .*\(No space left on device\); lower num_cpu_blocks"):
        region.claim(0, PAGE)
    assert not path.exists()
    region.cleanup()


@pytest.mark.parametrize("page_bytes", [4096, 65_536])
def test_page_faults_are_taken_in_whole_pages(path: Path, monkeypatch: pytest.MonkeyPatch, page_bytes: int):
    region = HostRegion(path, 3, ChunkGeometry((3 << 20) + 1, 1, 1, page_bytes=page_bytes).row_bytes)
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(host_region, "_madvise", lambda at, size, _: asked.append((at - region.address, size)) or 0)
    region.populate(0, region.size_bytes)
    assert sum(size for _, size in asked) == region.size_bytes
    assert all((offset % page_bytes, size % page_bytes) == (0, 0) for offset, size in asked)
    region.cleanup()


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


def _a_file(place: Path, victim: Path) -> None:
    place.write_bytes(victim.read_bytes())
    place.chmod(0o666)


@pytest.mark.parametrize(
    "foreigner",
    [Path.symlink_to, Path.hardlink_to, _a_file, lambda place, _: os.mkfifo(place), lambda place, _: place.mkdir()],
    ids=["symbolic link", "hard link", "file that all may write to", "FIFO", "folder"],
)
def test_what_others_put_in_its_place_is_not_taken_for_the_cpu_tier(path: Path, foreigner):
    """Every user may put files into /dev/shm; a mapping of one would write KV into it, or show KV to its owner."""
    victim = path.with_name(f"{path.name}-of-the-node")
    victim.write_bytes(b"kept" * 4096)
    try:
        foreigner(path, victim)
        with pytest.raises(HostMemoryError, match=path.name):
            HostRegion(path, 1, 4096)
        assert victim.read_bytes() == b"kept" * 4096
    finally:
        victim.unlink()
        if path.is_dir():
            path.rmdir()


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
