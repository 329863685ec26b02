"""A number that several processes share: bytes in use, in a small file that is locked while it changes.

A change of the number and the file that is made or removed with it are two writes. Before the first of them the ledger
records the intended change, under the same lock. A process that takes the lock and finds such a note completes or
undoes the change: its writer was killed in between. So a process that is killed at any instant leaves the ledger right.

Changes without a note (files put there or removed by hand, a lost ledger) are corrected by a scan:

    ledger = bytes seen by the scan + bytes added by anyone since the scan began

which never counts too little.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import xxhash

from spillway_connector.own_files import NotOwn, status_of, unlink_own
from spillway_connector.tiers.disk.file_lock import FileLock
from spillway_connector.tiers.tier import Clock

_FIELDS = struct.Struct("<8sQQ")
_MAGIC = b"SPILLSPC"
# Behind the fields and their checksum: the note, its path relative to the ledger's folder, and their checksum.
_NOTE = struct.Struct("<HHxxxxQQ")  # intended change, bytes of the path, inode, size
_NOTE_AT = _FIELDS.size + 8
_NO_NOTE = bytes(_NOTE.size)
_PATH_BYTES_MAX = 2048


class _Change(IntEnum):
    """The intended change of a file. A note of zeros is none."""

    MAKE = 1
    REMOVE = 2


@dataclass(frozen=True, slots=True)
class _Note:
    change: _Change
    path: str
    inode: int
    size: int


@dataclass(slots=True)
class Balance:
    """resident_bytes: bytes in use. added_bytes: bytes that were ever added; they show a scan what was added while it
    ran."""

    resident_bytes: int
    added_bytes: int


class Ledger:
    """The file at ``path``, made when missing. One holder among all threads and processes; OSError passes through.

    depth, owners_checked: of the file, see own_files.py. The files that it counts lie below the same root.
    """

    def __init__(self, path: Path, clock: Clock, depth: int, *, owners_checked: bool = True) -> None:
        self._folder = path.parent
        self._root = path.parents[depth - 1]
        self._lock = FileLock(path, clock, depth, owners_checked=owners_checked)
        self._descriptor = -1  # while the lock is held

    @contextmanager
    def locked(self, deadline: float) -> Iterator[Balance | None]:
        """Hold the ledger; yields None when it is damaged or new. Raises TierTimeout."""
        with self._lock.held(deadline) as self._descriptor:
            raw = os.pread(self._descriptor, _NOTE_AT + _NOTE.size + _PATH_BYTES_MAX + 8, 0)
            balance = read_balance(raw)
            note = None if balance is None else _note_in(raw[_NOTE_AT:])
            if balance is not None and note is not None:
                self._finish(balance, note)
            yield balance

    def write(self, balance: Balance) -> None:
        """Write the balance, under the lock."""
        self._write(balance, _NO_NOTE)

    def make_file(self, balance: Balance, path: str, size: int, make: Callable[[], int]) -> int:
        """Add ``size`` bytes and have ``make`` make the file at ``path``, under the lock; returns its descriptor.

        An error of ``make`` passes through; then the file is gone, too, and nothing was added.
        """
        balance.resident_bytes += size
        balance.added_bytes += size
        self._write(balance, self._packed(_Note(_Change.MAKE, path, 0, size)))
        try:
            descriptor = make()
        except BaseException:
            with suppress(OSError):
                unlink_own(path, self._depth_of(path))
            self.subtract(balance, size)
            raise
        try:
            self.write(balance)
        except BaseException:
            os.close(descriptor)  # the note stays, and the next holder removes the file
            raise
        return descriptor

    def remove_file(self, balance: Balance | None, path: str, status: os.stat_result) -> None:
        """Unlink the file at ``path``, which has this status, and subtract its bytes, under the lock."""
        depth = self._depth_of(path)
        if balance is None:
            unlink_own(path, depth)
            return
        self._write(balance, self._packed(_Note(_Change.REMOVE, path, status.st_ino, status.st_size)))
        try:
            unlink_own(path, depth)
        except BaseException:
            self.write(balance)
            raise
        balance.resident_bytes = max(0, balance.resident_bytes - status.st_size)
        self.write(balance)

    def add(self, balance: Balance, size: int) -> None:
        """Add ``size`` bytes, under the lock."""
        balance.resident_bytes += size
        balance.added_bytes += size
        self.write(balance)

    def subtract(self, balance: Balance | None, size: int) -> None:
        """Subtract ``size`` bytes, under the lock; a damaged ledger stays as it is, for a scan."""
        if balance is not None and size:
            balance.resident_bytes = max(0, balance.resident_bytes - size)
            self.write(balance)

    def close(self) -> None:
        self._lock.close()

    def _finish(self, balance: Balance, note: _Note) -> None:
        """Complete or undo the change of a writer that was killed, and correct the number."""
        path = f"{self._folder}/{note.path}"
        if note.change is _Change.MAKE:
            with suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError, NotOwn):
                unlink_own(path, self._depth_of(path))
            gone = True
        else:
            try:
                gone = status_of(path, self._depth_of(path)).st_ino != note.inode
            except (FileNotFoundError, NotADirectoryError, NotOwn):
                gone = True
        if gone:
            balance.resident_bytes = max(0, balance.resident_bytes - note.size)
        self.write(balance)

    def _depth_of(self, path: str) -> int:
        return path.count("/") - os.fspath(self._root).count("/")

    def _packed(self, note: _Note) -> bytes:
        path = os.fsencode(os.path.relpath(note.path, self._folder))
        if len(path) > _PATH_BYTES_MAX:
            return _NO_NOTE
        raw = _NOTE.pack(note.change, len(path), note.inode, note.size) + path
        return raw + xxhash.xxh3_64_digest(raw)

    def _write(self, balance: Balance, note: bytes) -> None:
        fields = _FIELDS.pack(_MAGIC, balance.resident_bytes, balance.added_bytes % (1 << 64))
        os.pwrite(self._descriptor, fields + xxhash.xxh3_64_digest(fields) + note, 0)


def read_balance(raw: bytes) -> Balance | None:
    """The balance in the contents of a ledger file; None if they are damaged."""
    fields, checksum = raw[: _FIELDS.size], raw[_FIELDS.size : _NOTE_AT]
    if len(checksum) != 8 or xxhash.xxh3_64_digest(fields) != checksum:
        return None
    magic, resident_bytes, added_bytes = _FIELDS.unpack(fields)
    return Balance(resident_bytes, added_bytes) if magic == _MAGIC else None


def _note_in(raw: bytes) -> _Note | None:
    if len(raw) < _NOTE.size:
        return None  # as written by versions without notes
    change, path_bytes, inode, size = _NOTE.unpack_from(raw)
    end = _NOTE.size + path_bytes
    if change not in (_Change.MAKE, _Change.REMOVE) or xxhash.xxh3_64_digest(raw[:end]) != raw[end : end + 8]:
        return None
    path = os.fsdecode(raw[_NOTE.size : end])
    if path.startswith("/") or ".." in path.split("/") or "\0" in path:
        return None  # no writer of a ledger names a file outside its folder
    return _Note(_Change(change), path, inode, size)
