"""Quotas in a directory with one file per frame: what each tenant holds, and which of its frames are evicted.

    ROOT/tenants/<tenant hex>/ledger                         bytes of this tenant's frames (ledger.py)
    ROOT/tenants/<tenant hex>/<namespace hex>/<key hex>      empty: this frame is the tenant's

A marker is made before its frame and removed after it; the process that removes it subtracts the frame. Size and age
are read from the frame: a marker without one counts for nothing and is swept. Frames that are removed otherwise (to
make room for any tenant, expired, by hand) are noticed when the tenant's ledger shows its quota as used up and its
markers are counted. Frames stored while no quota was set have no marker and are not counted.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import nsmallest
from pathlib import Path

from spillway_connector.errors import RefusedReason, TierRefused, TierTimeout
from spillway_connector.own_files import NotOwn, make_folders, open_own, renew_own, status_of, unlink_own
from spillway_connector.tiers.disk.files.ledger import Balance, Ledger
from spillway_connector.tiers.disk.files.space import CANDIDATES_MAX, Space
from spillway_connector.tiers.disk.files.tree import FRAME_DEPTH, frame_path
from spillway_connector.tiers.disk.root import TENANTS_FOLDER
from spillway_connector.tiers.tier import Clock, EvictionReason

LEDGER_NAME = "ledger"
TENANTS_OPEN_MAX = 256  # tenants whose ledger this process keeps open
_MARKER_DEPTH = 4  # tenants/<tenant hex>/<namespace hex>/<key hex> below the root, see own_files.py
UNSEEN_SECONDS = 600.0  # a marker older than this without a frame belongs to no frame that is being written


@dataclass(frozen=True, slots=True, order=True)
class _Owned:
    mtime_ns: int
    size: int
    path: str
    marker: str


class TenantQuotas:
    """The quota ``max_bytes`` of every tenant below ``root``, for all processes together.

    space: removes the frames. now_ns: the clock of the frames' ages. Safe from several threads.
    """

    def __init__(self, root: Path, max_bytes: int, space: Space, clock: Clock, now_ns: Callable[[], int]) -> None:
        self._root = root
        self._max_bytes = max_bytes
        self._space = space
        self._clock = clock
        self._now_ns = now_ns
        self._lock = threading.Lock()
        self._tenants: dict[bytes, _Tenant] = {}

    def take(self, tenant: bytes, namespace_hex: str, key: bytes, size: int, deadline: float) -> None:
        """Make room for ``size`` more bytes of ``tenant`` and make the frame's marker.

        Raises TierRefused(NO_SPACE), TierTimeout, OSError.
        """
        held = self._tenant(tenant)
        marker = held.folder / namespace_hex / key.hex()
        while True:
            with held.ledger.locked(deadline) as balance:
                if balance is not None and balance.resident_bytes + size <= self._max_bytes:
                    self._mark(marker)
                    held.ledger.add(balance, size)
                    return
            self._make_room(tenant, held, size, deadline)

    def give_back(self, tenant: bytes, size: int, deadline: float) -> None:
        """A frame was not stored after all. Its marker stays: another process may be storing the same.

        Raises TierTimeout, OSError.
        """
        held = self._tenant(tenant)
        with held.ledger.locked(deadline) as balance:
            held.ledger.subtract(balance, size)

    def _mark(self, marker: Path) -> None:
        flags = os.O_CREAT | os.O_WRONLY
        try:
            descriptor = open_own(marker, flags, _MARKER_DEPTH)
        except FileNotFoundError:
            make_folders(marker.parent, _MARKER_DEPTH - 1)
            descriptor = open_own(marker, flags, _MARKER_DEPTH)
        os.close(descriptor)
        renew_own(marker, _MARKER_DEPTH, self._now_ns())

    def close(self) -> None:
        with self._lock:
            for held in self._tenants.values():
                held.ledger.close()
            self._tenants.clear()

    def _tenant(self, tenant: bytes) -> _Tenant:
        with self._lock:
            held = self._tenants.pop(tenant, None)
            if held is None:
                folder = self._root / TENANTS_FOLDER / tenant.hex()
                make_folders(folder, 2)
                held = _Tenant(folder, Ledger(folder / LEDGER_NAME, self._clock, depth=3))
            elif not held.folder.is_dir():  # removed by hand
                make_folders(held.folder, 2)
            self._tenants[tenant] = held  # the youngest at the end
            if len(self._tenants) > TENANTS_OPEN_MAX:
                self._tenants.pop(next(iter(self._tenants)))  # closed with the last reference to it
            return held

    def _make_room(self, tenant: bytes, held: _Tenant, size: int, deadline: float) -> None:
        if not held.room_lock.acquire(timeout=max(0.0, deadline - self._clock())):
            raise TierTimeout("another thread was still making room within a tenant's quota")
        try:
            counted = False
            while True:
                with held.ledger.locked(deadline) as balance:
                    excess = None if balance is None else balance.resident_bytes + size - self._max_bytes
                if excess is not None and excess <= 0:
                    return
                if excess is not None and held.oldest:
                    self._evict(held, held.oldest.popleft(), deadline)
                    continue
                if counted:
                    raise TierRefused(
                        RefusedReason.NO_SPACE,
                        f"tenant_max_bytes: {self._max_bytes} leaves tenant {tenant.hex()} no room for a frame of "
                        f"{size} bytes; raise tenant_max_bytes",
                    )
                self._count(held, size, deadline)
                counted = True
        finally:
            held.room_lock.release()

    def _evict(self, held: _Tenant, owned: _Owned, deadline: float) -> None:
        with held.ledger.locked(deadline) as balance:
            removed = self._space.remove_unused(owned.path, owned.mtime_ns, EvictionReason.TENANT, deadline)
            if removed is None:
                return  # used since it was counted
            try:
                unlink_own(owned.marker, _MARKER_DEPTH)
            except FileNotFoundError:
                return  # another process has removed and subtracted it
            held.ledger.subtract(balance, owned.size)

    def _count(self, held: _Tenant, new_frame_bytes: int, deadline: float) -> None:
        """Bring the ledger down to what is there, and find the oldest frames."""
        with held.ledger.locked(deadline) as balance:
            added_before = 0 if balance is None else balance.added_bytes
        seen_bytes, found = 0, []
        now_seconds = self._now_ns() / 1e9
        for namespace in os.scandir(held.folder):
            if not namespace.is_dir(follow_symlinks=False):
                continue
            for marker in os.scandir(namespace.path):
                path = frame_path(self._root / namespace.name, marker.name)
                try:
                    frame = status_of(path, FRAME_DEPTH)
                    seen_bytes += frame.st_size
                    found.append(_Owned(frame.st_mtime_ns, frame.st_size, path, marker.path))
                except (FileNotFoundError, NotADirectoryError, NotOwn):
                    try:
                        if abs(now_seconds - marker.stat(follow_symlinks=False).st_mtime) > UNSEEN_SECONDS:
                            unlink_own(marker.path, _MARKER_DEPTH)
                        else:
                            seen_bytes += new_frame_bytes  # probably being written
                    except FileNotFoundError:
                        continue
        with held.ledger.locked(deadline) as balance:
            added_bytes = 0 if balance is None else balance.added_bytes
            held.ledger.write(Balance(seen_bytes + max(0, added_bytes - added_before), added_bytes))
        held.oldest = deque(nsmallest(CANDIDATES_MAX, found))


class _Tenant:
    def __init__(self, folder: Path, ledger: Ledger) -> None:
        self.folder = folder
        self.ledger = ledger
        self.room_lock = threading.Lock()
        self.oldest: deque[_Owned] = deque()

    def __del__(self) -> None:
        self.ledger.close()
