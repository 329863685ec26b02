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
    """The result of a store.

    Attributes:
        STORED: This call wrote the entry.
        PRESENT: The tier had an entry of that key already. Its age was renewed.
        PENDING: Another running writer is writing the entry and may still fail.
        NOT_ADMITTED: See SessionTier.store_of_session.
    """

    STORED = "stored"
    PRESENT = "present"
    PENDING = "pending"
    NOT_ADMITTED = "not admitted"


class EvictionReason(StrEnum):
    """The reason for which an intact frame was removed."""

    ROOM = "room"  # other frames needed space, within max_bytes or the file system share
    TENANT = "tenant"  # the same tenant's next frame needed space within its quota
    TTL = "ttl"  # it had not been used for ttl_seconds


@dataclass(frozen=True, slots=True)
class BlockInMemory:
    """A block of a tier whose bytes are in this node's memory, so that a load waits for nothing.

    Attributes:
        copy_to: Copies the payload into its argument (see :meth:`Tier.load`) and verifies it there, in a few
            milliseconds. Returns False if the block is not in memory any more or does not verify. The target's contents
            are then undefined, and :meth:`Tier.load` raises the reason.
    """

    copy_to: Callable[[memoryview], bool]


class Tier(Protocol):
    """A blocking store of fixed-size payloads by key, within one namespace.

    Methods with a ``deadline``, and ``close``, may block. They are called from several worker threads at once, never
    from the scheduler thread. All other methods answer from memory without waiting, on any thread, the scheduler's
    included. A key has 1 to 64 bytes. ``deadline`` is a point on the tier's clock. An operation that passes it raises
    TierTimeout as soon as it can; a thread that is blocked in the kernel raises late, which callers must expect.
    Failures are TierError, see errors.py. ``testing.tier_contract`` is the test suite of this contract.
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
        """8 bytes that identify the store: equal in all processes whose entries this tier can read, different in all
        others (see namespace.py). None before the store has been prepared, or if the store has no name."""
        ...

    @property
    def evictions(self) -> Mapping[EvictionReason, int]:
        """The number of intact frames that this process has removed, by reason. Reasons without a frame may be absent.

        Evictions by the server itself are not included.
        """
        ...

    @property
    def quarantined(self) -> Mapping[str, int]:
        """The number of damaged files that this process has renamed and replaced, by reason. Empty without files."""
        ...

    @property
    def under_pressure(self) -> bool:
        """Whether the tier recently evicted or refused frames because it was full, so that a store costs another frame.

        The tier defines "recently". Always False in a tier that cannot tell.
        """
        ...

    @property
    def has_local_index(self) -> bool:
        """Whether :meth:`contains_now` can ever answer. Constant: callers may read it once."""
        ...

    @property
    def renews(self) -> bool:
        """Whether :meth:`renew` makes an entry stay. Constant. If False, no entry of the tier counts as held."""
        ...

    def contains_now(self, keys: Sequence[bytes]) -> list[bool] | None:
        """Answer as :meth:`contains` does, but from memory only. Returns None if the tier cannot answer now.

        This method may see changes of other processes a moment later than ``contains`` does.
        """
        ...

    def prepare(self, deadline: float) -> None:
        """Make the store ready and compare the stored namespace document with this one.

        Called at start so that misconfiguration is reported early; every other operation calls it until it succeeds.

        Raises:
            TierRefused, TierUnreachable, TierTimeout: The tier stays usable and tries again.
        """
        ...

    def contains(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """Return for each of ``keys`` whether the tier has it now, as a hint: it may be evicted or damaged later.

        Raises:
            TierPartlyAsked: This process may not ask for all of them in time.
        """
        ...

    def load(self, key: bytes, target: memoryview, deadline: float) -> None:
        """Read the payload into ``target``, verify it there, and renew the entry's age.

        Args:
            target: Writable, flat, exactly ``payload_bytes`` long; page aligned for speed. Its contents are undefined
                if this raises, so no other thread may read it meanwhile.

        Raises:
            TierMiss, TierCorrupt (the caller then discards), TierRefused, TierUnreachable, TierTimeout.
        """
        ...

    def in_memory(self, key: bytes, deadline: float) -> BlockInMemory | None:
        """Return the block if it can be copied from memory now, and renew its age. May block.

        Returns:
            None: call :meth:`load` instead.

        Raises:
            The errors of :meth:`load` except TierCorrupt.
        """
        ...

    def store(self, key: bytes, source: memoryview, deadline: float, tenant: bytes = NO_TENANT) -> StoreOutcome:
        """Write a frame around ``source`` unless the tier has the key already. Readers see the whole frame or none.

        Args:
            source: Flat, ``payload_bytes`` long.
            tenant: 8 bytes, written into the frame and counted against the tenant's quota if the tier has one. Reading
                needs only the key, which contains the tenant's salt.

        Raises:
            TierRefused, TierUnreachable, TierTimeout.
        """
        ...

    def renew(self, keys: Sequence[bytes], deadline: float, tenant: bytes = NO_TENANT) -> None:
        """Renew the age of those of ``keys`` that the tier has, as a load of each does, without reading them.

        A store that accepts no writes renews nothing. Raises TierError.

        Args:
            tenant: The tenant of all ``keys``, as they were stored.
        """
        ...

    def discard(self, key: bytes, deadline: float) -> None:
        """Remove an entry that load has proven corrupt. An absent key is not an error."""
        ...

    def resident_bytes(self, deadline: float) -> int:
        """Return the bytes that the store holds in all namespaces, or, if only a listing could sum them up, those that
        this process has stored. Checks that the store answers. Raises TierError."""
        ...

    def close(self) -> None:
        """Release files, sockets and threads. Operations in other threads fail soon. May be called twice."""
        ...


@runtime_checkable
class BorrowingTier(Tier, Protocol):
    """A tier that moves blocks in pieces, so that it needs their memory only while a piece is copied.

    Both methods use borrowed memory of ``payload_bytes`` and raise TierRefused(CLOSED) if it was taken back.
    """

    @property
    def transfers_at_once(self) -> int | None:
        """The number of blocks that the tier moves at a time; further threads would only wait. None: no limit.

        Constant."""
        ...

    def receive(self, key: bytes, borrow: Borrow, deadline: float) -> None:
        """Load as :meth:`load` does. The contents of the memory are valid only after this returns."""
        ...

    def send(self, key: bytes, borrow: Borrow, deadline: float, tenant: bytes = NO_TENANT) -> StoreOutcome:
        """Store as :meth:`store` does. Nothing may write to the memory before this ends or the memory is taken back."""
        ...


@runtime_checkable
class ReceivingTier(Tier, Protocol):
    """A tier that counts the bytes of loads while they arrive."""

    @property
    def received_bytes(self) -> int | None:
        """The bytes that loads have received since the start, including loads that failed later. The number never
        decreases. None: the tier cannot tell."""
        ...


@runtime_checkable
class BilledTier(Tier, Protocol):
    """A tier in a store that charges for each request."""

    @property
    def requests(self) -> Mapping[str, int]:
        """The number of requests since the start, by kind: put, get, head, delete."""
        ...


@runtime_checkable
class PeekableTier(Tier, Protocol):
    """A tier that can read an entry without counting this as a use, so that a copy of it does not keep it."""

    def peek(self, key: bytes, target: memoryview, deadline: float) -> None:
        """Load as :meth:`load` does, without renewing the entry's age: the tier's next evictions stay the same."""
        ...


@runtime_checkable
class SessionTier(Tier, Protocol):
    """A tier whose order of eviction follows sessions. Each use is a hint: if one is lost, that costs hits only."""

    def use_session(self, use: SessionUse) -> None:
        """Note that a request of a session uses chunks, whether the tier has them or not. The call only records it in
        memory, without waiting; the tier applies it later."""
        ...

    def store_of_session(
        self, key: bytes, source: memoryview, deadline: float, tenant: bytes, session: bytes, *, own_room: bool
    ) -> StoreOutcome:
        """Store a chunk of a session (SessionUse.session) as :meth:`store` does.

        Args:
            own_room: If the tier is full, replace only a chunk of the same tenant that is used later; NOT_ADMITTED if
                there is none.
        """
        ...


class WrappedTier:
    """Passes the methods of :class:`Tier` on to ``tier``; subclasses implement load and store.

    Args:
        payload_bytes: The size of this tier's payloads, which may differ from the wrapped tier's.
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
