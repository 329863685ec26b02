"""The slab layout of the NVMe tier: frames in fixed slots of preallocated files, shared by the processes of one node.

    ROOT/<namespace hex>/namespace.json        the namespace document in full
    ROOT/clock.<boot>                          clock of the entries' ages (clock.py)
    ROOT/store                                 which directory this is (store_mark.py)
    ROOT/slab/lock                             held while the shared index or the set of files changes
    ROOT/slab/writers/<number>                 lease of a process that writes (writers.py)
    ROOT/slab/<slot bytes>/index               which slot holds which key (index.py)
    ROOT/slab/<slot bytes>/headers             every slot's header once more, for a rebuild (headers.py)
    ROOT/slab/<slot bytes>/sessions            when sessions come back, and what they use (session_file.py)
    ROOT/slab/<slot bytes>/<chunk>-<epoch>.slab  slots (layout.py)

Store: claim a slot under the lock, write header and payload without it in one call, publish under the lock. Load: look
up without a lock, read header and payload in one call, verify. Transfers are direct, but while memory is idle a store
goes through the page cache and leaves its frame there; a load takes from there what it finds (page_cache.py).

Writers do not wait for readers: a slot may be overwritten during a read, and then the key or a checksum in the frame
does not match. The slot's entry in the index file tells this miss from damage.

No journal and no fsync. After a crash or power failure the index may be wrong, but a frame is served only if its key
and both checksums match.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from spillway_connector.errors import (
    RefusedReason,
    TierCorrupt,
    TierError,
    TierMiss,
    TierRefused,
    TierUnreachable,
    UnreachableReason,
)
from spillway_connector.namespace import Namespace
from spillway_connector.own_files import NotOwn
from spillway_connector.plan.sessions import SessionUse
from spillway_connector.tiers.disk.directory_tier import DirectoryTier
from spillway_connector.tiers.disk.io import TRANSFERS_AT_ONCE, tier_error
from spillway_connector.tiers.disk.maintenance import MaintenanceThread
from spillway_connector.tiers.disk.root import SLAB_FOLDER
from spillway_connector.tiers.disk.slab.chunks import CachedFrame
from spillway_connector.tiers.disk.slab.claims import SessionChunk, SlotClaims
from spillway_connector.tiers.disk.slab.fingerprint import fingerprint_of, fingerprints, namespace_words
from spillway_connector.tiers.disk.slab.index import SlabIndex
from spillway_connector.tiers.disk.slab.layout import slot_bytes_of
from spillway_connector.tiers.disk.slab.policy import LIVE
from spillway_connector.tiers.disk.slab.session_file import SizeClassSessions
from spillway_connector.tiers.disk.slab.size_class import OpenSizeClass
from spillway_connector.tiers.disk.slab.space import UPKEEP_SECONDS, SizeClass, SlabSpace, resident_bytes
from spillway_connector.tiers.tier import NO_TENANT, BlockInMemory, Clock, StoreOutcome, WallClock

FOLLOW_SECONDS = 0.001  # how late a look-up that does not wait may see what other processes have changed
MAINTENANCE_DEADLINE_SECONDS = 10.0  # for the maintenance thread to get the lock


class _Entry(NamedTuple):
    """The index's entry of the key with this fingerprint: slot, the slot's generation then, epoch of its chunk."""

    size_class: SizeClass
    slot: int
    fingerprint: tuple[int, int]
    generation: int
    epoch: int


class SlabTier(DirectoryTier):
    """A tier in the directory ``root`` on a local file system. See tier.Tier for the contract.

    max_bytes: bound for all files below the root, all namespaces and processes together, the smallest that a running
    process was given; None takes 80 % of what the
    file system can give. ttl_seconds: how long an entry stays without being used, by the node's clock (clock.py); None
    forever. tenant_max_bytes: the quota of each tenant, all without a cache salt being one tenant; beyond it the
    tenant's oldest entries are evicted. transfers_at_once: concurrent reads, and as many writes, for any number of
    threads. page_cache: leave frames in the page cache while memory is idle, if the kernel can tell what lies there
    (Linux 6.5); without, all transfers are direct. The directory is not touched before the first operation.
    """

    has_local_index = True

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
        page_cache: bool = True,
        clock: Clock = time.monotonic,
        wall_clock: WallClock = time.time,
    ) -> None:
        super().__init__(
            namespace, payload_bytes, root, transfers_at_once=transfers_at_once, clock=clock, wall_clock=wall_clock
        )
        self._words = namespace_words(self._digest)
        self._pair = (int(self._words[0]), int(self._words[1]))
        self._slot_bytes = slot_bytes_of(payload_bytes)
        self._folder = root / SLAB_FOLDER / str(self._slot_bytes)
        self._ttl_seconds = ttl_seconds
        self._now_s = self._ages.now_s
        self._space: SlabSpace = SlabSpace(
            root,
            self._folder,
            self._files,
            max_bytes=max_bytes,
            ttl_seconds=ttl_seconds,
            clock=clock,
            now_s=self._now_s,
        )
        self._size_class = OpenSizeClass(
            namespace,
            self._slot_bytes,
            root,
            files=self._files,
            space=self._space,
            ages=self._ages,
            clock=clock,
            page_cache=page_cache,
        )
        self._mark, self._document = self._size_class.mark, self._size_class.document
        self._sessions = SizeClassSessions(self._folder, self._words, self._now_s, self._space.make_room)
        self._claims = SlotClaims(
            root,
            self._folder,
            self._size_class,
            self._space,
            max_bytes=max_bytes,
            tenant_max_bytes=tenant_max_bytes,
            ttl_seconds=ttl_seconds,
            now_s=self._now_s,
            sessions=self._sessions,
        )
        self._maintenance = MaintenanceThread(f"NVMe tier {self._folder}", self._maintain, UPKEEP_SECONDS)
        self._followed_at = -math.inf

    def prepare(self, deadline: float) -> None:
        self._check(deadline)
        self._size_class.writable(deadline)
        self._maintenance.start()

    def contains(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        self._check(deadline)
        size_class = self._size_class.readable(deadline)
        self._maintenance.start()
        if size_class is None or not keys:
            return [False] * len(keys)
        return self._live(size_class.index, keys)

    def contains_now(self, keys: Sequence[bytes]) -> list[bool] | None:
        """Look the keys up in the copy of the index.

        A size class that another process replaced a moment ago is seen late. None before the directory has been
        prepared, and if so much was changed that all of the index has to be read.
        """
        size_class = self._size_class.last_used()
        if self._closed or size_class is None:
            return None
        now = self._clock()
        if not 0 <= now - self._followed_at < FOLLOW_SECONDS:
            self._followed_at = now
            try:
                if not size_class.index.follow(reload=False):
                    self._followed_at = -math.inf
                    return None
            except OSError:
                return None
        # Mostly one key, for which arrays cost ten times as much.
        return self._live(size_class.index, keys) if len(keys) != 1 else [self._live_one(size_class.index, keys[0])]

    def load(self, key: bytes, target: memoryview, deadline: float) -> None:
        self._note_hit(self._read(key, target, deadline))

    def peek(self, key: bytes, target: memoryview, deadline: float) -> None:
        self._read(key, target, deadline)

    def _read(self, key: bytes, target: memoryview, deadline: float) -> _Entry:
        entry = self._entry(key, deadline)
        try:
            self._verify(entry.size_class.chunks.read(entry.slot, entry.epoch, target, deadline), target, key)
        except TierCorrupt:
            if self._changed_hands(entry):
                raise TierMiss("the entry was evicted while it was read") from None
            raise
        except (FileNotFoundError, NotOwn) as gone:
            if not self._changed_hands(entry):
                self._size_class.suspect()
            raise TierMiss(f"the chunk has been dropped, or replaced: {gone.strerror}") from None
        except OSError as error:
            raise tier_error(error, f"{self._folder}: reading a frame") from error
        return entry

    def in_memory(self, key: bytes, deadline: float) -> BlockInMemory | None:
        """Read the frame from the page cache; None if it is not there."""
        if not self._files.uses_page_cache:
            return None
        entry = self._entry(key, deadline)
        try:
            frame = entry.size_class.chunks.cached(entry.slot, entry.epoch)
        except (TierCorrupt, OSError):
            return None  # load finds out whose fault it is
        if frame is None:
            return None
        self._note_hit(entry)  # not after the copy, when its job can no longer be given up
        return BlockInMemory(partial(self._copy_cached, key, frame))

    def _copy_cached(self, key: bytes, frame: CachedFrame, target: memoryview) -> bool:
        header = frame.read(target)
        if header is None:
            return False
        try:
            self._verify(header, target, key)
        except TierCorrupt:
            return False  # overwritten meanwhile, or damaged in memory or on the disk: load finds out
        return True

    def _entry(self, key: bytes, deadline: float) -> _Entry:
        """Find the index's entry of a key. Raises TierMiss, TierError."""
        self._check(deadline)
        size_class = self._size_class.readable(deadline)
        if size_class is None:
            raise TierMiss
        index = size_class.index
        fingerprint = fingerprint_of(key, self._pair)
        slot = index.find_one(fingerprint)
        generation = int(index.generation[slot])
        if slot < 0 or not index.holds(slot, fingerprint):  # read after the generation, which then is this entry's
            raise TierMiss
        if self._claims.expired(index, slot):
            raise TierMiss("the entry has expired")
        return _Entry(size_class, slot, fingerprint, generation, int(index.chunk_epoch[index.shape.chunk_of(slot)]))

    def _changed_hands(self, entry: _Entry) -> bool:
        """Whether a frame that was not found in its slot was removed since. Raises TierError."""
        index = entry.size_class.index
        try:
            held = index.still_holds(entry.slot, entry.fingerprint, entry.generation)
        except OSError as error:
            raise tier_error(error, f"{self._folder}: reading the index") from error
        return not held or self._size_class.replaced(index)

    def _note_hit(self, entry: _Entry) -> None:
        try:
            entry.size_class.index.note_hit(entry.slot, self._now_s())
            self._sessions.loaded(entry.slot)
        except OSError:
            pass  # a disk that no longer takes writes keeps its order

    def use_session(self, use: SessionUse) -> None:
        """See tier.SessionTier. Taken in by this process's next store, or by the maintenance thread, which is woken."""
        self._sessions.note(use)
        self._maintenance.wake()

    def store(self, key: bytes, source: memoryview, deadline: float, tenant: bytes = NO_TENANT) -> StoreOutcome:
        return self._store(key, source, deadline, tenant, None)

    def store_of_session(
        self, key: bytes, source: memoryview, deadline: float, tenant: bytes, session: bytes, *, own_room: bool
    ) -> StoreOutcome:
        """See tier.SessionTier."""
        return self._store(key, source, deadline, tenant, SessionChunk(session, own_room))

    def _store(
        self, key: bytes, source: memoryview, deadline: float, tenant: bytes, chunk: SessionChunk | None
    ) -> StoreOutcome:
        self._check(deadline)
        size_class = self._size_class.writable(deadline)
        self._maintenance.start()
        try:
            fingerprint = fingerprint_of(key, self._pair)
            slot = size_class.index.find_one(fingerprint)
            live = slot >= 0 and size_class.index.state[slot] == LIVE and not self._size_class.suspected
            if live and not self._claims.expired(size_class.index, slot):
                size_class.index.note_hit(slot, self._now_s())
                return StoreOutcome.PRESENT
            header = self._header_of(key, source, tenant)
            claim = self._claims.claim(fingerprint, self._pair[0], int.from_bytes(tenant, "little"), deadline, chunk)
        except OSError as error:
            raise self._refused(error, "making room for a frame") from error
        if isinstance(claim, StoreOutcome):
            return claim
        try:
            claim.size_class.chunks.write(claim.slot, claim.epoch, header, source, deadline)
        except (FileNotFoundError, NotOwn) as error:
            self._size_class.suspect()
            self._claims.give_up(claim, deadline)
            raise TierUnreachable(
                UnreachableReason.ROOT_MISSING, f"{self._folder}: a chunk was removed while in use: {error.strerror}"
            ) from error
        except OSError as error:
            self._claims.give_up(claim, deadline)
            raise self._refused(error, "writing a frame") from error
        except BaseException:
            self._claims.give_up(claim, deadline)
            raise
        self._claims.publish(claim, header, deadline)
        return StoreOutcome.STORED

    def renew(self, keys: Sequence[bytes], deadline: float, tenant: bytes = NO_TENANT) -> None:
        """An entry that is renewed leaves in its own turn alone, as one that several sessions use.

        Under the lock, unlike a load: other processes must know at once, as this one may store nothing for a while.
        """
        self._check(deadline)
        if self._size_class.readable(deadline) is None or not keys:
            return
        try:
            with self._claims.locked(deadline) as size_class:
                slots = size_class.index.find(fingerprints(keys, self._words))
                live = [
                    slot
                    for slot, there in zip(slots.tolist(), self._live(size_class.index, keys), strict=True)
                    if there
                ]
                for slot in live:
                    size_class.index.note_hit(slot, self._now_s())
                self._sessions.renewed(size_class, live)
        except (OSError, TierRefused):
            pass  # a disk that takes no writes keeps its order

    def discard(self, key: bytes, deadline: float) -> None:
        self._check(deadline)
        try:
            with self._claims.locked(deadline) as size_class:
                slot = size_class.index.find_one(fingerprint_of(key, self._pair))
                if slot < 0 or size_class.index.state[slot] != LIVE:
                    return
                epoch = int(size_class.index.chunk_epoch[size_class.index.shape.chunk_of(slot)])
                size_class.index.release(slot)
                try:
                    size_class.chunks.blank(slot, epoch)
                except OSError:
                    pass  # a rebuilt index may find it again; its load then fails again
        except OSError as error:
            raise tier_error(error, f"{self._folder}: removing a corrupt frame") from error

    def resident_bytes(self, deadline: float) -> int:
        self._check(deadline)
        if self._size_class.readable(deadline) is None:
            return 0
        try:
            return resident_bytes(self._root)
        except OSError as error:
            raise tier_error(error, f"{self._root}: counting slots in use") from error

    def maintain(self, deadline: float) -> None:
        """Stay within a bound that has shrunk, and remove expired entries; at most once a minute.

        Runs on the maintenance thread, so also while no stores arrive. A directory that was removed, or cannot be
        written to, stays as it is. Raises TierError.
        """
        self._check(deadline)
        size_class = self._size_class.last_used()
        if size_class is None or not size_class.index.writable or self._size_class.replaced(size_class.index):
            return
        try:
            with self._claims.locked(deadline) as size_class:
                self._size_class.maintain(size_class)
                self._sessions.order(size_class)
        except OSError as error:
            raise tier_error(error, f"{self._folder}: maintenance") from error

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._maintenance.stop()
        self._sessions.close()
        self._space.close()
        self._size_class.close()

    def _live(self, index: SlabIndex, keys: Sequence[bytes]) -> list[bool]:
        slots = index.find(fingerprints(keys, self._words))
        live = (slots >= 0) & (index.state.take(slots, mode="wrap") == LIVE)
        if self._ttl_seconds is not None:
            live &= index.used_s.take(slots, mode="wrap").astype(np.int64) >= self._now_s() - self._ttl_seconds
        answer: list[bool] = live.tolist()
        return answer

    def _live_one(self, index: SlabIndex, key: bytes) -> bool:
        fingerprint = fingerprint_of(key, self._pair)
        slot = index.find_one(fingerprint)
        return slot >= 0 and index.holds(slot, fingerprint) and not self._claims.expired(index, slot)

    def _refused(self, error: OSError, doing: str) -> TierError:
        refused = tier_error(error, f"{self._folder}: {doing}")
        if refused.reason == RefusedReason.NO_SPACE:
            self._space.note_pressure()
        return refused

    def _maintain(self) -> None:
        if not self._closed:
            self.maintain(self._clock() + MAINTENANCE_DEADLINE_SECONDS)
