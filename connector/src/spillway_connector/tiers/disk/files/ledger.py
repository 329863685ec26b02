"""A number that several processes agree on: bytes in use, in a small file that is locked while it changes.

A change of the number and the file that is made or removed with it are two writes. Before the first of them the ledger
notes what is about to happen, under the same lock; who takes the lock next and finds such a note knows that its writer
died in between, looks at the file, and brings the number up to date. So a process that is killed at any instant leaves
the ledger right.

What nobody noted (files that were put there or removed by hand, a ledger that was lost) a scan corrects:

    ledger = bytes seen by the scan + bytes added by anyone since the scan began

which never counts too little.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import xxhash

from spillway_connector.errors import TierTimeout
from spillway_connector.tiers.tier import Clock

_FIELDS = struct.Struct("<8sQQ")
_MAGIC = b"SPILLSPC"
_LOCK_RETRY_SECONDS = 0.001
# Behind the fields and their checksum: the note, its path relative to the ledger's folder, and their checksum.
_NOTE = struct.Struct("<HHxxxxQQ")  # what is about to happen, bytes of the path, inode, size
_NOTE_AT = _FIELDS.size + 8
_NO_NOTE = bytes(_NOTE.size)
_PATH_BYTES_MAX = 2048


class _Change(IntEnum):
    """What is about to happen to a file. A note of zeros is none."""

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
    """resident_bytes: in use. added_bytes: ever; lets a scan see what was added behind its back."""

    resident_bytes: int
    added_bytes: int


class Ledger:
    """The file at ``path``, made when missing. One holder among all threads and processes; OSError passes through."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._thread_lock = threading.Lock()
        self._descriptor: int | None = None

    @contextmanager
    def locked(self, deadline: float) -> Iterator[Balance | None]:
        """Hold the ledger; yields None when it says nothing believable. Raises TierTimeout."""
        if not self._thread_lock.acquire(timeout=max(0.0, deadline - self._clock())):
            raise TierTimeout("another thread held the space ledger")
        try:
            descriptor = self._open()
            self._flock(descriptor, deadline)
            try:
                balance, note = self._read(descriptor)
                if note is not None:
                    self._finish(balance, note)
                yield balance
            finally:
                fcntl.flock(descriptor, fcntl.LOCK_UN)
        finally:
            self._thread_lock.release()

    def write(self, balance: Balance) -> None:
        """Under the lock."""
        self._write(balance, _NO_NOTE)

    def make_file(self, balance: Balance, path: str, size: int, make: Callable[[], int]) -> int:
        """Under the lock: add ``size`` bytes and have ``make`` make the file at ``path``; returns its descriptor.

        An error of ``make`` passes through; then the file is gone, too, and nothing was added.
        """
        balance.resident_bytes += size
        balance.added_bytes += size
        self._write(balance, self._packed(_Note(_Change.MAKE, path, 0, size)))
        try:
            descriptor = make()
        except BaseException:
            with suppress(OSError):
                os.unlink(path)
            self.subtract(balance, size)
            raise
        try:
            self.write(balance)
        except BaseException:
            os.close(descriptor)  # the note stays, and the next holder removes the file
            raise
        return descriptor

    def remove_file(self, balance: Balance | None, path: str, status: os.stat_result) -> None:
        """Under the lock: unlink the file at ``path``, whose status this is, and subtract its bytes."""
        if balance is None:
            os.unlink(path)
            return
        self._write(balance, self._packed(_Note(_Change.REMOVE, path, status.st_ino, status.st_size)))
        try:
            os.unlink(path)
        except BaseException:
            self.write(balance)
            raise
        balance.resident_bytes = max(0, balance.resident_bytes - status.st_size)
        self.write(balance)

    def add(self, balance: Balance, size: int) -> None:
        """Under the lock."""
        balance.resident_bytes += size
        balance.added_bytes += size
        self.write(balance)

    def subtract(self, balance: Balance | None, size: int) -> None:
        """Under the lock; an unbelievable ledger stays as it is, for a scan."""
        if balance is not None and size:
            balance.resident_bytes = max(0, balance.resident_bytes - size)
            self.write(balance)

    def close(self) -> None:
        with self._thread_lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def _open(self) -> int:
        if self._descriptor is not None:
            # A ledger that was removed or replaced under us would be locked by nobody else.
            try:
                on_disk, held = os.stat(self._path), os.fstat(self._descriptor)
                if (on_disk.st_dev, on_disk.st_ino) == (held.st_dev, held.st_ino):
                    return self._descriptor
            except FileNotFoundError:
                pass
            os.close(self._descriptor)
            self._descriptor = None
        self._descriptor = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        return self._descriptor

    def _flock(self, descriptor: int, deadline: float) -> None:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if self._clock() >= deadline:
                    raise TierTimeout("another process held the space ledger") from None
                time.sleep(_LOCK_RETRY_SECONDS)  # flock has no timeout of its own

    def _finish(self, balance: Balance | None, note: _Note) -> None:
        """Bring the number up to date with what became of a change whose writer died."""
        if balance is None:
            return  # a scan will count
        path = self._path.parent / note.path
        if note.change is _Change.MAKE:
            with suppress(FileNotFoundError, NotADirectoryError):
                path.unlink()
            gone = True
        else:
            try:
                gone = path.stat().st_ino != note.inode
            except (FileNotFoundError, NotADirectoryError):
                gone = True
        if gone:
            balance.resident_bytes = max(0, balance.resident_bytes - note.size)
        self.write(balance)

    def _packed(self, note: _Note) -> bytes:
        path = os.fsencode(os.path.relpath(note.path, self._path.parent))
        if len(path) > _PATH_BYTES_MAX:
            return _NO_NOTE
        raw = _NOTE.pack(note.change, len(path), note.inode, note.size) + path
        return raw + xxhash.xxh3_64_digest(raw)

    def _write(self, balance: Balance, note: bytes) -> None:
        assert self._descriptor is not None
        fields = _FIELDS.pack(_MAGIC, balance.resident_bytes, balance.added_bytes % (1 << 64))
        os.pwrite(self._descriptor, fields + xxhash.xxh3_64_digest(fields) + note, 0)

    def _read(self, descriptor: int) -> tuple[Balance | None, _Note | None]:
        raw = os.pread(descriptor, _NOTE_AT + _NOTE.size + _PATH_BYTES_MAX + 8, 0)
        fields, checksum = raw[: _FIELDS.size], raw[_FIELDS.size : _NOTE_AT]
        if len(checksum) != 8 or xxhash.xxh3_64_digest(fields) != checksum:
            return None, None
        magic, resident_bytes, added_bytes = _FIELDS.unpack(fields)
        balance = Balance(resident_bytes, added_bytes) if magic == _MAGIC else None
        return balance, _note_in(raw[_NOTE_AT:])


def _note_in(raw: bytes) -> _Note | None:
    if len(raw) < _NOTE.size:
        return None  # as written by versions without notes
    change, path_bytes, inode, size = _NOTE.unpack_from(raw)
    end = _NOTE.size + path_bytes
    if change not in (_Change.MAKE, _Change.REMOVE) or xxhash.xxh3_64_digest(raw[:end]) != raw[end : end + 8]:
        return None
    return _Note(_Change(change), os.fsdecode(raw[_NOTE.size : end]), inode, size)
