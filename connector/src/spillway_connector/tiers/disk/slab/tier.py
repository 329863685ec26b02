"""The NVMe tier on a local disk: frames in fixed slots of preallocated files, shared by the processes of one node.

    ROOT/<namespace hex>/namespace.json        the namespace document in full
    ROOT/clock.<boot>                          what ages are told by (clock.py)
    ROOT/slab/lock                             held while the shared index or the set of files changes
    ROOT/slab/writers/<number>                 locked by a process as long as it lives
    ROOT/slab/<slot bytes>/index               which slot holds which key (index.py)
    ROOT/slab/<slot bytes>/headers             every slot's header once more, for a rebuild (slab_headers.py)
    ROOT/slab/<slot bytes>/<chunk>-<epoch>.slab  slots (slab_layout.py)

Store: claim a slot under the lock, write header and payload without it in one call, publish under the lock. Load: look
up without a lock, read header and payload in one call, verify. Nobody waits for a reader: a slot may be overwritten
under one, and then the key or a checksum in the frame does not match. Whether that is a miss or damage, the slot's
generation tells.

No journal and no fsync. Whatever a crash or power failure leaves, the index only ever proposes a slot, and the frame in
it counts only if its key and both checksums match.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spillway_connector.errors import (
    RefusedReason,
    TierCorrupt,
    TierError,
    TierMiss,
    TierRefused,
    TierTimeout,
    TierUnreachable,
    UnreachableReason,
)
from spillway_connector.namespace import Namespace
from spillway_connector.tiers.disk.clock import AgeClock
from spillway_connector.tiers.disk.io import TRANSFERS_AT_ONCE, FrameFiles, tier_error
from spillway_connector.tiers.disk.maintenance import MaintenanceThread
from spillway_connector.tiers.disk.root import SLAB_FOLDER
from spillway_connector.tiers.disk.slab.fingerprint import fingerprint_of, fingerprints, namespace_words
from spillway_connector.tiers.disk.slab.index import SlabIndex
from spillway_connector.tiers.disk.slab.layout import slot_bytes_of
from spillway_connector.tiers.disk.slab.policy import LIVE, WRITING
from spillway_connector.tiers.disk.slab.pool import SlabPool
from spillway_connector.tiers.disk.slab.quota import make_tenant_room
from spillway_connector.tiers.disk.slab.space import UPKEEP_SECONDS, Pool, SlabSpace, pool_folders, resident_bytes
from spillway_connector.tiers.frame import PAGE_BYTES, build_header, verify
from spillway_connector.tiers.tier import NO_TENANT, Clock, EvictionReason, StoreOutcome, WallClock

MAINTENANCE_DEADLINE_SECONDS = 10.0  # for the maintenance thread to get the lock


@dataclass(frozen=True, slots=True)
class _Claim:
    pool: Pool
    slot: int
    generation: int
    epoch: int


class SlabTier:
    """A tier in the directory ``root`` on a local file system. See tier.Tier for the contract.

    max_bytes: bound for all files below the root, all namespaces and processes together; None takes 80 % of what the
    file system can give. ttl_seconds: how long an entry stays without being used; None for ever.
    Ages are told by a clock of the node's own, see clock.py. tenant_max_bytes: the most that each tenant may hold,
    those without a cache salt together being one; beyond it the tenant's own oldest entries make room.
    transfers_at_once: reads, and as many writes, however many threads ask.
    Nothing is touched before the first operation.
    """

    name = "nvme"
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
        clock: Clock = time.monotonic,
        wall_clock: WallClock = time.time,
    ) -> None:
        self.payload_bytes = payload_bytes
        self._digest = namespace.digest16
        self._words = namespace_words(self._digest)
        self._pair = (int(self._words[0]), int(self._words[1]))
        self._root = root
        self._slot_bytes = slot_bytes_of(payload_bytes)
        self._folder = root / SLAB_FOLDER / str(self._slot_bytes)
        self._max_bytes = max_bytes
        self._ttl_seconds = ttl_seconds
        self._tenant_max_bytes = tenant_max_bytes
        self._clock = clock
        self._wall_clock = wall_clock
        self._ages = AgeClock(root, clock, wall_clock)
        self._files = FrameFiles(payload_bytes, transfers_at_once, clock=clock, wall_clock=self._ages.now)
        self._now_s = self._ages.now_s
        self._space = SlabSpace(
            root,
            self._folder,
            self._files,
            max_bytes=max_bytes,
            ttl_seconds=ttl_seconds,
            clock=clock,
            now_s=self._now_s,
        )
        self._pool = SlabPool(
            namespace, self._slot_bytes, root, files=self._files, space=self._space, ages=self._ages, clock=clock
        )
        self._maintenance = MaintenanceThread(f"NVMe tier {self._folder}", self._maintain, UPKEEP_SECONDS)
        self._abandoned: list[_Claim] = []
        self._closed = False

    @property
    def evictions(self) -> Mapping[EvictionReason, int]:
        return self._space.evictions

    @property
    def quarantined(self) -> Mapping[str, int]:
        return self._pool.document.quarantined

    @property
    def under_pressure(self) -> bool:
        return self._space.under_pressure

    @property
    def uses_direct_io(self) -> bool:
        """Whether transfers bypass the page cache; known once prepared."""
        return self._files.direct

    def prepare(self, deadline: float) -> None:
        self._check(deadline)
        self._pool.writable(deadline)
        self._maintenance.start()

    def contains(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        self._check(deadline)
        pool = self._pool.readable(deadline)
        self._maintenance.start()
        if pool is None or not keys:
            return [False] * len(keys)
        return self._live(pool.index, keys)

    def contains_now(self, keys: Sequence[bytes]) -> list[bool] | None:
        """From the mapped index. None before the directory has been prepared. A pool that another process replaced a
        moment ago is seen late."""
        pool = self._pool.at_hand()
        if self._closed or pool is None:
            return None
        # Mostly one key, for which arrays cost ten times as much.
        return self._live(pool.index, keys) if len(keys) != 1 else [self._live_one(pool.index, keys[0])]

    def load(self, key: bytes, target: memoryview, deadline: float) -> None:
        self._check(deadline)
        pool = self._pool.readable(deadline)
        if pool is None:
            raise TierMiss
        index = pool.index
        fingerprint = fingerprint_of(key, self._pair)
        slot = index.find_one(fingerprint)
        generation = int(index.generation[slot])
        if slot < 0 or not index.holds(slot, fingerprint):  # asked after the generation, so that it is this entry's
            raise TierMiss
        now_s = self._now_s()
        if self._ttl_seconds is not None and int(index.used_s[slot]) < now_s - self._ttl_seconds:
            raise TierMiss("the entry has expired")
        epoch = int(index.chunk_epoch[index.shape.chunk_of(slot)])
        try:
            header = pool.chunks.read(slot, epoch, target, deadline)
            verify(header, target, namespace=self._digest, key=key, payload_bytes=self.payload_bytes)
        except TierCorrupt:
            if int(index.generation[slot]) != generation or index.state[slot] != LIVE or self._pool.replaced(index):
                raise TierMiss("the entry was evicted while it was read") from None
            raise
        except FileNotFoundError:
            self._pool.suspect()
            raise TierMiss("the chunk has been dropped") from None
        except OSError as error:
            raise tier_error(error, f"{self._folder}: reading a frame") from error
        try:
            index.note_hit(slot, now_s)
        except OSError:
            pass  # a disk that no longer takes writes keeps its order

    def store(self, key: bytes, source: memoryview, deadline: float, tenant: bytes = NO_TENANT) -> StoreOutcome:
        self._check(deadline)
        pool = self._pool.writable(deadline)
        self._maintenance.start()
        try:
            slot = self._find(pool.index, key)
            if slot >= 0 and pool.index.state[slot] == LIVE and not self._expired(pool.index, slot):
                pool.index.note_hit(slot, self._now_s())
                return StoreOutcome.PRESENT
            header = build_header(
                self._digest,
                key,
                source,
                created_ms=int(self._wall_clock() * 1000),
                header_bytes=PAGE_BYTES,
                tenant=tenant,
            )
            claim = self._claim(key, tenant, deadline)
        except OSError as error:
            raise self._refused(error, "making room for a frame") from error
        if isinstance(claim, StoreOutcome):
            return claim
        try:
            claim.pool.chunks.write(claim.slot, claim.epoch, header, source, deadline)
        except FileNotFoundError as error:
            self._pool.suspect()
            self._give_up(claim, deadline)
            raise TierUnreachable(
                UnreachableReason.ROOT_MISSING, f"{self._folder}: a chunk was removed while in use"
            ) from error
        except OSError as error:
            self._give_up(claim, deadline)
            raise self._refused(error, "writing a frame") from error
        except BaseException:
            self._give_up(claim, deadline)
            raise
        self._publish(claim, header, deadline)
        return StoreOutcome.STORED

    def discard(self, key: bytes, deadline: float) -> None:
        self._check(deadline)
        try:
            with self._locked(deadline) as pool:
                slot = self._find(pool.index, key)
                if slot < 0 or pool.index.state[slot] != LIVE:
                    return
                epoch = int(pool.index.chunk_epoch[pool.index.shape.chunk_of(slot)])
                pool.index.release(slot)
                try:
                    pool.chunks.blank(slot, epoch)
                except OSError:
                    pass  # a rebuilt index may find it again, and its load will prove it wrong again
        except OSError as error:
            raise tier_error(error, f"{self._folder}: removing a corrupt frame") from error

    def resident_bytes(self, deadline: float) -> int:
        self._check(deadline)
        if self._pool.readable(deadline) is None:
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
        pool = self._pool.at_hand()
        if pool is None or not pool.index.writable or self._pool.replaced(pool.index):
            return
        try:
            with self._locked(deadline) as pool:
                self._maintain_pool(pool)
        except OSError as error:
            raise tier_error(error, f"{self._folder}: maintenance") from error

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._maintenance.stop()
        self._pool.close()

    # --- storing ------------------------------------------------------------------------------------------------------

    def _claim(self, key: bytes, tenant: bytes, deadline: float) -> _Claim | StoreOutcome:
        """A slot to write to; PRESENT when the key is there, PENDING while someone alive is writing it."""
        fingerprint = fingerprint_of(key, self._pair)
        with self._locked(deadline) as pool:
            index = pool.index
            self._maintain_pool(pool)
            slot = index.find_one(fingerprint)
            if slot >= 0:
                if index.state[slot] == LIVE and not self._expired(index, slot):
                    return StoreOutcome.PRESENT
                if index.state[slot] == WRITING and self._pool.lease.is_held(int(index.owner[slot])):
                    return StoreOutcome.PENDING
                if index.state[slot] == LIVE:
                    self._space.expire(index, slot)
                else:
                    index.release(slot)
            tenant_tag = int.from_bytes(tenant, "little")
            slot = self._slot_for(pool, tenant_tag)
            generation = index.claim(
                slot,
                fingerprint,
                namespace=self._pair[0],
                tenant=tenant_tag,
                owner=self._pool.lease.number,
                now_s=self._now_s(),
            )
            pool.chunks.headers.forget(slot)
            return _Claim(pool, slot, generation, int(index.chunk_epoch[index.shape.chunk_of(slot)]))

    def _slot_for(self, pool: Pool, tenant: int) -> int:
        """A FREE slot, by whatever it takes. Under the lock."""
        index = pool.index
        victim: int | None
        if self._tenant_max_bytes is not None:
            others = [folder for folder in pool_folders(self._root) if folder != self._folder]
            given_up = make_tenant_room(index, tenant, self._tenant_max_bytes, others, self._space.evict_of_tenant)
            if given_up is not None:
                return given_up
        slot = index.free_slot()
        if slot is None and self._space.may_grow() and self._space.grow(pool):
            slot = index.free_slot()
        if slot is not None:
            return slot
        victim = index.victim()
        if victim is None:
            self._pool.release_orphaned(index)
            slot = index.free_slot()
            if slot is not None:
                return slot
            self._space.note_pressure()
            raise TierRefused(
                RefusedReason.NO_SPACE,
                f"max_bytes: {self._max_bytes} leaves no slot of {self._slot_bytes} bytes that is not being written; "
                f"raise max_bytes or free space",
            )
        self._space.evict(index, victim)
        return victim

    def _publish(self, claim: _Claim, header: bytes, deadline: float) -> None:
        """Let readers have a written slot. A claim that is no longer ours (its chunk was dropped) is let go."""
        try:
            with self._locked(deadline) as pool:
                if self._is_ours(pool.index, claim):
                    pool.chunks.headers.note(claim.slot, header)
                    pool.index.publish(claim.slot)
        except OSError as error:
            self._abandoned.append(claim)
            raise tier_error(error, f"{self._folder}: publishing a frame") from error
        except TierError:
            self._abandoned.append(claim)
            raise

    def _give_up(self, claim: _Claim, deadline: float) -> None:
        self._abandoned.append(claim)
        try:
            with self._locked(deadline):
                pass  # which releases it
        except (TierError, OSError):
            pass  # the next holder of the lock in this process does; the write's own failure is the one to report

    def _maintain(self) -> None:
        if not self._closed:
            self.maintain(self._clock() + MAINTENANCE_DEADLINE_SECONDS)

    def _maintain_pool(self, pool: Pool) -> None:
        if self._space.maintain(pool):
            self._pool.release_orphaned(pool.index)

    @contextmanager
    def _locked(self, deadline: float) -> Iterator[Pool]:
        """The root's lock; claims that could not be ended in time before are ended first."""
        with self._pool.locked(deadline) as pool:
            self._release_abandoned(pool)
            yield pool

    def _release_abandoned(self, pool: Pool) -> None:
        while self._abandoned:
            claim = self._abandoned.pop()
            if self._is_ours(pool.index, claim):
                pool.index.release(claim.slot)

    def _is_ours(self, index: SlabIndex, claim: _Claim) -> bool:
        slot = claim.slot
        return (
            slot < index.shape.slots
            and index.state[slot] == WRITING
            and int(index.generation[slot]) == claim.generation
            and int(index.owner[slot]) == self._pool.lease.number
        )

    # --- small things -------------------------------------------------------------------------------------------------

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
        return slot >= 0 and index.holds(slot, fingerprint) and not self._expired(index, slot)

    def _refused(self, error: OSError, doing: str) -> TierError:
        refused = tier_error(error, f"{self._folder}: {doing}")
        if refused.reason == RefusedReason.NO_SPACE:
            self._space.note_pressure()
        return refused

    def _find(self, index: SlabIndex, key: bytes) -> int:
        return index.find_one(fingerprint_of(key, self._pair))

    def _expired(self, index: SlabIndex, slot: int) -> bool:
        return self._ttl_seconds is not None and int(index.used_s[slot]) < self._now_s() - self._ttl_seconds

    def _check(self, deadline: float) -> None:
        if self._closed:
            raise TierRefused(RefusedReason.CLOSED, f"{self._root}: the tier is closed")
        if self._clock() >= deadline:
            raise TierTimeout(f"{self._root}: the deadline passed before the operation began")
