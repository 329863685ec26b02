"""The space of a directory: how full it is, and which frames are evicted when room is needed or when they have
expired.

All processes that share a root keep one ledger in it (ledger.py): the bytes of all frames and partial files. Room
is taken in the ledger before a file is made, so the sum of all processes stays within the bound; a file is unlinked
and subtracted under the same lock, so a scan never counts too little.

A partial file is locked by its writer for as long as the writer runs. One that is not locked is removed and subtracted
by any process: when room is needed, when the fill level is read, and every few seconds.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from spillway_connector.errors import RefusedReason, TierRefused, TierTimeout
from spillway_connector.own_files import (
    NotOwn,
    clear_the_place,
    is_regular,
    open_own,
    renew_own,
    status_of,
    unlink_own,
)
from spillway_connector.tiers.disk.clock import FUTURE_SLACK_SECONDS
from spillway_connector.tiers.disk.directory_tier import DirectorySpace
from spillway_connector.tiers.disk.files.ledger import Balance, Ledger
from spillway_connector.tiers.disk.files.tree import FRAME_DEPTH, PARTIAL_DEPTH, frames_in, remove_empty_parents
from spillway_connector.tiers.disk.io import FRAME_LINKS
from spillway_connector.tiers.disk.room import FREE_FRACTION, limit_bytes
from spillway_connector.tiers.disk.root import LEDGER_NAME, PARTIAL_NAME, TENANTS_FOLDER, entries_in, folders_in
from spillway_connector.tiers.tier import Clock, EvictionReason

DOCUMENT_PREFIX = "document-"  # of namespace documents being written there, which are not counted
HIGH_WATERMARK = 0.95  # above this share of the bound the maintenance thread evicts in advance
LOW_WATERMARK = 0.90  # down to which it evicts
CANDIDATES_MAX = 4096  # oldest frames kept from one scan: bounds memory, about 1 MB
RECLAIM_SECONDS = 1.0  # between two searches for abandoned partial files, at least
UNLINKS_PER_LOCK = 16  # frames removed while others wait for the ledger


@dataclass(frozen=True, slots=True, order=True)
class _Candidate:
    mtime_ns: int
    size: int
    path: str


class Space(DirectorySpace):
    """The room below ``root``, shared with other threads and processes.

    max_bytes: the configured bound, or None for the file system's share alone; the smallest of all processes counts.
    ttl_seconds: how long a frame stays without being used, None: forever. now_ns: the clock of the frames' ages. Safe
    from several threads. Every method that takes a deadline raises TierError; OSError is left to the caller.
    """

    def __init__(
        self,
        root: Path,
        max_bytes: int | None,
        clock: Clock,
        *,
        ttl_seconds: float | None = None,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        super().__init__(root, max_bytes, clock)
        self._ttl_ns = None if ttl_seconds is None else int(ttl_seconds * 1e9)
        self._now_ns = now_ns
        self._ledger = Ledger(root / LEDGER_NAME, clock, depth=1)
        self._expired: deque[_Candidate] = deque()
        self._limit_bytes: int | None = None  # unknown before the first scan
        self._candidates: deque[_Candidate] = deque()
        self._room_lock = threading.Lock()
        self._reclaimed_at = float("-inf")
        self.scans = 0

    def oldest_ns(self) -> int:
        """A frame last used before this has expired."""
        return 0 if self._ttl_ns is None else self._now_ns() - self._ttl_ns

    def take(self, size: int, path: str, create: Callable[[], int], deadline: float) -> int:
        """Take ``size`` bytes in the ledger, evicting if needed, then call ``create`` while others wait.

        create: makes the partial file ``path`` and returns its descriptor; the file is set to ``size`` and locked here,
        so a scan counts it in full and no sweep removes it. Returns the descriptor.
        Raises TierRefused(NO_SPACE), TierTimeout, OSError from ``create`` (the room is then given back).
        """

        def make() -> int:
            descriptor = create()
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.ftruncate(descriptor, size)
            except OSError:
                os.close(descriptor)
                raise
            return descriptor

        measured = False
        while True:
            limit = self._limit_now()
            if limit is None or (size > limit and not measured):
                self.rescan(deadline)  # the limit may date from when the file system was full
                measured = True
                continue
            if size > limit:
                raise TierRefused(
                    RefusedReason.NO_SPACE,
                    f"max_bytes: {limit} (the smaller of the configured {self.max_bytes} and "
                    f"{FREE_FRACTION:.0%} of what the file system can give) holds no frame of {size} bytes; "
                    f"raise max_bytes or free space",
                )
            with self._ledger.locked(deadline) as balance:
                if balance is not None and balance.resident_bytes + size <= limit:
                    return self._ledger.make_file(balance, path, size, make)
            self.make_room(size, deadline)

    def remove(self, path: str, deadline: float) -> None:
        """Remove a partial file and its bytes from the ledger. OSError passes through.

        A frame that is being published, or was when its writer was killed, has two names and stays.
        """
        with self._ledger.locked(deadline) as balance:
            status = status_of(path, PARTIAL_DEPTH)
            if status.st_nlink == 1:
                self._ledger.remove_file(balance, path, status)

    def discard(self, path: str, deadline: float) -> None:
        """Remove what has the name of a frame and is proven to be none. OSError passes through.

        With a second name it is a frame whose writer was killed, and counts until that name is swept; or it is a file
        from outside, which never counted.
        """
        with self._ledger.locked(deadline) as balance:
            status = status_of(path, FRAME_DEPTH)
            if is_regular(status) and status.st_nlink == 1:
                self._ledger.remove_file(balance, path, status)
            else:
                clear_the_place(path, FRAME_DEPTH)

    def remove_unused(self, path: str, mtime_ns: int, reason: EvictionReason, deadline: float) -> int | None:
        """Remove a frame unless it was used since ``mtime_ns``: then None. Returns its bytes, 0 if it had gone."""
        with self._ledger.locked(deadline) as balance:
            return self._unlink_unused(balance, path, mtime_ns, reason)

    def remove_expired(self, deadline: float) -> bool:
        """Remove some of the frames that the last scan found expired; False when none are left."""
        with self._room(deadline):  # a frame removed during a scan would stay counted until the next one
            self._remove(self._expired, UNLINKS_PER_LOCK, None, EvictionReason.TTL, deadline)
            return bool(self._expired)

    def resident_bytes(self, deadline: float) -> int:
        self.reclaim(deadline)
        with self._ledger.locked(deadline) as balance:
            if balance is not None:
                return balance.resident_bytes
        with self._room(deadline):
            self._scan(deadline)
        with self._ledger.locked(deadline) as balance:
            return balance.resident_bytes if balance is not None else 0

    def above_high_watermark(self, deadline: float) -> bool:
        with self._ledger.locked(deadline) as balance:
            limit = self._limit_now()
            if balance is None or limit is None:
                return True
            return balance.resident_bytes > limit * HIGH_WATERMARK

    def drop_limit(self) -> None:
        """Measure the file system again before the next frame: it had less room than measured."""
        self._limit_bytes = None

    def reclaim(self, deadline: float) -> None:
        """Remove the partial files of writers that no longer run; searches at most once in RECLAIM_SECONDS."""
        if not self._room_lock.acquire(blocking=False):
            return  # a scan or an eviction sweeps itself; a file removed during a scan would stay counted
        try:
            self._reclaim(deadline)
        finally:
            self._room_lock.release()

    def _reclaim(self, deadline: float) -> None:
        if self._clock() - self._reclaimed_at < RECLAIM_SECONDS:
            return
        self._reclaimed_at = self._clock()
        with self._ledger.locked(deadline) as balance:
            self._sweep_partial_files(balance)

    def rescan(self, deadline: float) -> None:
        """Count the files, measure the file system again and sweep abandoned partial files."""
        with self._room(deadline):
            self._scan(deadline)

    def make_room(self, size: int, deadline: float) -> None:
        """Evict the least recently used frames of any namespace until ``size`` fits below the low watermark.

        Raises TierRefused(NO_SPACE) when even a fresh scan finds nothing to evict, TierTimeout.
        """
        with self._room(deadline):
            self._reclaim(deadline)
            scanned = found = False
            while True:
                with self._ledger.locked(deadline) as balance:
                    resident = None if balance is None else balance.resident_bytes
                limit = self._limit_now()
                if resident is not None and limit is not None:
                    low = max(0, min(limit - size, int(limit * LOW_WATERMARK)))
                    if resident <= low:
                        return
                    if self._candidates:
                        self.note_pressure()
                        self._remove(self._candidates, UNLINKS_PER_LOCK, resident - low, EvictionReason.ROOM, deadline)
                        continue
                    if scanned and resident + size <= limit:
                        return
                    if scanned and not found:
                        self.note_pressure()
                        raise TierRefused(
                            RefusedReason.NO_SPACE,
                            f"{resident} of {limit} bytes are in use and none can be evicted",
                        )
                if self._clock() >= deadline:
                    raise TierTimeout("other processes used or removed every frame that could have been evicted")
                self._scan(deadline)
                scanned, found = True, bool(self._candidates)

    @override
    def close(self) -> None:
        super().close()
        self._ledger.close()

    def _limit_now(self) -> int | None:
        """Return the limit as measured last, and within other processes' bounds; None before the first scan."""
        bound = self._bound.smallest()
        limit = self._limit_bytes
        return limit if bound is None or limit is None else min(limit, bound)

    def _remove(
        self,
        candidates: deque[_Candidate],
        count: int,
        needed_bytes: int | None,
        reason: EvictionReason,
        deadline: float,
    ) -> None:
        """Remove up to ``count`` of the candidates while others wait, and no more than frees ``needed_bytes``."""
        freed = 0
        with self._ledger.locked(deadline) as balance:
            for _ in range(count):
                if not candidates or (needed_bytes is not None and freed >= needed_bytes):
                    break
                candidate = candidates.popleft()
                freed += self._unlink_unused(balance, candidate.path, candidate.mtime_ns, reason) or 0

    def _unlink_unused(self, balance: Balance | None, path: str, mtime_ns: int, reason: EvictionReason) -> int | None:
        """The bytes of a frame that was removed; 0 if it was missing, None if it was used. Under the lock."""
        try:
            status = status_of(path, FRAME_DEPTH)
            if status.st_mtime_ns != mtime_ns or status.st_nlink > 1 or not is_regular(status):
                return None  # the next scan ranks it again
            self._ledger.remove_file(balance, path, status)
        except (FileNotFoundError, NotOwn):
            return 0  # another process removed it
        self.evictions[reason] += 1
        remove_empty_parents(path)
        return status.st_size

    def _scan(self, deadline: float) -> None:
        with self._ledger.locked(deadline) as balance:
            added_before = 0 if balance is None else balance.added_bytes
            self._sweep_partial_files(balance)
        now_ns, oldest_ns = self._now_ns(), self.oldest_ns()
        expired: deque[_Candidate] = deque()
        # Partial files first: one that is published meanwhile is then found twice, and recognised by its inode. The
        # other way round it would not be found at all.
        partial_inodes: set[int] = set()
        seen_bytes = 0
        for entry in self._partial_files():
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if is_regular(status):
                partial_inodes.add(status.st_ino)
                seen_bytes += status.st_size

        def candidates() -> Iterator[_Candidate]:
            nonlocal seen_bytes
            for entry in self._frames():
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                if not is_regular(status):
                    continue
                if status.st_ino not in partial_inodes:
                    seen_bytes += status.st_size
                candidate = _Candidate(status.st_mtime_ns, status.st_size, entry.path)
                if candidate.mtime_ns > now_ns + FUTURE_SLACK_SECONDS * 10**9:
                    _set_back(candidate, now_ns)  # else a clock that was once ahead would keep it forever
                elif candidate.mtime_ns < oldest_ns:
                    if len(expired) < CANDIDATES_MAX:
                        expired.append(candidate)
                else:
                    yield candidate

        oldest = heapq.nsmallest(CANDIDATES_MAX, candidates())
        with self._ledger.locked(deadline) as balance:
            added_bytes = 0 if balance is None else balance.added_bytes
            # A ledger that was replaced meanwhile counts from zero again; the difference then means nothing.
            resident = seen_bytes + max(0, added_bytes - added_before)
            self._ledger.write(Balance(resident, added_bytes))
        self._candidates = deque([*expired, *oldest])
        self._expired = expired
        self.scans += 1
        self._limit_bytes = limit_bytes(self._root, resident, self.max_bytes)

    def _frames(self) -> Iterator[os.DirEntry[str]]:
        for namespace in self._namespaces():
            yield from frames_in(namespace.path)

    def _namespaces(self) -> Iterator[os.DirEntry[str]]:
        return (entry for entry in folders_in(self._root) if entry.name != TENANTS_FOLDER)

    def _partial_files(self) -> Iterator[os.DirEntry[str]]:
        for namespace in self._namespaces():
            yield from entries_in(f"{namespace.path}/{PARTIAL_NAME}")

    def _sweep_partial_files(self, balance: Balance | None) -> None:
        """Remove partial files whose writer no longer runs. Runs under the ledger's lock, under which they are made.

        A writer holds a file lock, which the kernel releases with the process: right across containers, where process
        ids mean nothing, and right after a crash at any instant.
        """
        for entry in self._partial_files():
            try:
                descriptor = open_own(entry.path, os.O_RDONLY, PARTIAL_DEPTH, links=FRAME_LINKS)
            except OSError:
                continue  # being removed, or no file of the store
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                status = os.fstat(descriptor)
                if status.st_nlink > 1 or entry.name.startswith(DOCUMENT_PREFIX):
                    unlink_own(entry.path, PARTIAL_DEPTH)  # its bytes are counted as a frame's, or were never counted
                else:
                    self._ledger.remove_file(balance, entry.path, status)
            except OSError:
                pass  # in use, or removed already
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


def _set_back(candidate: _Candidate, now_ns: int) -> None:
    try:
        renew_own(candidate.path, FRAME_DEPTH, now_ns)
    except OSError:
        pass  # removed, or read-only
