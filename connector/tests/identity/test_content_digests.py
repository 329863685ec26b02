from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from spillway_connector.identity import content_digests
from spillway_connector.identity.content_digests import CACHE_NAME, PIECE_BYTES, digests_of, file_digest


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files whose bytes were read."""
    read: list[str] = []

    def counted(path: Path, pool: object = None) -> str:
        read.append(path.name)
        return file_digest(path)

    monkeypatch.setattr(content_digests, "file_digest", counted)
    return read


def write_old(path: Path, content: bytes) -> Path:
    """Write a file whose times have settled at `in_a_minute`, like those of an older download."""
    path.write_bytes(content)
    return path


def in_a_minute() -> int:
    return content_digests.time.time_ns() + 60_000_000_000


def test_every_byte_counts_in_every_piece(tmp_path: Path):
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.truncate(PIECE_BYTES + 10)  # sparse: costs no disk
    digests = {file_digest(path)}
    for offset in (0, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 9):
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(b"\1")
        digests.add(file_digest(path))
    with path.open("ab") as file:
        file.write(b"\0")
    digests.add(file_digest(path))
    assert len(digests) == 6


def test_read_once_and_remembered(tmp_path: Path, reads: list[str]):
    path = write_old(tmp_path / "a.bin", b"one")
    first = digests_of([path], [tmp_path], now_ns=in_a_minute)
    assert digests_of([path], [tmp_path], now_ns=in_a_minute) == first
    assert reads == ["a.bin"]


def test_files_of_one_name_in_two_folders_are_remembered_apart(tmp_path: Path, reads: list[str]):
    paths = []
    for folder in ("encoder", "decoder"):
        (tmp_path / folder).mkdir()
        paths.append(write_old(tmp_path / folder / "a.bin", folder.encode()))
    first = digests_of(paths, [tmp_path], now_ns=in_a_minute)
    assert digests_of(paths, [tmp_path], now_ns=in_a_minute) == first
    assert len(set(first.values())) == len(reads) == 2


def test_a_copy_with_other_times_has_the_same_digest(tmp_path: Path):
    for name in ("node-1", "node-2"):
        (tmp_path / name).mkdir()
        write_old(tmp_path / name / "a.bin", b"one")
    os.utime(tmp_path / "node-2" / "a.bin", (1, 1))
    (one,) = digests_of([tmp_path / "node-1" / "a.bin"]).values()
    (other,) = digests_of([tmp_path / "node-2" / "a.bin"]).values()
    assert one == other


def test_a_change_of_the_same_size_is_read_again(tmp_path: Path, reads: list[str]):
    path = write_old(tmp_path / "a.bin", b"one")
    before = digests_of([path], [tmp_path], now_ns=in_a_minute)
    found = path.stat()
    path.write_bytes(b"two")
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))  # a change hidden by setting the time back
    assert digests_of([path], [tmp_path], now_ns=in_a_minute) != before
    assert reads == ["a.bin", "a.bin"]


def test_a_file_changed_a_moment_ago_is_not_remembered(tmp_path: Path, reads: list[str]):
    path = tmp_path / "a.bin"
    path.write_bytes(b"one")
    digests_of([path], [tmp_path])
    digests_of([path], [tmp_path])
    assert reads == ["a.bin", "a.bin"]


def test_a_folder_that_cannot_be_written_to_hands_over_to_the_next(tmp_path: Path, reads: list[str]):
    path = write_old(tmp_path / "a.bin", b"one")
    blocked = tmp_path / "a.bin" / "below-a-file"  # fails for every user, root too
    digests_of([path], [blocked, tmp_path / "cache"], now_ns=in_a_minute)
    digests_of([path], [blocked, tmp_path / "cache"], now_ns=in_a_minute)
    assert reads == ["a.bin"]
    assert (tmp_path / "cache" / CACHE_NAME).is_file()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 1}', '{"version": 1, "files": {"a.bin": 3}}'])
def test_a_damaged_memory_is_no_answer(tmp_path: Path, reads: list[str], content: str):
    path = write_old(tmp_path / "a.bin", b"one")
    expected = digests_of([path])
    (tmp_path / CACHE_NAME).write_text(content)
    assert digests_of([path], [tmp_path], now_ns=in_a_minute) == expected


def test_a_hub_s_blob_is_taken_by_its_name(tmp_path: Path, reads: list[str]):
    named = hashlib.sha256(b"weights").hexdigest()
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    (blobs / named).write_bytes(b"weights")
    (blobs / ("a" * 40)).write_bytes(b"{}")  # a small file: named by git's hash, so read
    (snapshot / "model.safetensors").symlink_to(blobs / named)
    (snapshot / "config.json").symlink_to(blobs / ("a" * 40))
    found = digests_of([snapshot / "model.safetensors", snapshot / "config.json"])
    assert found[snapshot / "model.safetensors"] == f"sha256:{named}"
    assert reads == ["config.json"]


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write_old(tmp_path / "a.bin", b"one")

    def digest_and_change(path: Path, pool: object = None) -> str:
        digest = file_digest(path)
        path.write_bytes(b"longer")
        return digest

    monkeypatch.setattr(content_digests, "file_digest", digest_and_change)
    with pytest.raises(OSError, match="changed while it was read"):
        digests_of([path], [tmp_path])


def test_a_link_in_the_place_of_the_memory_or_its_lock_is_not_followed(tmp_path: Path):
    folder, victim = tmp_path / "model", tmp_path / "victim"
    folder.mkdir()
    victim.write_bytes(b"the node's")
    path = write_old(folder / "a.bin", b"one")
    expected = digests_of([path])
    for name in (CACHE_NAME, f"{CACHE_NAME}.lock", f"{CACHE_NAME}.{os.getpid()}"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(victim)
        assert digests_of([path], [folder], now_ns=in_a_minute) == expected
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
        assert digests_of([path], [folder], now_ns=in_a_minute) == expected
        (folder / name).unlink()
    assert victim.read_bytes() == b"the node's"


def test_a_fifo_among_the_files_of_an_adapter_is_an_error_and_no_wait(tmp_path: Path):
    os.mkfifo(tmp_path / "adapter_model.bin")
    with pytest.raises(OSError, match="a FIFO"):
        digests_of([tmp_path / "adapter_model.bin"])
