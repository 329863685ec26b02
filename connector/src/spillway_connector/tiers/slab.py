"""The NVMe tier on a local disk: frames in fixed slots of preallocated files, shared by the processes of one node.

    ROOT/<namespace hex>/namespace.json        the namespace document in full
    ROOT/slab/lock                             held while the shared index or the set of files changes
    ROOT/slab/writers/<number>                 locked by a process as long as it lives
    ROOT/slab/<slot bytes>/index               which slot holds which key (slab_index.py)
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
from collections.abc import Callable, Iterator, Sequence
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
from spillway_connector.tiers.frame import PAGE_BYTES, build_header, verify
from spillway_connector.tiers.nvme_io import FrameFiles, tier_error
from spillway_connector.tiers.slab_fingerprint import fingerprints, namespace_words
from spillway_connector.tiers.slab_index import SlabIndex
from spillway_connector.tiers.slab_layout import SLAB_FOLDER, slot_bytes_of
from spillway_connector.tiers.slab_policy import FREE, LIVE, WRITING, tenant_victim
from spillway_connector.tiers.slab_pool import SlabPool
from spillway_connector.tiers.slab_space import Pool, SlabSpace, resident_bytes
from spillway_connector.tiers.tier import Clock, StoreOutcome, WallClock

TenantOf = Callable[[bytes], bytes]
"""The 8-byte tag of the tenant a key belongs to; eight zero bytes for none."""


@dataclass(frozen=True, slots=True)
class _Claim:
    pool: Pool
    slot: int
    generation: int
    epoch: int


class SlabTier:
    """A tier in the directory ``root`` on a local file system. See tier.Tier for the contract.

    max_bytes: bound for all files below the root, all namespaces and processes together; None takes 80 % of what the
    file system can give. ttl_seconds: how long an entry stays without being used; None for ever. tenant_of,
    tenant_max_bytes: who a key belongs to, and the most that each tenant may hold; both or neither.
    Nothing is touched before the first operation.
    """

    name = "nvme"

    def __init__(
        self,
        namespace: Namespace,
        payload_bytes: int,
        root: Path,
        *,
        max_bytes: int | None = None,
        ttl_seconds: float | None = None,
        tenant_of: TenantOf | None = None,
        tenant_max_bytes: int | None = None,
        clock: Clock = time.monotonic,
        wall_clock: WallClock = time.time,
    ) -> None:
        if (tenant_of is None) != (tenant_max_bytes is None):
            raise ValueError("tenant_of and tenant_max_bytes: give both or neither")
        self.payload_bytes = payload_bytes
        self._digest = namespace.digest16
        self._words = namespace_words(self._digest)
        self._root = root
        self._slot_bytes = slot_bytes_of(payload_bytes)
        self._folder = root / SLAB_FOLDER / str(self._slot_bytes)
        self._max_bytes = max_bytes
        self._ttl_seconds = ttl_seconds
        self._tenant_of = tenant_of
        self._tenant_max_bytes = tenant_max_bytes
        self._clock = clock
        self._wall_clock = wall_clock
        self._files = FrameFiles(payload_bytes, direct=False, clock=clock, wall_clock=wall_clock)
        self._space = SlabSpace(
            root,
            self._folder,
            self._files,
            max_bytes=max_bytes,
            ttl_seconds=ttl_seconds,
            clock=clock,
            now_s=self._now_s,
        )
        self._pool = SlabPool(namespace, self._slot_bytes, root, files=self._files, space=self._space, clock=clock)
        self._abandoned: list[_Claim] = []
        self._closed = False

    @property
    def evicted_frames(self) -> int:
        """Frames that this process removed to make room."""
        return self._space.evicted_frames

    @property
    def uses_direct_io(self) -> bool:
        """Whether transfers bypass the page cache; known once prepared."""
        return self._files.direct

    def prepare(self, deadline: float) -> None:
        self._check(deadline)
        self._pool.writable(deadline)

    def contains(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        self._check(deadline)
        pool = self._pool.readable(deadline)
        if pool is None or not keys:
            return [False] * len(keys)
        index = pool.index
        slots = index.find(fingerprints(keys, self._words))
        live = (slots >= 0) & (index.state.take(slots, mode="wrap") == LIVE)
        if self._ttl_seconds is not None:
            live &= index.used_s.take(slots, mode="wrap").astype(np.int64) >= self._now_s() - self._ttl_seconds
        answer: list[bool] = live.tolist()
        return answer

    def load(self, key: bytes, target: memoryview, deadline: float) -> None:
        self._check(deadline)
        pool = self._pool.readable(deadline)
        if pool is None:
            raise TierMiss
        index = pool.index
        fingerprint = fingerprints([key], self._words)
        slot = int(index.find(fingerprint)[0])
        generation = int(index.generation[slot])
        if slot < 0 or not index.holds(slot, fingerprint[0]):  # asked after the generation, so that it is this entry's
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

    def store(self, key: bytes, source: memoryview, deadline: float) -> StoreOutcome:
        self._check(deadline)
        pool = self._pool.writable(deadline)
        try:
            slot = self._find(pool.index, key)
            if slot >= 0 and pool.index.state[slot] == LIVE and not self._expired(pool.index, slot):
                pool.index.note_hit(slot, self._now_s())
                return StoreOutcome.PRESENT
            header = build_header(
                self._digest, key, source, created_ms=int(self._wall_clock() * 1000), header_bytes=PAGE_BYTES
            )
            claim = self._claim(key, deadline)
        except OSError as error:
            raise tier_error(error, f"{self._folder}: making room for a frame") from error
        if claim is None:
            return StoreOutcome.PRESENT
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
            raise tier_error(error, f"{self._folder}: writing a frame") from error
        except BaseException:
            self._give_up(claim, deadline)
            raise
        self._publish(claim, deadline)
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

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._pool.close()

    # --- storing ------------------------------------------------------------------------------------------------------

    def _claim(self, key: bytes, deadline: float) -> _Claim | None:
        """A slot to write to; None when the key is there, or being written by someone alive."""
        fingerprint = fingerprints([key], self._words)
        tenant = 0 if self._tenant_of is None else int.from_bytes(self._tenant_of(key)[:8], "little")
        with self._locked(deadline) as pool:
            index = pool.index
            if self._space.keep_house(pool):
                self._pool.take_back_from_the_dead(index)
            slot = int(index.find(fingerprint)[0])
            if slot >= 0:
                if index.state[slot] == LIVE and not self._expired(index, slot):
                    return None
                if index.state[slot] == WRITING and self._pool.badge.is_alive(int(index.owner[slot])):
                    return None
                index.release(slot)
            slot = self._slot_for(pool, tenant)
            generation = index.claim(
                slot,
                fingerprint[0],
                namespace=int(self._words[0]),
                tenant=tenant,
                owner=self._pool.badge.number,
                now_s=self._now_s(),
            )
            return _Claim(pool, slot, generation, int(index.chunk_epoch[index.shape.chunk_of(slot)]))

    def _slot_for(self, pool: Pool, tenant: int) -> int:
        """A FREE slot, by whatever it takes. Under the lock."""
        index = pool.index
        victim: int | None
        if tenant and self._tenant_max_bytes is not None:
            held = int(np.count_nonzero((index.state != FREE) & (index.tenant == np.uint64(tenant))))
            if (held + 1) * self._slot_bytes > self._tenant_max_bytes:
                victim = tenant_victim(index.queues, index.tenant, tenant)
                if victim is None:
                    raise TierRefused(
                        RefusedReason.NO_SPACE,
                        f"tenant_max_bytes: {self._tenant_max_bytes} holds no frame of {self._slot_bytes} bytes",
                    )
                self._space.evict(index, victim)
                return victim
        slot = index.free_slot()
        if slot is None and self._space.may_grow() and self._space.grow(pool):
            slot = index.free_slot()
        if slot is not None:
            return slot
        victim = index.victim()
        if victim is None:
            self._pool.take_back_from_the_dead(index)
            slot = index.free_slot()
            if slot is not None:
                return slot
            raise TierRefused(
                RefusedReason.NO_SPACE,
                f"max_bytes: {self._max_bytes} leaves no slot of {self._slot_bytes} bytes that is not being written; "
                f"raise max_bytes or free space",
            )
        self._space.evict(index, victim)
        return victim

    def _publish(self, claim: _Claim, deadline: float) -> None:
        """Let readers have a written slot. A claim that is no longer ours (its chunk was dropped) is let go."""
        try:
            with self._locked(deadline) as pool:
                if self._is_ours(pool.index, claim):
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
            and int(index.owner[slot]) == self._pool.badge.number
        )

    # --- small things -------------------------------------------------------------------------------------------------

    def _find(self, index: SlabIndex, key: bytes) -> int:
        return int(index.find(fingerprints([key], self._words))[0])

    def _expired(self, index: SlabIndex, slot: int) -> bool:
        return self._ttl_seconds is not None and int(index.used_s[slot]) < self._now_s() - self._ttl_seconds

    def _now_s(self) -> int:
        return max(0, min(int(self._wall_clock()), (1 << 32) - 1))

    def _check(self, deadline: float) -> None:
        if self._closed:
            raise TierRefused(RefusedReason.CLOSED, f"{self._root}: the tier is closed")
        if self._clock() >= deadline:
            raise TierTimeout(f"{self._root}: the deadline passed before the operation began")
