"""Claims on slots: how a store gets a slot, and publishes or returns it.

A claimed slot is WRITING in the index until its frame is published or the claim is given up. If a writer was killed,
another process releases its claim (OpenSizeClass.release_orphaned). If this process could not end a claim in time, its
next holder of the root's lock releases it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from spillway_connector.errors import RefusedReason, TierError, TierRefused
from spillway_connector.tiers.disk.io import tier_error
from spillway_connector.tiers.disk.slab.index import SlabIndex
from spillway_connector.tiers.disk.slab.policy import LIVE, WRITING
from spillway_connector.tiers.disk.slab.quota import make_tenant_room, oldest_of
from spillway_connector.tiers.disk.slab.session_file import SizeClassSessions
from spillway_connector.tiers.disk.slab.session_order import SessionOrder
from spillway_connector.tiers.disk.slab.size_class import OpenSizeClass
from spillway_connector.tiers.disk.slab.space import SizeClass, SlabSpace, size_class_folders
from spillway_connector.tiers.tier import StoreOutcome


@dataclass(frozen=True, slots=True)
class Claim:
    """A slot of ``size_class`` that this process may write to. generation: of the slot; it changes with the next
    claim."""

    size_class: SizeClass
    slot: int
    generation: int
    epoch: int


class SessionChunk(NamedTuple):
    """The session of a store, and whether it may take the room of its own tenant alone. See tier.SessionTier."""

    session: bytes
    own_room: bool


class _Room(NamedTuple):
    """The state that decides which entry leaves for a store: the sessions' order, the store's own row, and own_room."""

    order: SessionOrder | None
    row: int | None
    own: bool


class SlotClaims:
    """The claims of this process in the size class at ``folder``. Safe from several threads.

    max_bytes: as configured, for messages. tenant_max_bytes: the quota of each tenant; None for none.
    now_s: the clock of the entries' ages. sessions: of the same size class.
    """

    def __init__(
        self,
        root: Path,
        folder: Path,
        size_class: OpenSizeClass,
        space: SlabSpace,
        *,
        max_bytes: int | None,
        tenant_max_bytes: int | None,
        ttl_seconds: float | None,
        now_s: Callable[[], int],
        sessions: SizeClassSessions,
    ) -> None:
        self._root = root
        self._folder = folder
        self._size_class = size_class
        self._space = space
        self._max_bytes = max_bytes
        self._tenant_max_bytes = tenant_max_bytes
        self._ttl_seconds = ttl_seconds
        self._now_s = now_s
        self._sessions = sessions
        self._unfinished: list[Claim] = []

    def claim(
        self,
        fingerprint: tuple[int, int],
        namespace: int,
        tenant: int,
        deadline: float,
        chunk: SessionChunk | None = None,
    ) -> Claim | StoreOutcome:
        """Return a slot to write to; PRESENT if the key is there, PENDING while another running writer is writing it.

        namespace, tenant: the words that the index keeps of them. chunk: of a session. Raises TierError, OSError.
        """
        with self.locked(deadline) as size_class:
            index = size_class.index
            self._size_class.maintain(size_class)
            slot = index.find_one(fingerprint)
            if slot >= 0:
                if index.state[slot] == LIVE and not self.expired(index, slot):
                    return StoreOutcome.PRESENT
                if index.state[slot] == WRITING and self._size_class.lease.is_held(int(index.owner[slot])):
                    return StoreOutcome.PENDING
                if index.state[slot] == LIVE:
                    self._space.expire(index, slot)
                else:
                    index.release(slot)
            order = self._sessions.order(size_class)
            row = None if order is None or chunk is None else self._sessions.row(order, tenant, chunk.session)
            room = _Room(order, row, chunk is not None and chunk.own_room)
            found = self._slot_for(size_class, tenant, room)
            if found is None:
                return StoreOutcome.NOT_ADMITTED
            slot = found
            generation = index.claim(
                slot,
                fingerprint,
                namespace=namespace,
                tenant=tenant,
                owner=self._size_class.lease.number,
                now_s=self._now_s(),
            )
            size_class.chunks.headers.clear(slot)
            self._sessions.claimed(room.order, room.row, slot)
            return Claim(size_class, slot, generation, int(index.chunk_epoch[index.shape.chunk_of(slot)]))

    def publish(self, claim: Claim, header: bytes, deadline: float) -> None:
        """Make a written slot LIVE. A claim that was lost meanwhile (its chunk was dropped) is ignored.

        Raises TierError; the claim is then released later.
        """
        try:
            with self.locked(deadline) as size_class:
                if self._is_ours(size_class.index, claim):
                    size_class.chunks.headers.put(claim.slot, header)
                    size_class.index.publish(claim.slot)
        except OSError as error:
            self._unfinished.append(claim)
            raise tier_error(error, f"{self._folder}: publishing a frame") from error
        except TierError:
            self._unfinished.append(claim)
            raise

    def give_up(self, claim: Claim, deadline: float) -> None:
        """Release the slot of a write that failed. Raises nothing: the failure of the write is the one to report."""
        self._unfinished.append(claim)
        try:
            with self.locked(deadline):
                pass  # which releases it
        except (TierError, OSError):
            pass  # the next holder of the lock in this process releases it

    @contextmanager
    def locked(self, deadline: float) -> Iterator[SizeClass]:
        """Hold the root's lock, after releasing unfinished claims. Raises TierError, OSError."""
        with self._size_class.locked(deadline) as size_class:
            while self._unfinished:
                claim = self._unfinished.pop()
                if self._is_ours(size_class.index, claim):
                    size_class.index.release(claim.slot)
            yield size_class

    def expired(self, index: SlabIndex, slot: int) -> bool:
        """Whether an entry has not been used for ``ttl_seconds``."""
        if self._ttl_seconds is None:
            return False
        oldest_s = self._now_s() - self._ttl_seconds
        # Another process may have used it since, and announces that later.
        return int(index.used_s[slot]) < oldest_s and index.fresh("used_s", slot) < oldest_s

    def _slot_for(self, size_class: SizeClass, tenant: int, room: _Room) -> int | None:
        """Finds a FREE slot: within the tenant's quota, in a new chunk, by an eviction, or from an orphaned claim.
        Under the lock.

        None: the store is not admitted.
        """
        index = size_class.index
        if self._tenant_max_bytes is not None:
            others = [folder for folder in size_class_folders(self._root) if folder != self._folder]
            evicted = make_tenant_room(
                index,
                tenant,
                self._tenant_max_bytes,
                others,
                self._space.evict_of_tenant,
                choose=lambda each, tenant: self._victim_of_tenant(each, tenant, room),
            )
            if evicted is not None:
                return evicted
        slot = index.free_slot()
        if slot is None and self._space.may_grow() and self._space.grow(size_class):
            slot = index.free_slot()
        if slot is not None:
            return slot
        if room.own:
            if room.order is None or room.row is None:
                return None
            victim = room.order.own_room(room.row, self._now_s())
            if victim is None:
                return None
        else:
            victim = self._victim(index, room)
        if victim is not None:
            self._space.evict(index, victim)
            return victim
        self._size_class.release_orphaned(index)
        slot = index.free_slot()
        if slot is not None:
            return slot
        self._space.note_pressure()
        raise TierRefused(
            RefusedReason.NO_SPACE,
            f"max_bytes: {self._max_bytes} leaves no slot of {index.shape.slot_bytes} bytes that is not being written; "
            f"raise max_bytes or free space",
        )

    def _victim(self, index: SlabIndex, room: _Room) -> int | None:
        """Return the entry that leaves for any other; None if none may."""
        order = room.order
        if order is None:
            return index.victim()
        now_s = self._now_s()
        ended = order.ended_entry(now_s)
        if ended is not None:
            return ended
        victim = index.victim()
        if victim is None:
            return None
        leaving = order.in_place_of(victim, now_s, room.row)
        if leaving != victim:
            index.policy.spare(victim)
        return leaving

    def _victim_of_tenant(self, index: SlabIndex, tenant: int, room: _Room) -> int | None:
        """Return the entry of a tenant that leaves for its next one; None if it has none."""
        order, now_s = room.order, self._now_s()
        ended = None if order is None else order.ended_entry(now_s, tenant)
        if ended is not None:
            return ended
        victim = oldest_of(index, tenant)
        if victim is None or order is None:
            return victim
        leaving = order.in_place_of(victim, now_s, room.row)
        if leaving != victim:
            index.put("used_s", victim, now_s)
        return leaving

    def _is_ours(self, index: SlabIndex, claim: Claim) -> bool:
        slot = claim.slot
        return (
            slot < index.shape.slots
            and index.state[slot] == WRITING
            and int(index.generation[slot]) == claim.generation
            and int(index.owner[slot]) == self._size_class.lease.number
        )
