"""A number that several processes agree on: bytes in use, in a small file that is locked while it changes.

Bytes are added *before* a file is made and subtracted after it is gone, so a crash can only leave the ledger too high.
A scan corrects it:

    ledger = bytes seen by the scan + bytes added by anyone since the scan began

which never counts too little.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash

from spillway_connector.errors import TierTimeout
from spillway_connector.tiers.tier import Clock

_FIELDS = struct.Struct("<8sQQ")
_MAGIC = b"SPILLSPC"
_LOCK_RETRY_SECONDS = 0.001


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
                yield self._read(descriptor)
            finally:
                fcntl.flock(descriptor, fcntl.LOCK_UN)
        finally:
            self._thread_lock.release()

    def write(self, balance: Balance) -> None:
        """Under the lock."""
        assert self._descriptor is not None
        fields = _FIELDS.pack(_MAGIC, balance.resident_bytes, balance.added_bytes % (1 << 64))
        os.pwrite(self._descriptor, fields + xxhash.xxh3_64_digest(fields), 0)

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

    def _read(self, descriptor: int) -> Balance | None:
        raw = os.pread(descriptor, _FIELDS.size + 8, 0)
        if len(raw) != _FIELDS.size + 8 or xxhash.xxh3_64_digest(raw[: _FIELDS.size]) != raw[_FIELDS.size :]:
            return None
        magic, resident_bytes, added_bytes = _FIELDS.unpack_from(raw)
        return Balance(resident_bytes, added_bytes) if magic == _MAGIC else None
