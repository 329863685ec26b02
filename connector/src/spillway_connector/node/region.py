"""The memory of a node's rows: files that every engine of the node maps, the lock of their index, the engines' leases.

    <path>/rows-<bytes of a row>/lock       who holds it opens the files below, or makes them
                                 index      plan/node_index.py; who holds its lock changes it
                                 rows       the chunks
                                 writers/   a lease for each engine, which each of its processes holds
                                 wanted     an engine asks the keeper of the node for the region
                                 refused    why the keeper cannot make it

The first engine makes them and takes their memory, or the node's keeper (node/keeper.py), if their memory is not to
count as an engine's; they outlive all of these. A lease ends with the last process of its engine, so no rank of a
killed engine still writes to a row that was released.
"""

from __future__ import annotations

import logging
import mmap
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np

from spillway_connector.cut_files import WatchedMapping
from spillway_connector.device.host_region import HostRegion
from spillway_connector.errors import HostMemoryError, TierTimeout
from spillway_connector.node.index_lock import IndexLock
from spillway_connector.node.pages import take_pages
from spillway_connector.own_files import (
    learn_owner,
    link_own,
    make_folders,
    open_own,
    open_to_others,
    read_own,
    status_of,
    unlink_own,
    write_new,
)
from spillway_connector.plan.node_index import HEAD_BYTES, IDENTITY_BYTES, NodeIndex
from spillway_connector.tiers.disk.file_lock import FileLock
from spillway_connector.tiers.disk.slab.writers import WriterLease, new_number

logger = logging.getLogger(__name__)

OPEN_SECONDS = 600.0  # for the engine that takes the memory of all rows; the others wait for it
KEEPER_SECONDS = 300.0  # for an engine that waits for the keeper, within the 600 s that vLLM gives a start
_ASKING_SECONDS = 0.1
CHANGE_SECONDS = 2.0  # for a change of the index: under a millisecond, unless a busy machine stops its holder
PLACE_SECONDS = 10.0  # for an engine that starts while all places are taken, some of them by engines that were killed
_PLACE_RETRY_SECONDS = 0.05
REMOVED_LEASE_MS = 60_000  # an engine sees within a step that its lease was removed; what its device copies ends, too
_FILE_DEPTH = 2  # rows-<bytes>/<file> below the path
WANTED, REFUSED = "wanted", "refused"


class RegionGone(FileNotFoundError):
    """The files of the region were removed, replaced or cut."""


