"""One ``max_bytes`` for all processes that use a directory: the smallest that a running one was given.

    ROOT/bounds/<16 hex digits>    a process's max_bytes in decimal digits; locked by flock as long as it runs

A bound that is lowered therefore holds as soon as the first engine has it, and one that is raised once the last one
has. Processes that were given none follow the others; those of earlier versions neither say theirs nor follow.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from contextlib import suppress
from pathlib import Path

from spillway_connector.own_files import make_folders, open_own, rename_own, unlink_own
from spillway_connector.tiers.disk.root import entries_in
from spillway_connector.tiers.tier import Clock

_log = logging.getLogger(__name__)

BOUNDS_FOLDER = "bounds"
CHECK_SECONDS = 10.0  # how late another node's bound is noticed; one of this node at once
_DEPTH = 2  # bounds/<name> below the root, see own_files.py
_NEW_PREFIX = "new-"
_DIGITS_MAX = 20


class SharedBound:
    """The bound of ``root``, of which this process was given ``max_bytes``; None: none. Safe from several threads."""

    def __init__(self, root: Path, max_bytes: int | None, clock: Clock) -> None:
        self._root = root
        self._folder = root / BOUNDS_FOLDER
        self._own_bytes = max_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._next_check = float("-inf")
        self._folder_at_ns: int | None = None  # when the folder was changed last, as of the last look into it
        self._smallest = max_bytes
        self._name = os.urandom(8).hex()
        self._descriptor: int | None = None
        self._told: int | None = None
        self._closed = False

    def __del__(self) -> None:
        self.close()

    def smallest(self) -> int | None:
        """Bytes; None if no process has a bound. Looked up when a bound has come or gone, and every CHECK_SECONDS: a
        process that was killed leaves its own, and a network file system shows changes late. Raises nothing."""
        with self._lock:
            if not self._closed and (self._clock() >= self._next_check or self._changed_at_ns() != self._folder_at_ns):
                self._next_check = self._clock() + CHECK_SECONDS
                with suppress(OSError):  # in a directory that cannot be read or written, each has its own
                    self._say()
                    self._folder_at_ns = self._changed_at_ns()
                    others = self._others()
                    self._smallest = min([bound for bound in (self._own_bytes, *others) if bound], default=None)
                self._tell()
            return self._smallest

    def close(self) -> None:
        """Remove this process's bound."""
        self._closed = True
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            with suppress(OSError):
                unlink_own(self._folder / self._name, _DEPTH, missing_ok=True)
            os.close(descriptor)

    def _changed_at_ns(self) -> int | None:
        try:
            return os.stat(self._folder, follow_symlinks=False).st_mtime_ns
        except OSError:
            return None

    def _say(self) -> None:
        """Write this process's bound, again if it was removed."""
        path = self._folder / self._name
        if self._own_bytes is None or (self._descriptor is not None and path.exists()):
            return
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        make_folders(self._folder, 1)
        partial = self._folder / f"{_NEW_PREFIX}{self._name}"
        unlink_own(partial, _DEPTH, missing_ok=True)
        self._descriptor = open_own(partial, os.O_CREAT | os.O_EXCL | os.O_RDWR, _DEPTH)
        with suppress(BlockingIOError):
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.pwrite(self._descriptor, b"%d" % self._own_bytes, 0)
        rename_own(partial, path, _DEPTH)

    def _others(self) -> list[int]:
        """The bounds of other running processes; those of ended ones are removed."""
        found = []
        for entry in entries_in(self._folder):
            if entry.name == self._name or entry.name.startswith(_NEW_PREFIX):
                continue
            try:
                descriptor = open_own(entry.path, os.O_RDONLY, _DEPTH)
            except OSError:
                continue  # gone, or no file of the store
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                unlink_own(entry.path, _DEPTH, missing_ok=True)
            except BlockingIOError:
                digits = os.pread(descriptor, _DIGITS_MAX, 0)
                if digits.isdigit() and int(digits):
                    found.append(int(digits))
            finally:
                os.close(descriptor)
        return found

    def _tell(self) -> None:
        smallest = self._smallest
        if smallest in (self._told, self._own_bytes):
            return
        self._told = smallest
        _log.warning(
            "max_bytes: %s here, and %s of another engine that uses %s; the smallest counts for all; give all engines "
            "of a directory the same",
            "none" if self._own_bytes is None else self._own_bytes,
            smallest,
            self._root,
        )
