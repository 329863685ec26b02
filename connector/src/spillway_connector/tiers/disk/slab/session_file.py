"""The sessions of a size class in a file that all processes of the node share: when each comes back, and what it uses.

It lies beside the index and belongs to it: ``ROOT/slab/<slot bytes>/sessions``. It is made when the first request names
its session, and again whenever it does not fit the index. It holds hints alone, so losing it costs hits and never a
byte; it is neither repaired nor rebuilt, and no order of writes matters. Changes are made under the root's lock
(columns.py). A session's name is there as a hash of 64 bits.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spillway_connector.own_files import (
    NotOwn,
    clear_the_place,
    open_anew,
    open_own,
    rename_own,
    unlink_own,
)
from spillway_connector.plan.sessions import SessionUse
from spillway_connector.tiers.disk.slab.change_log import ChangeLog
from spillway_connector.tiers.disk.slab.columns import Columns
from spillway_connector.tiers.disk.slab.fingerprint import U64, fingerprints
from spillway_connector.tiers.disk.slab.index import SlabIndex
from spillway_connector.tiers.disk.slab.layout import (
    HEADER_FIXED_BYTES,
    SESSION_CHANGES_NAME,
    SESSION_COLUMNS,
    SESSIONS_MAGIC,
    SESSIONS_NAME,
    SIZE_CLASS_DEPTH,
    SizeClassShape,
)
from spillway_connector.tiers.disk.slab.session_order import EntryArrays, SessionArrays, SessionOrder
from spillway_connector.tiers.disk.slab.space import SizeClass

_log = logging.getLogger(__name__)

USES_MAX = 1024  # noted and not taken in yet; the oldest are lost
USES_AT_ONCE = 64  # taken in at once, each in a millisecond at most: bounds the time the lock is held
OFF_SECONDS = 60  # without sessions, if their file cannot be made or changed


def create_sessions(folder: Path, shape: SizeClassShape) -> None:
    """Make an empty file in the place of what is there. Under the root's lock. Raises OSError (ENOSPC included)."""
    path = folder / f"{SESSIONS_NAME}.new"
    clear_the_place(folder / SESSIONS_NAME, SIZE_CLASS_DEPTH)
    descriptor = open_anew(path, SIZE_CLASS_DEPTH)
    try:
        os.posix_fallocate(descriptor, 0, shape.sessions_bytes)
        os.pwrite(descriptor, shape.pack(SESSIONS_MAGIC), 0)
        rename_own(path, folder / SESSIONS_NAME, SIZE_CLASS_DEPTH)
    except BaseException:
        unlink_own(path, SIZE_CLASS_DEPTH)
        raise
    finally:
        os.close(descriptor)


def remove_sessions(folder: Path) -> None:
    """Remove the file, because the index has numbered its slots again. Raises OSError."""
    clear_the_place(folder / SESSIONS_NAME, SIZE_CLASS_DEPTH)
    unlink_own(folder / SESSIONS_NAME, SIZE_CLASS_DEPTH, missing_ok=True)


@dataclass(frozen=True, slots=True)
class OpenSessions:
    order: SessionOrder
    columns: Columns


def open_sessions(folder: Path, index: SlabIndex) -> OpenSessions | None:
    """Open the session data of the entries of ``index``; None if there is no file that fits it. Raises OSError."""
    shape = index.shape
    try:
        descriptor = open_own(folder / SESSIONS_NAME, os.O_RDWR, SIZE_CLASS_DEPTH)
    except (FileNotFoundError, NotOwn):
        return None
    found = SizeClassShape.unpack(os.pread(descriptor, HEADER_FIXED_BYTES, 0), SESSIONS_MAGIC)
    if found != shape or os.fstat(descriptor).st_size != shape.sessions_bytes:
        os.close(descriptor)
        return None
    log = ChangeLog(folder / SESSION_CHANGES_NAME, shape, writable=True)
    columns = Columns(shape, descriptor, SESSION_COLUMNS, log, shape.pack(SESSIONS_MAGIC))
    arrays = SessionArrays(**columns.arrays)
    entries = EntryArrays(index.state, index.tenant, index.generation, index.order)
    return OpenSessions(SessionOrder(arrays, entries, columns.put), columns)


