"""How full a directory is, who leaves when room is needed, and how several processes agree on both.

All processes that share a root keep one ledger file in it: the bytes of all frames and partial files. Room is taken in
the ledger *before* a file is written, so the sum of all processes stays within the bound. A crash can only leave the
ledger too high (room is given back after the file is gone), and every scan corrects it:

    ledger = bytes seen by the scan + bytes added by anyone since the scan began

which never counts too little, because a file is unlinked and subtracted under the same lock.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash

from spillway_connector.errors import RefusedReason, TierRefused, TierTimeout
from spillway_connector.tiers.tier import Clock

LEDGER_NAME = "space.ledger"
PARTIAL_NAME = "partial"  # folder of files being written, inside each namespace folder
FRAME_SUFFIX = ".kv"
FREE_FRACTION = 0.8  # of what the file system could give us; the rest is for its other users
HIGH_WATERMARK = 0.95  # above this share of the bound the housekeeper makes room in advance
LOW_WATERMARK = 0.90  # down to which it does
CANDIDATES_MAX = 4096  # oldest frames remembered from one scan: bounds memory, about 1 MB
UNLINKS_PER_LOCK = 16  # frames removed while others wait for the ledger

_LEDGER = struct.Struct("<8sQQ")
_LEDGER_MAGIC = b"SPILLSPC"
_LOCK_RETRY_SECONDS = 0.001


@dataclass(frozen=True, slots=True, order=True)
class _Candidate:
    mtime_ns: int
    size: int
    path: str


@dataclass(slots=True)
class _Ledger:
    resident_bytes: int
    added_bytes: int  # ever; lets a scan see what was added behind its back


class Space:
    """The room below ``root``, shared with other threads and processes.

    max_bytes: the configured bound, or None for the file system's share alone. Raises TierError from every method
    that takes a deadline; OSError is left to the caller.
    """

    def __init__(self, root: Path, max_bytes: int | None, clock: Clock) -> None:
        self._root = root
        self._max_bytes = max_bytes
        self._clock = clock
        self._limit_bytes: int | None = None  # unknown before the first scan
        self._candidates: deque[_Candidate] = deque()
        self._thread_lock = threading.Lock()
        self._room_lock = threading.Lock()
        self._descriptor: int | None = None
        self.evicted_frames = 0
        self.scans = 0

    def take(self, size: int, create: Callable[[], int], deadline: float) -> int:
        """Take ``size`` bytes in the ledger, evicting if needed, then call ``create`` while others wait.

        create: makes the partial file and returns its descriptor; the file is set to ``size`` and locked here, so a
        scan counts it in full and a sweep leaves it alone. Returns the descriptor.
        Raises TierRefused(NO_SPACE), TierTimeout, OSError from ``create`` (the room is then given back).
        """
        measured = False
        while True:
            limit_bytes = self._limit_bytes
            if limit_bytes is None or (size > limit_bytes and not measured):
                self.rescan(deadline)  # an old measure of a file system that was full must not stop us for long
                measured = True
                continue
            if size > limit_bytes:
                raise TierRefused(
                    RefusedReason.NO_SPACE,
                    f"max_bytes: {limit_bytes} (the smaller of the configured {self._max_bytes} and "
                    f"{FREE_FRACTION:.0%} of what the file system can give) holds no frame of {size} bytes; "
                    f"raise max_bytes or free space",
                )
            with self._locked(deadline) as ledger:
                if ledger is not None and ledger.resident_bytes + size <= limit_bytes:
                    descriptor = create()
                    try:
                        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        os.ftruncate(descriptor, size)
                    except OSError:
                        os.close(descriptor)  # unlocked and tiny: the next sweep takes it
                        raise
                    ledger.resident_bytes += size
                    ledger.added_bytes += size
                    self._write(ledger)
                    return descriptor
            self.make_room(size, deadline)

    def give_back(self, size: int, deadline: float, remove: Callable[[], object] = lambda: None) -> None:
        """Call ``remove`` and subtract ``size`` under the ledger's lock. An OSError of ``remove`` passes through."""
        with self._locked(deadline) as ledger:
            remove()
            if ledger is not None:
                ledger.resident_bytes = max(0, ledger.resident_bytes - size)
                self._write(ledger)

    def resident_bytes(self, deadline: float) -> int:
        with self._locked(deadline) as ledger:
            if ledger is not None:
                return ledger.resident_bytes
        with self._room(deadline):
            self._scan(deadline)
        with self._locked(deadline) as ledger:
            return ledger.resident_bytes if ledger is not None else 0

    def above_high_watermark(self, deadline: float) -> bool:
        with self._locked(deadline) as ledger:
            limit_bytes = self._limit_bytes
            if ledger is None or limit_bytes is None:
                return True
            return ledger.resident_bytes > limit_bytes * HIGH_WATERMARK

    def forget_limit(self) -> None:
        """Measure the file system again before the next frame: it gave less than it promised."""
        self._limit_bytes = None

    def rescan(self, deadline: float) -> None:
        """Count what is really there, measure the file system again and sweep partial files of dead writers."""
        with self._room(deadline):
            self._scan(deadline)

    def make_room(self, size: int, deadline: float) -> None:
        """Evict the least recently used frames of any namespace until ``size`` fits below the low watermark.

        Raises TierRefused(NO_SPACE) when even a fresh scan finds nothing to evict.
        """
        with self._room(deadline):
            scanned = False
            while True:
                with self._locked(deadline) as ledger:
                    resident = None if ledger is None else ledger.resident_bytes
                limit_bytes = self._limit_bytes
                if resident is not None and limit_bytes is not None:
                    low = max(0, min(limit_bytes - size, int(limit_bytes * LOW_WATERMARK)))
                    if resident <= low:
                        return
                    if self._candidates:
                        self._evict(resident - low, deadline)
                        continue
                    if scanned:
                        if resident + size <= limit_bytes:
                            return
                        raise TierRefused(
                            RefusedReason.NO_SPACE,
                            f"{resident} of {limit_bytes} bytes are in use and none can be evicted",
                        )
                self._scan(deadline)
                scanned = True

    def close(self) -> None:
        with self._thread_lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def _evict(self, needed_bytes: int, deadline: float) -> None:
        freed = 0
        with self._locked(deadline) as ledger:
            for _ in range(UNLINKS_PER_LOCK):
                if freed >= needed_bytes or not self._candidates:
                    break
                candidate = self._candidates.popleft()
                try:
                    if os.stat(candidate.path).st_mtime_ns != candidate.mtime_ns:
                        continue  # used since the scan; the next scan ranks it anew
                    os.unlink(candidate.path)
                except FileNotFoundError:
                    continue  # another process was quicker
                freed += candidate.size
                self.evicted_frames += 1
                _remove_empty_parents(candidate.path)
            if ledger is not None and freed:
                ledger.resident_bytes = max(0, ledger.resident_bytes - freed)
                self._write(ledger)

    def _scan(self, deadline: float) -> None:
        with self._locked(deadline) as ledger:
            added_before = 0 if ledger is None else ledger.added_bytes
            self._sweep_partial_files()
        seen_bytes = 0

        def candidates() -> Iterator[_Candidate]:
            nonlocal seen_bytes
            for entry in self._frames():
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                seen_bytes += status.st_size
                yield _Candidate(status.st_mtime_ns, status.st_size, entry.path)

        oldest = heapq.nsmallest(CANDIDATES_MAX, candidates())
        for entry in self._partial_files():
            try:
                seen_bytes += entry.stat(follow_symlinks=False).st_size
            except FileNotFoundError:
                continue
        with self._locked(deadline) as ledger:
            added_bytes = 0 if ledger is None else ledger.added_bytes
            # A ledger that was replaced meanwhile counts from zero again: then nothing is known to have been added.
            resident = seen_bytes + max(0, added_bytes - added_before)
            self._write(_Ledger(resident, added_bytes))
        self._candidates = deque(oldest)
        self.scans += 1
        volume = os.statvfs(self._root)
        share = int(FREE_FRACTION * (volume.f_bavail * volume.f_frsize + resident))
        self._limit_bytes = share if self._max_bytes is None else min(self._max_bytes, share)

    def _frames(self) -> Iterator[os.DirEntry[str]]:
        for namespace in _folders(self._root):
            for first in _folders(namespace.path):
                if first.name == PARTIAL_NAME:
                    continue
                for second in _folders(first.path):
                    for entry in _entries(second.path):
                        if entry.name.endswith(FRAME_SUFFIX):
                            yield entry

    def _partial_files(self) -> Iterator[os.DirEntry[str]]:
        for namespace in _folders(self._root):
            yield from _entries(f"{namespace.path}/{PARTIAL_NAME}")

    def _sweep_partial_files(self) -> None:
        """Remove partial files whose writer is gone. Runs under the ledger's lock, under which they are made.

        A writer holds a file lock, which the kernel drops with the process: right across containers, where process
        ids say nothing, and right after a crash at any instant.
        """
        for entry in self._partial_files():
            try:
                descriptor = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(entry.path)
            except OSError:
                pass  # in use, or gone already
            finally:
                os.close(descriptor)

    @contextmanager
    def _room(self, deadline: float) -> Iterator[None]:
        """One eviction or scan at a time in this process."""
        if not self._room_lock.acquire(timeout=max(0.0, deadline - self._clock())):
            raise TierTimeout("another thread was still making room")
        try:
            yield
        finally:
            self._room_lock.release()

    @contextmanager
    def _locked(self, deadline: float) -> Iterator[_Ledger | None]:
        """Hold the ledger against all threads and processes; yields None when it holds nothing believable."""
        if not self._thread_lock.acquire(timeout=max(0.0, deadline - self._clock())):
            raise TierTimeout("another thread held the space ledger")
        try:
            descriptor = self._open_ledger()
            self._flock(descriptor, deadline)
            try:
                yield self._read(descriptor)
            finally:
                fcntl.flock(descriptor, fcntl.LOCK_UN)
        finally:
            self._thread_lock.release()

    def _open_ledger(self) -> int:
        path = self._root / LEDGER_NAME
        if self._descriptor is not None:
            # A ledger that was removed or replaced under us would be locked by nobody else.
            try:
                on_disk, held = os.stat(path), os.fstat(self._descriptor)
                if (on_disk.st_dev, on_disk.st_ino) == (held.st_dev, held.st_ino):
                    return self._descriptor
            except FileNotFoundError:
                pass
            os.close(self._descriptor)
            self._descriptor = None
        self._descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
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

    def _read(self, descriptor: int) -> _Ledger | None:
        raw = os.pread(descriptor, _LEDGER.size + 8, 0)
        if len(raw) != _LEDGER.size + 8 or xxhash.xxh3_64_digest(raw[: _LEDGER.size]) != raw[_LEDGER.size :]:
            return None
        magic, resident_bytes, added_bytes = _LEDGER.unpack_from(raw)
        return _Ledger(resident_bytes, added_bytes) if magic == _LEDGER_MAGIC else None

    def _write(self, ledger: _Ledger) -> None:
        assert self._descriptor is not None
        fields = _LEDGER.pack(_LEDGER_MAGIC, ledger.resident_bytes, ledger.added_bytes % (1 << 64))
        os.pwrite(self._descriptor, fields + xxhash.xxh3_64_digest(fields), 0)


def _entries(folder: str | os.PathLike[str]) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _folders(folder: str | os.PathLike[str]) -> Iterator[os.DirEntry[str]]:
    return (entry for entry in _entries(folder) if entry.is_dir(follow_symlinks=False))


def _remove_empty_parents(path: str) -> None:
    """Two levels of folders cost a page each; empty ones go. A writer that loses this race makes them again."""
    folder = os.path.dirname(path)
    for _ in range(2):
        try:
            os.rmdir(folder)
        except OSError:
            return
        folder = os.path.dirname(folder)
