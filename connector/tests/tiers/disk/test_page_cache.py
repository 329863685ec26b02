"""Mounts on which the page cache is not used at all; slab/test_page_cache.py tests what is in it and what a load makes
of that."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from spillway_connector.tiers.disk import page_cache
from spillway_connector.tiers.disk.page_cache import supports_page_cache


@pytest.mark.parametrize(("page_bytes", "tried"), [(4096, True), (16_384, False), (65_536, False)])
def test_frames_that_would_share_a_page_are_kept_out_of_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page_bytes: int, tried: bool
) -> None:
    """A page of 64 KiB holds the end of one frame and the start of the next: cached would not mean whole."""
    files: list[str] = []

    def open_noted(path: str, flags: int, mode: int = 0, *, dir_fd: int | None = None) -> int:
        files.append(str(path))
        raise PermissionError(path)

    monkeypatch.setattr(mmap, "PAGESIZE", page_bytes)
    monkeypatch.setattr(page_cache, "_SYNC_FILE_RANGE", lambda *_: 0)
    monkeypatch.setattr(os, "open", open_noted)

    if tried:
        with pytest.raises(PermissionError):
            supports_page_cache(tmp_path)
    else:
        assert not supports_page_cache(tmp_path)
    assert bool(files) == tried