class NodeRegion:
    """The rows of a node, as one process of an engine maps them. `number`: of the engine, the same in all of them."""

    def __init__(
        self, path: Path, num_rows: int, row_bytes: int, number: int, *, kept_seconds: float | None = None
    ) -> None:
        """Open the region, or make it. Raises HostMemoryError, in a sentence.

        kept_seconds: the node's keeper makes it, whatever its number of rows, and is waited for so long. None: the
        first engine makes it.
        """
        self.path = path / f"rows-{row_bytes}"
        self.num_rows, self.row_bytes = num_rows, row_bytes
        self._rows_path, self._index_path = self.path / "rows", self.path / "index"
        self._lock = FileLock(self.path / "lock", time.monotonic, _FILE_DEPTH)
        self.lease = WriterLease(self.path / "writers", number)
        self._removed_ms: dict[int, int] = {}  # engines without a lease, and when that was seen first
        try:
            if kept_seconds is None:
                self._prepare(path)
                with self._lock.held(time.monotonic() + OPEN_SECONDS):
                    self._map()
            else:
                self._open_kept(path, kept_seconds)
        except (OSError, TierTimeout) as error:
            raise HostMemoryError(f"the CPU tier of this node cannot be opened: {error}") from error

    def _prepare(self, path: Path) -> None:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        learn_owner(path)
        if (others := open_to_others(path)) is not None:
            raise HostMemoryError(f"{path} cannot hold the CPU tier of this node: {others}")
        make_folders(self.path / "writers", _FILE_DEPTH)

    def _open_kept(self, path: Path, patience_seconds: float) -> None:
        deadline, has_asked = time.monotonic() + patience_seconds, False
        while True:
            try:
                self._prepare(path)
                break
            except PermissionError:  # the keeper's pod has not given the folder to the engines' user yet
                if time.monotonic() > deadline:
                    raise
                time.sleep(_ASKING_SECONDS)
        while True:
            with self._lock.held(deadline):
                if self._is_there():
                    self._map()
                    return
                if not has_asked:
                    unlink_own(self.path / REFUSED, _FILE_DEPTH, missing_ok=True)
                    with suppress(FileExistsError):
                        write_new(self.path / WANTED, _FILE_DEPTH, b"")
            if not has_asked:
                has_asked = True
                logger.info("Spillway: waiting for spillway node-tier to make %s", self.path)
            with suppress(FileNotFoundError):
                raise HostMemoryError(read_own(self.path / REFUSED, _FILE_DEPTH).decode("utf-8", "replace"))
            if time.monotonic() > deadline:
                raise HostMemoryError(
                    f"{self.path} was not made within {patience_seconds:g} s; start spillway node-tier on this node "
                    "(the chart: look at its pod here, and at its log)"
                )
            time.sleep(_ASKING_SECONDS)

    def _is_there(self) -> bool:
        """Whether engines of this version can use the region; its number of rows then becomes this object's."""
        found = NodeIndex.rows_in(self._read_head() or b"", self.row_bytes)
        if found is None:
            return False
        if found != self.num_rows:
            logger.warning(
                "Spillway: %s has %d rows, and this engine is to have %d; it is made again when no engine uses it",
                *(self.path, found, self.num_rows),
            )
            self.num_rows = found
        return True

    def _map(self) -> None:
        """Map the files, and say that this engine uses them. Raises HostMemoryError, OSError."""
        head = self._read_head()
        wrong = "" if head is None else NodeIndex.explain_header(head, self.num_rows, self.row_bytes)
        if wrong:
            if self.lease.sweep():
                raise HostMemoryError(
                    f"{self.path} is in use by other engines, and {wrong}; give all engines of a node that have chunks "
                    "of one size the same node_tier and the same version, or other paths"
                )
            logger.warning("%s is replaced: %s, and no engine uses it", self.path, wrong)
        if wrong is not None:
            self._unlink()
            self._make()
        descriptor = open_own(self._index_path, os.O_RDWR, _FILE_DEPTH)
        self._index_lock = IndexLock(self._index_path, descriptor)
        self._inode = os.fstat(descriptor).st_ino
        mapping = mmap.mmap(descriptor, NodeIndex.bytes_of(self.num_rows))
        self.index = NodeIndex(memoryview(mapping), self.num_rows)
        self._identity = self.index.identity
        address = np.frombuffer(mapping, np.uint8).ctypes.data
        with ExitStack() as undo:  # a mapping that is gone must not be watched: its place is another one's then
            self._watched = WatchedMapping.of(descriptor, address, NodeIndex.bytes_of(self.num_rows))
            undo.callback(self._watched.forget)
            self.memory = HostRegion(self._rows_path, self.num_rows, self.row_bytes, keeps_name=True)
            undo.callback(self.memory.cleanup)
            self.lease.acquire()
            undo.pop_all()

    def _unlink(self) -> None:
        for path in (self._index_path, self._rows_path):
            unlink_own(path, _FILE_DEPTH, missing_ok=True)

    def _read_head(self) -> bytes | None:
        """Return how the index begins; "" if it or the rows have another size than they need; None if there is no
        region."""
        try:
            descriptor = open_own(self._index_path, os.O_RDWR, _FILE_DEPTH)
        except FileNotFoundError:
            return None
        try:
            head = os.pread(descriptor, HEAD_BYTES, 0)
            found = NodeIndex.rows_in(head, self.row_bytes)
            if found is not None:
                sizes = os.fstat(descriptor).st_size, self._rows_bytes()
                if sizes != (NodeIndex.bytes_of(found), found * self.row_bytes):
                    return b""
            return head
        finally:
            os.close(descriptor)

    def _rows_bytes(self) -> int:
        try:
            return status_of(self._rows_path, _FILE_DEPTH).st_size
        except FileNotFoundError:
            return 0

    def _make(self) -> None:
        """Make the rows first and the mark of the index last, so that a region that was never finished has no mark."""
        rows = HostRegion(self._rows_path, self.num_rows, self.row_bytes, keeps_name=True)
        try:
            take_pages(rows)
        except HostMemoryError:
            unlink_own(self._rows_path, _FILE_DEPTH, missing_ok=True)
            raise
        finally:
            rows.cleanup()
        size_bytes = NodeIndex.bytes_of(self.num_rows)
        descriptor = open_own(self._index_path, os.O_CREAT | os.O_EXCL | os.O_RDWR, _FILE_DEPTH)
        try:
            os.posix_fallocate(descriptor, 0, size_bytes)
            with mmap.mmap(descriptor, size_bytes) as mapping:
                view = memoryview(mapping)
                index = NodeIndex(view, self.num_rows)
                index.format(self.row_bytes, os.urandom(IDENTITY_BYTES))
                del index
                view.release()
        finally:
            os.close(descriptor)

    @contextmanager
    def changing(self, patience_seconds: float = CHANGE_SECONDS) -> Iterator[NodeIndex]:
        """Hold the lock of the index. Raises TierTimeout, OSError."""
        self.change(patience_seconds)
        try:
            yield self.index
            self.index.end()  # after an exception it is mended by the next holder
        finally:
            self.changed()

    def change(self, patience_seconds: float = CHANGE_SECONDS) -> NodeIndex:
        """Begin a change as :meth:`changing` does, in half the time. changed() must follow, and end() if all went well.

        Whoever changes the index often also asks ``require_files`` now and then: this looks at the index alone.
        """
        self._index_lock.acquire(patience_seconds)
        if not (self._watched.looks_whole and self.index.identity == self._identity):
            self._index_lock.release()
            raise RegionGone(f"a file in {self.path} was cut or overwritten")
        self.index.begin()
        return self.index

    def changed(self) -> None:
        self._index_lock.release()

    @property
    def is_whole(self) -> bool:
        """Whether the region can be used. If not, a process has cut or overwritten the index, or cut the rows, and
        nothing in them counts any more."""
        return self._watched.is_whole and self.memory.is_whole and self.index.identity == self._identity

    def require_files(self) -> None:
        """Engines that start now find what this one maps: with other files they would share nothing, safely. Raises
        OSError (RegionGone)."""
        if os.stat(self._index_path).st_ino != self._inode:
            raise RegionGone(f"{self._index_path} is another file")
        if self.lease.is_removed:
            raise RegionGone(f"this engine's lease in {self.path / 'writers'} was removed")
        if not self.is_whole or self._rows_bytes() != self.num_rows * self.row_bytes:
            raise RegionGone(f"a file in {self.path} was cut or overwritten")

    def join(self, now_ms: Callable[[], int], patience_seconds: float = PLACE_SECONDS) -> int:
        """The place of this engine in the index, for its scheduler's process. Raises HostMemoryError.

        The place of a killed engine is free a moment later, so it is waited for, without the lock.
        """
        deadline, has_said = time.monotonic() + patience_seconds, False
        while True:
            try:
                with self.changing(OPEN_SECONDS) as index:
                    self.sweep(None, now_ms())
                    place = index.join(self.lease.number)
                    is_worth_waiting = place is None and index.has_dead_engines
            except (OSError, TierTimeout) as error:
                raise HostMemoryError(f"the CPU tier of this node cannot be joined: {error}") from error
            if place is not None:
                return place
            if not is_worth_waiting or time.monotonic() >= deadline:
                raise HostMemoryError(f"{self.path} has no place for another engine; start fewer on this node")
            if not has_said:
                has_said = True
                logger.info("Spillway: waiting for a place in %s that an engine which was killed has", self.path)
            time.sleep(_PLACE_RETRY_SECONDS)

    def sweep(self, own: int | None, now_ms: int) -> int:
        """Sweep as NodeIndex.sweep does, by the leases. The caller holds the index's lock. Raises OSError."""
        before = self.index.numbers()
        released = self.index.sweep(lambda number: self._may_run(number, now_ms), own, now_ms)
        for number in before - self.index.numbers():  # now: of an engine that ended, another sweep finds the lease
            self._removed_ms.pop(number, None)
            self.lease.remove(number)
        return released

    def _may_run(self, number: int, now_ms: int) -> bool:
        runs = self.lease.look(number)
        if runs is not None:
            return runs
        return now_ms - self._removed_ms.setdefault(number, now_ms) < REMOVED_LEASE_MS

    def look_after(self) -> None:
        """Declare that this process is no engine: it reads no row, and its region may be replaced. Raises OSError."""
        self.lease.release()
        self.lease.remove(self.lease.number)
        self.memory.cleanup()

    def remove_if_unused(self) -> bool:
        """Give its memory back, unless an engine uses it. Raises TierTimeout, OSError."""
        with self._lock.held(time.monotonic() + CHANGE_SECONDS):
            self.require_files()
            if self.lease.sweep():
                return False
            self._unlink()
        return True

    def close(self) -> None:
        """End this process's use of the region, whose memory stays."""
        self.lease.release()
        self._lock.close()
        self._watched.forget()
        self._index_lock.close()
        self.memory.cleanup()


