from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from spillway_connector import own_files
from spillway_connector.own_files import (
    NotOwn,
    clear_the_place,
    link_own,
    make_folders,
    open_anew,
    open_own,
    open_to_others,
    read_own,
    rename_own,
    unlink_own,
    write_new,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store of one file below two folders, beside a file of the node."""
    root = tmp_path / "store"
    make_folders(root / "a" / "b", 3)
    write_new(root / "a" / "b" / "file", 3, b"ours")
    (tmp_path / "victim").write_bytes(b"the node's")
    return root


def opened(path: Path, flags: int, depth: int) -> bytes:
    descriptor = open_own(path, flags, depth)
    try:
        return os.pread(descriptor, 100, 0)
    finally:
        os.close(descriptor)


def test_a_root_behind_a_link_is_the_operators_choice(root: Path, tmp_path: Path) -> None:
    (tmp_path / "mounted").symlink_to(root)
    assert read_own(tmp_path / "mounted" / "a" / "b" / "file", 3) == b"ours"


@pytest.mark.parametrize("folder", ["a", "a/b"])
def test_no_call_follows_a_link_in_the_place_of_a_folder(root: Path, tmp_path: Path, folder: str) -> None:
    aside = tmp_path / "aside"
    (root / folder).rename(aside)
    (root / folder).symlink_to(aside)
    before = sorted(path for path in aside.rglob("*"))
    place = root / "a" / "b" / "file"
    write_new(root / "other", 1, b"")
    for call in (
        lambda: open_own(place, os.O_RDWR, 3),
        lambda: write_new(place.with_name("new"), 3, b"x"),
        lambda: open_anew(place, 3),
        lambda: unlink_own(place, 3),
        lambda: clear_the_place(place, 3),
        lambda: rename_own(place, place.with_name("renamed"), 3),
        lambda: link_own(root / "other", place.with_name("linked"), 1, 3),
        lambda: make_folders(root / "a" / "b" / "c", 3),
    ):
        with pytest.raises(NotOwn, match="symbolic link"):
            call()
    assert sorted(path for path in aside.rglob("*")) == before


def test_a_folder_exchanged_for_a_link_after_it_was_opened_leads_nowhere(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is exchanged between the look at it and the use of a name in it."""
    aside = tmp_path / "aside"
    aside.mkdir()
    real = os.open

    def exchanging(path: str, flags: int, *rest: int, **how: int) -> int:
        if path == "new" and not (root / "a" / "b").is_symlink():
            (root / "a" / "b").rename(root / "a" / "was-b")
            (root / "a" / "b").symlink_to(aside)
        return real(path, flags, *rest, **how)

    monkeypatch.setattr(os, "open", exchanging)
    write_new(root / "a" / "b" / "new", 3, b"x")
    assert list(aside.iterdir()) == []
    assert (root / "a" / "was-b" / "new").read_bytes() == b"x"


def test_a_hard_link_to_a_file_of_the_node_is_not_opened(root: Path, tmp_path: Path) -> None:
    place = root / "a" / "b" / "linked"
    os.link(tmp_path / "victim", place)
    with pytest.raises(NotOwn, match="hard links"):
        opened(place, os.O_RDWR, 3)
    clear_the_place(place, 3)
    assert not place.exists()
    assert (tmp_path / "victim").read_bytes() == b"the node's"


def test_a_file_that_every_user_may_write_to_is_read_and_not_written(root: Path) -> None:
    path = root / "a" / "b" / "file"
    path.chmod(0o606)
    assert opened(path, os.O_RDONLY, 3) == b"ours"
    with pytest.raises(NotOwn, match=r"every user may write to \(mode 0606\)"):
        opened(path, os.O_RDWR, 3)


def test_the_group_of_the_volume_may_write_and_another_may_not(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubelet makes all files of a volume with an fsGroup writable for the group, at every start of a pod."""
    path = root / "a" / "b" / "file"
    path.chmod(0o660)
    root.chmod(0o2775)
    assert opened(path, os.O_RDWR, 3) == b"ours"
    assert open_to_others(root) is None
    monkeypatch.setattr(own_files, "_groups", lambda: {4_000_000})
    with pytest.raises(NotOwn, match="group"):
        opened(path, os.O_RDWR, 3)
    assert "group" in str(open_to_others(root))


def test_a_file_of_another_user_is_not_written_unless_the_directory_is_theirs_too(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fstat
    stranger = 4_000_000

    def foreign(descriptor: int) -> os.stat_result:
        status = real(descriptor)
        if stat.S_ISREG(status.st_mode):
            return os.stat_result((*status[:4], stranger, *status[5:]))
        return status

    monkeypatch.setattr(os, "fstat", foreign)
    monkeypatch.setattr(own_files, "_MADE_HERE", {})
    path = root / "a" / "b" / "file"
    assert opened(path, os.O_RDONLY, 3) == b"ours"
    with pytest.raises(NotOwn, match=f"user {stranger}"):
        opened(path, os.O_RDWR, 3)
    descriptor = open_own(path, os.O_RDWR, 3, owners_checked=False)
    os.close(descriptor)
    real_stat = os.stat
    monkeypatch.setattr(os, "stat", lambda *a, **k: os.stat_result((*(s := real_stat(*a, **k))[:4], stranger, *s[5:])))
    assert opened(path, os.O_RDWR, 3) == b"ours"


def test_a_file_system_without_modes_is_taken_as_it_shows_its_files(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SMB shows every file as writable for all, and a server with root_squash as another user's."""
    path = root / "a" / "b" / "file"
    path.chmod(0o666)
    root.chmod(0o777)
    device = path.stat().st_dev
    monkeypatch.setattr(own_files, "_MADE_HERE", {device: (os.geteuid(), stat.S_IWGRP | stat.S_IWOTH)})
    assert opened(path, os.O_RDWR, 3) == b"ours"
    assert open_to_others(root) is None


def test_a_directory_that_every_user_may_write_to_is_named(root: Path) -> None:
    root.chmod(0o1777)
    assert open_to_others(root) == "every user may write to it (mode 1777)"
    root.chmod(0o700)
    assert open_to_others(root) is None


def test_a_document_without_an_end_is_not_read_to_its_end(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_files, "SMALL_FILE_BYTES_MAX", 100)
    path = root / "a" / "b" / "file"
    path.write_bytes(bytes(101))
    with pytest.raises(NotOwn, match="more than 100 bytes"):
        read_own(path, 3)
    path.write_bytes(bytes(100))
    assert read_own(path, 3) == bytes(100)


def test_a_path_relative_to_the_working_directory_is_opened(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    assert read_own(Path("a/b/file"), 3) == b"ours"
    monkeypatch.chdir(root / "a" / "b")
    assert read_own("file", 3) == b"ours"