class SizeClassSessions:
    """The sessions of the size class in ``folder``, as this process has them open.

    Safe from several threads: ``note`` from any, without waiting; all else under the root's lock. now_s: the clock of
    the entries' ages. make_room: bytes of the disk for the file, within the tier's bound.
    """

    def __init__(
        self, folder: Path, words: U64, now_s: Callable[[], int], make_room: Callable[[SizeClass, int], bool]
    ) -> None:
        self._folder = folder
        self._path = str(folder / SESSIONS_NAME)
        self._words = words
        self._now_s = now_s
        self._make_room = make_room
        self._uses: deque[tuple[SessionUse, int]] = deque(maxlen=USES_MAX)
        self._open: OpenSessions | None = None
        self._identities: tuple[tuple[int, int], tuple[int, int]] | None = None  # of the open file and its index
        self._off_until_s = 0

    def note(self, use: SessionUse) -> None:
        """Keep the use for the next holder of the lock in this process, who writes it."""
        self._uses.append((use, self._now_s()))

    def order(self, size_class: SizeClass) -> SessionOrder | None:
        """The sessions of this size class with what was noted; None if no request has named one, or the disk fails."""
        now_s = self._now_s()
        if now_s < self._off_until_s:
            self._uses.clear()
            return None
        try:
            sessions = self._current(size_class)
            if sessions is None:
                return None
            with sessions.columns.changing():
                for _ in range(min(len(self._uses), USES_AT_ONCE)):
                    self._take_in(sessions.order, size_class.index, *self._uses.popleft())
        except OSError as error:
            _log.warning("NVMe tier %s: sessions do not count for %d s: %s", self._folder, OFF_SECONDS, error.strerror)
            self._open, self._off_until_s = None, now_s + OFF_SECONDS
            return None
        return sessions.order

    def row(self, order: SessionOrder, tenant: int, session: bytes) -> int | None:
        return order.find(tenant, _number(session))

    def claimed(self, order: SessionOrder | None, row: int | None, slot: int) -> None:
        """A chunk of this row's session is written to the slot; its place in the prefix is noted with its request."""
        if order is not None and row is not None:
            try:
                order.claimed(row, slot)
            except OSError:
                pass  # the index's own file may still work

    def loaded(self, slot: int) -> None:
        """A request loaded an entry; which, is not known here. Without the lock, like a noted hit. Raises OSError."""
        sessions = self._open
        if sessions is not None:
            sessions.order.use_without_session(slot)

    def renewed(self, size_class: SizeClass, slots: Iterable[int]) -> None:
        """Clients asked to retain these entries. Under the lock. Raises OSError."""
        order, sessions = self.order(size_class), self._open
        if order is not None and sessions is not None:
            with sessions.columns.changing():
                for slot in slots:
                    order.share(slot)

    def close(self) -> None:
        """Close the file, and let go of the index."""
        self._open = None
        self._uses.clear()

    def _take_in(self, order: SessionOrder, index: SlabIndex, use: SessionUse, noted_s: int) -> None:
        row = order.use(
            int.from_bytes(use.tenant, "little"),
            _number(use.session),
            ended=use.ended,
            due_s=None if use.due_seconds is None else noted_s + round(use.due_seconds),
            late_s=None if use.late_seconds is None else noted_s + round(use.late_seconds),
            now_s=noted_s,
        )
        if use.keys:
            slots = index.find(fingerprints(use.keys, self._words))
            places = np.flatnonzero(slots >= 0)
            order.own(row, slots[places], places)

    def _current(self, size_class: SizeClass) -> OpenSessions | None:
        index = size_class.index
        found = self._identity()
        if found is None and not self._uses:
            self._open = None
            return None
        if self._open is None or self._identities != (found, index.identity):
            self._open = None if found is None else open_sessions(self._folder, index)
            if self._open is None and self._uses:
                if not self._make_room(size_class, index.shape.sessions_bytes + index.shape.changes_bytes):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                create_sessions(self._folder, index.shape)
                self._open, found = open_sessions(self._folder, index), self._identity()
            self._identities = None if found is None else (found, index.identity)
        return self._open

    def _identity(self) -> tuple[int, int] | None:
        try:
            status = os.stat(self._path, follow_symlinks=False)
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino


def _number(tag: bytes) -> int:
    return int.from_bytes(tag, "little")
