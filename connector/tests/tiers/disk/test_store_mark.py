from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from spillway_connector.tiers.disk.store_mark import StoreMark


def mark_of(root: Path) -> bytes | None:
    mark = StoreMark(root)
    mark.share()
    return mark.value


def test_everyone_reads_the_mark_of_whoever_came_first(tmp_path: Path) -> None:
    marks: list[bytes | None] = []
    begin = threading.Barrier(8)

    def share() -> None:
        begin.wait()
        marks.append(mark_of(tmp_path))

    threads = [threading.Thread(target=share) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(marks)) == 1 and marks[0] is not None
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_two_directories_are_two_places(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    assert mark_of(tmp_path / "one") != mark_of(tmp_path / "two")


@pytest.mark.parametrize("damaged", [b"", b"0123", b"z" * 32, b"0" * 33])
def test_a_damaged_mark_is_written_anew(tmp_path: Path, damaged: bytes) -> None:
    (tmp_path / "store").write_bytes(damaged)
    mark = mark_of(tmp_path)
    assert mark is not None and len(mark) == 32
    assert mark == (tmp_path / "store").read_bytes() == mark_of(tmp_path)


def test_without_hard_links_the_mark_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", refuse)
    assert mark_of(tmp_path) == mark_of(tmp_path)


def test_a_directory_that_cannot_be_used_has_none(tmp_path: Path) -> None:
    assert mark_of(tmp_path / "missing") is None
