"""Memory for transfers: aligned, whole, asked for on huge pages, and there without them too."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from spillway_connector.tiers import buffers
from spillway_connector.tiers.buffers import HUGE_PAGE_BYTES, transfer_buffer
from spillway_connector.tiers.frame import PAGE_BYTES


def recording(asked: list[int], answer: Callable[[], None]) -> type[mmap.mmap]:
    class Recorded(mmap.mmap):
        def madvise(self, option: int, *_: int) -> None:
            asked.append(option)
            answer()

    return Recorded


@pytest.mark.parametrize("size", [1, PAGE_BYTES, 3 << 20, HUGE_PAGE_BYTES, 2_949_120 + 32])
def test_a_buffer_is_flat_writable_zeroed_and_begins_on_a_huge_page(size: int) -> None:
    buffer = transfer_buffer(size)
    assert (buffer.nbytes, buffer.format, buffer.ndim, buffer.readonly) == (size, "B", 1, False)
    assert np.frombuffer(buffer, np.uint8).ctypes.data % HUGE_PAGE_BYTES == 0
    assert bytes(buffer) == bytes(size)
    buffer[-1] = 7
    assert buffer[-1] == 7


def test_two_buffers_share_nothing() -> None:
    first, second = transfer_buffer(PAGE_BYTES), transfer_buffer(PAGE_BYTES)
    first[:] = b"\1" * PAGE_BYTES
    assert bytes(second) == bytes(PAGE_BYTES)


@pytest.mark.parametrize("page_bytes", [4096, 65_536])
def test_advice_is_given_about_whole_pages(monkeypatch: pytest.MonkeyPatch, page_bytes: int) -> None:
    """This holds on any kernel: madvise refuses a range that begins within a page, and with it every buffer's huge
    pages."""
    advised: list[tuple[int, int]] = []

    class Recorded(mmap.mmap):
        def madvise(self, option: int, start: int = 0, length: int | None = None) -> None:
            advised.append((start, len(self) if length is None else length))

    monkeypatch.setattr(buffers.mmap, "mmap", Recorded)
    monkeypatch.setattr(buffers.mmap, "PAGESIZE", page_bytes)
    for size in (1, PAGE_BYTES, 2_949_120 + 32):
        buffer = transfer_buffer(size)
        start, length = advised.pop()
        assert (start % page_bytes, length % page_bytes, advised) == (0, 0, [])
        assert length >= size and np.frombuffer(buffer, np.uint8).ctypes.data % page_bytes == 0


def test_huge_pages_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(buffers.mmap, "mmap", recording(asked, lambda: None))
    transfer_buffer(PAGE_BYTES)
    assert asked == [mmap.MADV_HUGEPAGE]


def test_a_kernel_without_huge_pages_gives_ordinary_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise OSError(errno.EINVAL, "no huge pages in this kernel")

    asked: list[int] = []
    monkeypatch.setattr(buffers.mmap, "mmap", recording(asked, refuse))
    buffer = transfer_buffer(3 * PAGE_BYTES)
    assert asked == [mmap.MADV_HUGEPAGE]
    assert bytes(buffer) == bytes(3 * PAGE_BYTES)


def test_a_file_is_read_into_a_buffer_past_its_references(tmp_path: Path) -> None:
    """The memory lives as long as the view does."""
    path = tmp_path / "block"
    path.write_bytes(bytes(range(256)) * 16)
    buffer = transfer_buffer(2 * PAGE_BYTES)[PAGE_BYTES:]
    descriptor = os.open(path, os.O_RDONLY)
    try:
        assert os.preadv(descriptor, [buffer], 0) == PAGE_BYTES
    finally:
        os.close(descriptor)
    assert bytes(buffer) == path.read_bytes()
