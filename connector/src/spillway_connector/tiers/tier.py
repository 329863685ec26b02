"""What a shared tier promises to the threads that use it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol

Clock = Callable[[], float]
"""Monotonic seconds. All deadlines are points on this clock."""

WallClock = Callable[[], float]
"""Seconds since the epoch, only ever written down, never compared with a deadline."""


TENANT_BYTES = 8
NO_TENANT = bytes(TENANT_BYTES)
"""Whose a block is that was computed without a cache salt. Other tenants: the first 8 bytes of the salt's blake3."""


class StoreOutcome(Enum):
    """STORED: written by this call. PRESENT: an entry of that key was there already, and its age was renewed.

    PENDING: another writer, alive, is at it; whether it will be there nobody knows yet.
    """

    STORED = "stored"
    PRESENT = "present"
    PENDING = "pending"


class Tier(Protocol):
    """A blocking store of fixed-size payloads by key, within one namespace.

    Called from several worker threads at once, never from the scheduler thread. A key has 1 to 64 bytes. ``deadline``
    is a point on the tier's clock; an operation that passes it raises TierTimeout as soon as it can notice (a thread
    stuck in the kernel notices late: its caller must be prepared). Failures are TierError, see errors.py.
    """

    @property
    def name(self) -> str:
        """The tier's metric label: "nvme", "redis", "memory"."""
        ...

    @property
    def payload_bytes(self) -> int:
        """The size of every payload of this namespace."""
        ...

    def prepare(self, deadline: float) -> None:
        """Make the store ready and compare the stored namespace document with ours.

        Called at start so that mistakes are said early; every other operation calls it itself until it has succeeded.
        Raises TierRefused or TierUnreachable; the tier stays usable and tries again.
        """
        ...

    def contains(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """Which of ``keys`` are there now, in the same order. A hint: the entry may be gone or damaged later."""
        ...

    def load(self, key: bytes, target: memoryview, deadline: float) -> None:
        """Read the payload into ``target`` and verify it there; renews the entry's age.

        target: writable, flat, exactly ``payload_bytes`` long; page aligned if it is to be fast. Its contents are
        undefined when this raises, so it is never memory that anyone else reads.
        Raises TierMiss, TierCorrupt (the caller then discards), TierRefused, TierUnreachable, TierTimeout.
        """
        ...

    def store(self, key: bytes, source: memoryview, deadline: float, tenant: bytes = NO_TENANT) -> StoreOutcome:
        """Write a frame around ``source`` (flat, ``payload_bytes`` long) unless the key is there already.

        All or nothing: readers never see a part. tenant: 8 bytes, written into the frame and counted against the
        tenant's quota where the tier has one; who may read is decided by the key alone, which the tenant's salt is in.
        Raises TierRefused, TierUnreachable, TierTimeout.
        """
        ...

    def discard(self, key: bytes, deadline: float) -> None:
        """Remove an entry that load has proven corrupt. A key that is not there is not an error."""
        ...

    def resident_bytes(self, deadline: float) -> int:
        """Bytes the store holds, all namespaces together."""
        ...

    def close(self) -> None:
        """Release files, sockets and threads; makes other threads' operations fail soon. Twice is harmless."""
        ...
