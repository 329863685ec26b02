"""The file layout of the NVMe tier: a directory with one file per frame.

    ROOT/space.ledger                         how full the directory is (ledger.py)
    ROOT/clock.<boot>                         clock of the frames' ages on one node (clock.py)
    ROOT/store                                which directory this is (store_mark.py)
    ROOT/tenants/<tenant>/                    frames by tenant, if there are quotas (quota.py)
    ROOT/<namespace hex>/namespace.json       the namespace document in full
    ROOT/<namespace hex>/partial/             files being written
    ROOT/<namespace hex>/ab/cd/<key hex>.kv   frames; ab and cd are the key's first two bytes

A frame is written as a partial file and then linked under its name, so readers see all of it or nothing; a crash
leaves a partial file, which the next scan sweeps. No fsync: after a power failure a torn frame fails its checksum and
is a miss. A file is deleted only to make room or when its bytes are proven wrong, never because a call failed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from spillway_connector.errors import (
    RefusedReason,
    TierError,
    TierMiss,
    TierRefused,
    TierTimeout,
    TierUnreachable,
    UnreachableReason,
)
from spillway_connector.namespace import Namespace
from spillway_connector.own_files import (
    clear_the_place,
    is_regular,
    link_own,
    make_folders,
    rename_own,
    renew_own,
    status_of,
    unlink_own,
)
from spillway_connector.tiers.disk.directory_tier import DirectoryTier
from spillway_connector.tiers.disk.files.quota import TenantQuotas
from spillway_connector.tiers.disk.files.space import DOCUMENT_PREFIX, Space
from spillway_connector.tiers.disk.files.tree import FRAME_DEPTH, PARTIAL_DEPTH, frame_path
from spillway_connector.tiers.disk.io import (
    FRAME_LINKS,
    TRANSFERS_AT_ONCE,
    preparing,
    supports_direct,
    tier_error,
)
from spillway_connector.tiers.disk.maintenance import MaintenanceThread
from spillway_connector.tiers.disk.root import PARTIAL_NAME, NamespaceDocument, make_root
from spillway_connector.tiers.disk.store_mark import StoreMark
from spillway_connector.tiers.tier import NO_TENANT, BlockInMemory, Clock, StoreOutcome, WallClock

SCAN_SECONDS = 300.0  # between scans that correct the ledger and measure the file system again
SCAN_SECONDS_MIN = 30.0  # frames that expire sooner are scanned sooner, but not sooner than this
MAINTENANCE_DEADLINE_SECONDS = 60.0
IDLE_SECONDS = 10.0  # between maintenance rounds while no stores arrive
_LINK_ATTEMPTS = 4  # a folder may vanish between mkdir and link when another process evicts its last frame


class FileTier(DirectoryTier):
    """A tier in the directory ``root``, on any file system. See tier.Tier for the contract.

    max_bytes: bound for all namespaces and processes together, the smallest that a running one was given; None takes 80
    % of what the file system can give. ttl_seconds: how long a frame stays without being used, by the node's clock
    (clock.py); None: forever. tenant_max_bytes: the quota of each tenant, all without a cache salt being one tenant;
    beyond it the tenant's oldest frames are evicted. transfers_at_once: concurrent reads, and as many writes, for any
    number of threads. The directory is not touched before the first operation.
    """

    has_local_index = False  # other nodes may write to the directory, so only the file system can tell

    def __init__(
        self,
        namespace: Namespace,
        payload_bytes: int,
        root: Path,
        *,
        max_bytes: int | None = None,
        ttl_seconds: float | None = None,
        tenant_max_bytes: int | None = None,
        transfers_at_once: int = TRANSFERS_AT_ONCE,
        clock: Clock = time.monotonic,
        wall_clock: WallClock = time.time,
    ) -> None:
        super().__init__(
            namespace, payload_bytes, root, transfers_at_once=transfers_at_once, clock=clock, wall_clock=wall_clock
        )
        self._namespace = namespace
        self._folder = root / namespace.hex
        self._partial = self._folder / PARTIAL_NAME
        self._document = NamespaceDocument(self._folder, namespace)
        self._mark = StoreMark(root)
        self._space: Space = Space(root, max_bytes, clock, ttl_seconds=ttl_seconds, now_ns=self._ages.now_ns)
        self._quotas: TenantQuotas | None = None
        if tenant_max_bytes is not None:
            self._quotas = TenantQuotas(root, tenant_max_bytes, self._space, clock, self._ages.now_ns)
        self._scan_seconds = min(SCAN_SECONDS, max(ttl_seconds or SCAN_SECONDS, SCAN_SECONDS_MIN))
        self._next_scan = self._clock() + self._scan_seconds
        self._numbers = itertools.count()
        self._prepare_lock = threading.Lock()
        self._prepared = False
        self._maintenance = MaintenanceThread(f"NVMe tier {root}", self._maintain, IDLE_SECONDS)

    def prepare(self, deadline: float) -> None:
        self._check(deadline)
        if self._prepared:
            return
        if not self._prepare_lock.acquire(timeout=max(0.0, deadline - self._clock())):
            raise TierTimeout(f"{self._root}: another thread is still preparing the directory")
        try:
            if not self._prepared:
                self._prepare()
        finally:
            self._prepare_lock.release()

    def contains(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        self._prepare_for_reading(deadline)
        found = []
        oldest_ns = self._space.oldest_ns()
        for key in keys:
            self._check(deadline)
            try:
                status = os.stat(self._path(key), follow_symlinks=False)
                whole = is_regular(status) and status.st_size == self._files.frame_bytes
                found.append(whole and status.st_mtime_ns >= oldest_ns)
            except (FileNotFoundError, NotADirectoryError):
                found.append(False)
            except OSError as error:
                raise tier_error(error, f"{self._root}: looking for a frame") from error
        return found

    def contains_now(self, keys: Sequence[bytes]) -> list[bool] | None:
        """Return None: see ``has_local_index``."""
        return None

    def load(self, key: bytes, target: memoryview, deadline: float) -> None:
        self._read(key, target, deadline, renew=True)

    def peek(self, key: bytes, target: memoryview, deadline: float) -> None:
        self._read(key, target, deadline, renew=False)

    def _read(self, key: bytes, target: memoryview, deadline: float, *, renew: bool) -> None:
        self._prepare_for_reading(deadline)
        path, oldest_ns = self._path(key), self._space.oldest_ns()
        try:
            header = self._files.read(path, FRAME_DEPTH, target, deadline, oldest_ns, renew=renew)
        except (FileNotFoundError, NotADirectoryError):
            raise TierMiss from None
        except OSError as error:
            raise tier_error(error, f"{self._root}: reading a frame") from error
        self._verify(header, target, key)

    def in_memory(self, key: bytes, deadline: float) -> BlockInMemory | None:
        """Return None: files may lie on another node, whose changes the page cache sees late."""
        return None

    def store(self, key: bytes, source: memoryview, deadline: float, tenant: bytes = NO_TENANT) -> StoreOutcome:
        self.prepare(deadline)
        path = self._path(key)
        try:
            status = status_of(path, FRAME_DEPTH)
            if is_regular(status) and (status.st_nlink > 1 or status.st_size == self._files.frame_bytes):
                if status.st_nlink == 1:
                    renew_own(path, FRAME_DEPTH, self._ages.now_ns())
                return StoreOutcome.PRESENT
            if is_regular(status):  # cut, or stored by a version that placed headers otherwise: no look-up finds it
                self._space.discard(path, deadline)
            else:
                clear_the_place(path, FRAME_DEPTH, links=FRAME_LINKS)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            raise tier_error(error, f"{self._root}: renewing a frame") from error
        try:
            return self._write(key, tenant, self._header_of(key, source, tenant), source, deadline)
        except FileNotFoundError as error:
            self._prepared = False  # the folders were removed: the next operation makes them again
            raise TierUnreachable(
                UnreachableReason.ROOT_MISSING, f"{self._root}: the directory was removed while in use"
            ) from error
        except OSError as error:
            refused = tier_error(error, f"{self._root}: writing a frame")
            if refused.reason == RefusedReason.NO_SPACE:
                self._space.note_pressure()
                self._space.drop_limit()  # other users of the file system took the room: measure again, then evict
            raise refused from error

    def renew(self, keys: Sequence[bytes], deadline: float, tenant: bytes = NO_TENANT) -> None:
        self._prepare_for_reading(deadline)
        oldest_ns = self._space.oldest_ns()
        for key in keys:
            self._check(deadline)
            path = self._path(key)
            try:
                status = status_of(path, FRAME_DEPTH)
                if is_regular(status) and status.st_nlink == 1 and status.st_mtime_ns >= oldest_ns:
                    renew_own(path, FRAME_DEPTH, self._ages.now_ns())
            except (FileNotFoundError, NotADirectoryError):
                pass
            except OSError as error:
                raise tier_error(error, f"{self._root}: renewing a frame") from error

    def discard(self, key: bytes, deadline: float) -> None:
        self._check(deadline)
        path = self._path(key)
        try:
            self._space.discard(path, deadline)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise tier_error(error, f"{self._root}: removing a corrupt frame") from error

    def resident_bytes(self, deadline: float) -> int:
        self.prepare(deadline)
        try:
            return self._space.resident_bytes(deadline)
        except OSError as error:
            raise tier_error(error, f"{self._root}: reading the space ledger") from error

    def close(self) -> None:
        self._closed = True
        if self._maintenance.stop():
            self._space.close()
            if self._quotas is not None:
                self._quotas.close()

    def _prepare(self) -> None:
        with preparing(self._root):
            make_root(self._root)
            make_folders(self._partial, 2)
            self._document.ensure(lambda: self._partial / f"{DOCUMENT_PREFIX}{self._unique()}", PARTIAL_DEPTH)
            self._ages.share()
            self._mark.share()
            self._files.direct = supports_direct(self._partial, PARTIAL_DEPTH)
        self._prepared = True
        self._maintenance.start()

    def _prepare_for_reading(self, deadline: float) -> None:
        """Prepare. If only writing is refused (a read-only mount), reading continues."""
        try:
            self.prepare(deadline)
        except TierRefused as refused:
            if refused.reason not in (RefusedReason.READ_ONLY, RefusedReason.PERMISSION, RefusedReason.NO_SPACE):
                raise
            try:
                self._document.check()
                self._ages.share()
                self._mark.share()
            except OSError as error:
                raise tier_error(error, f"{self._root}: reading the namespace document") from error

    def _write(self, key: bytes, tenant: bytes, header: bytes, source: memoryview, deadline: float) -> StoreOutcome:
        quotas, size = self._quotas, self._files.frame_bytes
        if quotas is None:
            return self._write_within_quota(self._path(key), header, source, deadline)
        quotas.take(tenant, self._namespace.hex, key, size, deadline)
        outcome = None
        try:
            outcome = self._write_within_quota(self._path(key), header, source, deadline)
        finally:
            if outcome is not StoreOutcome.STORED:
                try:
                    quotas.give_back(tenant, size, deadline)
                except (TierError, OSError):
                    pass  # the tenant's ledger stays too high until its markers are counted
        return outcome

    def _write_within_quota(self, path: str, header: bytes, source: memoryview, deadline: float) -> StoreOutcome:
        partial = f"{self._partial}/{self._unique()}"
        size = self._files.frame_bytes
        create = functools.partial(self._files.create, partial, PARTIAL_DEPTH, source)
        descriptor = self._space.take(size, partial, create, deadline)
        kept = False
        try:
            self._files.write(descriptor, header, source, deadline)
            kept = _link(partial, path)
        finally:
            try:
                if kept:
                    unlink_own(partial, PARTIAL_DEPTH, missing_ok=True)  # its bytes are the frame's from now on
                else:
                    self._space.remove(partial, deadline)
            except (TierError, OSError):
                pass  # no time, or a failing disk: unlocked below, the file is swept later
            finally:
                os.close(descriptor)
        self._maintenance.wake()  # it checks the watermark; writers never wait for it
        return StoreOutcome.STORED if kept else StoreOutcome.PRESENT

    def _maintain(self) -> None:
        """One round on the maintenance thread. Raises TierError, OSError."""
        deadline = self._clock() + MAINTENANCE_DEADLINE_SECONDS
        if self._clock() >= self._next_scan:
            self._next_scan = self._clock() + self._scan_seconds
            self._space.rescan(deadline)
            while self._space.remove_expired(deadline) and not self._closed:
                pass
        self._space.reclaim(deadline)
        if self._space.above_high_watermark(deadline):
            self._space.make_room(0, deadline)

    def _path(self, key: bytes) -> str:
        return frame_path(self._folder, key.hex())

    def _unique(self) -> str:
        # The random part keeps processes apart that share the directory but not the process id namespace.
        return f"{os.getpid()}-{next(self._numbers)}-{os.urandom(6).hex()}"


def _link(partial: str, path: str) -> bool:
    """Give a finished partial file its name. False when another writer was first."""
    for attempt in range(_LINK_ATTEMPTS):
        try:
            link_own(partial, path, PARTIAL_DEPTH, FRAME_DEPTH)
            return True
        except FileExistsError:
            return False
        except FileNotFoundError:
            if attempt == _LINK_ATTEMPTS - 1:
                raise
            # An evicting engine may remove the outer folder between makedirs' two steps: try again.
            with contextlib.suppress(FileNotFoundError):
                make_folders(os.path.dirname(path), FRAME_DEPTH - 1)
        except PermissionError:
            # File systems without hard links (some FUSE and SMB mounts) answer EPERM; renaming is as atomic, it only
            # cannot tell whether it replaced an equal frame.
            rename_own(partial, path, PARTIAL_DEPTH, FRAME_DEPTH)
            return True
    raise AssertionError("unreachable")
