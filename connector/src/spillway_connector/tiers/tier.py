"""The contract of a shared tier."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Protocol, runtime_checkable

from spillway_connector.plan.sessions import SessionUse
from spillway_connector.tiers.borrow import Borrow

Clock = Callable[[], float]
"""Monotonic seconds. All deadlines are points on this clock."""

WallClock = Callable[[], float]
"""Seconds since the epoch. Recorded in frames, never compared with a deadline."""


TENANT_BYTES = 8
NO_TENANT = bytes(TENANT_BYTES)
"""The tenant of blocks that were computed without a cache salt. Others: the first 8 bytes of the salt's blake3."""


class StoreOutcome(Enum):
    """STORED: written by this call. PRESENT: an entry of that key was there already, and its age was renewed.

    PENDING: another running writer is writing it and may still fail. NOT_ADMITTED: see SessionTier.store_of_session.
    """

    STORED = "stored"
    PRESENT = "present"
    PENDING = "pending"
    NOT_ADMITTED = "not admitted"


class EvictionReason(StrEnum):
    """Why an intact frame was removed."""

    ROOM = "room"  # for other frames, within max_bytes or the file system share
    TENANT = "tenant"  # for the same tenant's next frame, within its quota
    TTL = "ttl"  # it had not been used for ttl_seconds


@dataclass(frozen=True, slots=True)
class BlockInMemory:
    """A block of a tier whose bytes are in this node's memory, so that loading it waits for nothing.

    Attributes:
        copy_to: Copies the payload into its argument (see :meth:`Tier.load`) and verifies it there, in a few
            milliseconds. False: it is not in memory any more, or does not verify; the target is undefined then, and
            load has to say why.
    """

    copy_to: Callable[[memoryview], bool]