def agreed_region(choice: Path, open_region: Callable[[int], NodeRegion], may_be_private: bool) -> NodeRegion | None:
    """The node's region, or None for private rows: the same answer in every process of an engine.

    Args:
        choice: A file, one for each engine, which the first of its processes writes and the last one removes.
        open_region: Opens the region for the engine of a number.
        may_be_private: Whether an engine may have private rows if the region cannot be opened.

    Raises:
        HostMemoryError: The region cannot be opened, and either rows must not be private or an earlier process of
            this engine has opened it.
    """
    try:
        return _chosen(choice, open_region)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise HostMemoryError(f"{choice} cannot be read: {error}") from error
    number, region = new_number(), None
    try:
        region = open_region(number)
    except HostMemoryError as error:
        if not may_be_private:
            raise
        logger.error("Spillway: this engine serves with a CPU tier of its own: %s", error)
    draft = choice.with_suffix(f".{number:016x}")
    try:
        write_new(draft, 1, f"{number:016x}".encode() if region else b"private")
        try:
            link_own(draft, choice, 1)
            return region
        except FileExistsError:
            if region is not None:
                region.close()
            return _chosen(choice, open_region)
        finally:
            unlink_own(draft, 1)
    except OSError as error:
        raise HostMemoryError(f"{choice} cannot be written: {error}") from error


def _chosen(choice: Path, open_region: Callable[[int], NodeRegion]) -> NodeRegion | None:
    """The values are those of the file. Raises OSError (FileNotFoundError), HostMemoryError."""
    words = read_own(choice, 1).decode("utf-8", "replace")
    if words == "private":
        return None
    if re.fullmatch("[0-9a-f]{16}", words) is None:
        raise HostMemoryError(f"{choice} is no file of an engine's: remove it and start again")
    return open_region(int(words, 16))