class Tier(Protocol):
    """A blocking store of fixed-size payloads by key, within one namespace.

    Methods with a ``deadline`` may block and are called from several worker threads at once, never from the scheduler
    thread; so is ``close``. Everything else answers from memory without waiting, on any thread, the scheduler's
    included. A key has 1 to 64 bytes. ``deadline`` is a point on the tier's clock; an operation that passes it raises
    TierTimeout as soon as it can (a thread blocked in the kernel raises late: its caller must be prepared). Failures
    are TierError, see errors.py. ``testing.tier_contract`` is the test suite of this contract.
    """

    @property
    def name(self) -> str:
        """The tier's metric label: "nvme", "redis", "s3", "memory"."""
        ...

    @property
    def payload_bytes(self) -> int:
        """The size of every payload of this namespace."""
        ...

    @property
    def store_id(self) -> bytes | None:
        """8 bytes that are the same in every process whose entries this tier can read, and in no other; see
        namespace.py. None until the store has been prepared, or if it has no name."""
        ...

    @property
    def evictions(self) -> Mapping[EvictionReason, int]:
        """Intact frames that this process removed since it started, by reason; reasons without a frame may be absent.

        Evictions that a server makes by itself are not included.
        """
        ...

    @property
    def quarantined(self) -> Mapping[str, int]:
        """Damaged files that this process renamed and replaced, by reason. Empty if a store has none."""
        ...

    @property
    def under_pressure(self) -> bool:
        """Whether frames were evicted or refused for want of room a moment ago, so that a store costs another frame.

        The tier defines the moment. Always False in a tier that cannot tell.
        """
        ...

    @property
    def has_local_index(self) -> bool:
        """Whether :meth:`contains_now` can ever answer. Constant: callers may read it once."""
        ...

    @property
    def renews(self) -> bool:
        """Whether :meth:`renew` makes an entry stay. Constant. False: nothing counts as held there."""
        ...

    def contains_now(self, keys: Sequence[bytes]) -> list[bool] | None:
        """The answer of :meth:`contains` from memory alone. None if it cannot be given now.

        Changes of other processes may be seen a moment later than by ``contains``.
        """
        ...

    def prepare(self, deadline: float) -> None:
        """Make the store ready and compare the stored namespace document with this one.

        Called at start so that misconfiguration is reported early; every other operation calls it until it succeeds.
        Raises TierRefused, TierUnreachable or TierTimeout; the tier stays usable and tries again.
        """
        ...

    def contains(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """Which of ``keys`` are there now, in the same order. A hint: the entry may be evicted or damaged later.

        Raises TierPartlyAsked if this process may not ask for all of them in time.
        """
        ...

    def load(self, key: bytes, target: memoryview, deadline: float) -> None:
        """Read the payload into ``target`` and verify it there; renews the entry's age.

        target: writable, flat, exactly ``payload_bytes`` long; page aligned if it is to be fast. Its contents are
        undefined when this raises, so no other thread may read it meanwhile.
        Raises TierMiss, TierCorrupt (the caller then discards), TierRefused, TierUnreachable, TierTimeout.
        """
        ...

    def in_memory(self, key: bytes, deadline: float) -> BlockInMemory | None:
        """The block, if it can be copied from memory now; None: :meth:`load` it. Renews the entry's age. May block.

        Raises what load raises, but TierCorrupt.
        """
        ...

    def store(self, key: bytes, source: memoryview, deadline: float, tenant: bytes = NO_TENANT) -> StoreOutcome:
        """Write a frame around ``source`` (flat, ``payload_bytes`` long) unless the key is there already.

        All or nothing: readers never see a part. tenant: 8 bytes, written into the frame and counted against the
        tenant's quota if the tier has one. Reading needs the key alone, which contains the tenant's salt.
        Raises TierRefused, TierUnreachable, TierTimeout.
        """
        ...

    def renew(self, keys: Sequence[bytes], deadline: float, tenant: bytes = NO_TENANT) -> None:
        """Renew the age of those of ``keys`` that are there, as a load of each does, without reading them.

        tenant: of all of them, as they were stored. A store that takes no writes renews nothing. Raises TierError.
        """
        ...

    def discard(self, key: bytes, deadline: float) -> None:
        """Remove an entry that load has proven corrupt. A key that is not there is not an error."""
        ...

    def resident_bytes(self, deadline: float) -> int:
        """Bytes that the store holds, all namespaces together, or what this process has stored if only a listing could
        sum them up. Asks the store whether it answers. Raises TierError."""
        ...

    def close(self) -> None:
        """Release files, sockets and threads. Operations in other threads fail soon. May be called twice."""
        ...


@runtime_checkable
class BorrowingTier(Tier, Protocol):
    """A tier that moves blocks in pieces, so that it needs their memory only while a piece is copied.

    Both methods take borrowed memory of ``payload_bytes`` and raise TierRefused(CLOSED) if it was taken back.
    """

    @property
    def transfers_at_once(self) -> int | None:
        """How many blocks it moves at a time; a further thread would only wait. None: as many as there are threads.

        Constant."""
        ...

    def receive(self, key: bytes, borrow: Borrow, deadline: float) -> None:
        """What :meth:`load` does. The contents of the memory are valid only after this returns."""
        ...

    def send(self, key: bytes, borrow: Borrow, deadline: float, tenant: bytes = NO_TENANT) -> StoreOutcome:
        """What :meth:`store` does. Nothing may write to the memory before this ends or the memory is taken back."""
        ...


@runtime_checkable
class ReceivingTier(Tier, Protocol):
    """A tier that can tell what has arrived of loads that have not ended."""

    @property
    def received_bytes(self) -> int | None:
        """The bytes that loads have received since the start, including loads that failed later. The number never
        falls. None: it cannot tell."""
        ...


@runtime_checkable
class BilledTier(Tier, Protocol):
    """A tier in a store whose every request costs money."""

    @property
    def requests(self) -> Mapping[str, int]:
        """Requests since the start, by kind: put, get, head, delete."""
        ...


@runtime_checkable
class PeekableTier(Tier, Protocol):
    """A tier whose entries can be read without being used, so that a copy of them does not make them stay."""

    def peek(self, key: bytes, target: memoryview, deadline: float) -> None:
        """What :meth:`load` does, without renewing the entry's age: what it would evict next stays the same."""
        ...


@runtime_checkable
class SessionTier(Tier, Protocol):
    """A tier whose order of eviction follows sessions. What it learns is a hint: one that is lost costs hits."""

    def use_session(self, use: SessionUse) -> None:
        """A request of a session uses chunks, in the tier or not. The call only notes it in memory and does not wait;
        the tier takes it in later."""
        ...

    def store_of_session(
        self, key: bytes, source: memoryview, deadline: float, tenant: bytes, session: bytes, *, own_room: bool
    ) -> StoreOutcome:
        """What :meth:`store` does, for a chunk of a session (SessionUse.session).

        own_room: if room is short, only in place of a chunk of the same tenant that is used later; NOT_ADMITTED
        if there is none.
        """
        ...


class WrappedTier:
    """Passes what :class:`Tier` says on to ``tier``; subclasses load and store.

    payload_bytes: of this tier, which may be others than the wrapped one's.
    """

    def __init__(self, tier: Tier, payload_bytes: int) -> None:
        self.tier = tier
        self.payload_bytes = payload_bytes

    @property
    def name(self) -> str:
        return self.tier.name

    @property
    def store_id(self) -> bytes | None:
        return self.tier.store_id

    @property
    def evictions(self) -> Mapping[EvictionReason, int]:
        return self.tier.evictions

    @property
    def quarantined(self) -> Mapping[str, int]:
        return self.tier.quarantined

    @property
    def under_pressure(self) -> bool:
        return self.tier.under_pressure

    @property
    def has_local_index(self) -> bool:
        return self.tier.has_local_index

    @property
    def renews(self) -> bool:
        return self.tier.renews

    def contains_now(self, keys: Sequence[bytes]) -> list[bool] | None:
        return self.tier.contains_now(keys)

    def prepare(self, deadline: float) -> None:
        self.tier.prepare(deadline)

    def contains(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        return self.tier.contains(keys, deadline)

    def renew(self, keys: Sequence[bytes], deadline: float, tenant: bytes = NO_TENANT) -> None:
        self.tier.renew(keys, deadline, tenant)

    def discard(self, key: bytes, deadline: float) -> None:
        self.tier.discard(key, deadline)

    def resident_bytes(self, deadline: float) -> int:
        return self.tier.resident_bytes(deadline)

    def close(self) -> None:
        self.tier.close()
