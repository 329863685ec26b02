"""The base of both layouts of the NVMe tier: a directory, the clock of its entries' ages, and its room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from spillway_connector.errors import RefusedReason, TierRefused, TierTimeout
from spillway_connector.namespace import Namespace, store_id_of
from spillway_connector.tiers.disk.clock import AgeClock
from spillway_connector.tiers.disk.io import FrameFiles
from spillway_connector.tiers.disk.root import NamespaceDocument
from spillway_connector.tiers.disk.shared_bound import SharedBound
from spillway_connector.tiers.disk.store_mark import StoreMark
from spillway_connector.tiers.frame import build_header, verify
from spillway_connector.tiers.tier import Clock, EvictionReason, WallClock

PRESSURE_SECONDS = 5.0  # how long an eviction or refusal for want of room counts as pressure


class DirectorySpace:
    """The bound of a directory, and what was evicted to keep within it. OSError is left to the caller."""

    def __init__(self, root: Path, max_bytes: int | None, clock: Clock) -> None:
        self.evictions: Counter[EvictionReason] = Counter()
        self._root = root
        self.max_bytes = max_bytes
        self._bound = SharedBound(root, max_bytes, clock)
        self._clock = clock
        self._pressed_until = 0.0

    @property
    def under_pressure(self) -> bool:
        """Whether entries were evicted, or refused, for want of room within the last seconds."""
        return self._clock() < self._pressed_until

    def note_pressure(self) -> None:
        self._pressed_until = self._clock() + PRESSURE_SECONDS

    def close(self) -> None:
        self._bound.close()


class DirectoryTier:
    """A layout of the NVMe tier opens its space, its mark and its namespace's document."""

    name = "nvme"
    renews = True
    _space: DirectorySpace
    _mark: StoreMark
    _document: NamespaceDocument

    def __init__(
        self,
        namespace: Namespace,
        payload_bytes: int,
        root: Path,
        *,
        transfers_at_once: int,
        clock: Clock,
        wall_clock: WallClock,
    ) -> None:
        self.payload_bytes = payload_bytes
        self._digest = namespace.digest16
        self._root = root
        self._clock = clock
        self._wall_clock = wall_clock
        self._ages = AgeClock(root, clock, wall_clock)
        self._files = FrameFiles(payload_bytes, transfers_at_once, clock=clock, wall_clock=self._ages.now)
        self._closed = False

    @property
    def uses_direct_io(self) -> bool:
        """Whether transfers bypass the page cache; known once prepared."""
        return self._files.direct

    @property
    def store_id(self) -> bytes | None:
        return None if self._mark.value is None else store_id_of(self._mark.value, self._digest)

    @property
    def evictions(self) -> Mapping[EvictionReason, int]:
        return self._space.evictions

    @property
    def quarantined(self) -> Mapping[str, int]:
        return self._document.quarantined

    @property
    def under_pressure(self) -> bool:
        return self._space.under_pressure

    def _header_of(self, key: bytes, payload: memoryview, tenant: bytes) -> bytes:
        created_ms, header_bytes = int(self._wall_clock() * 1000), self._files.places.header_bytes
        return build_header(self._digest, key, payload, created_ms=created_ms, header_bytes=header_bytes, tenant=tenant)

    def _verify(self, header: bytes | memoryview, payload: memoryview, key: bytes) -> None:
        verify(header, payload, namespace=self._digest, key=key, payload_bytes=self.payload_bytes)

    def _check(self, deadline: float) -> None:
        if self._closed:
            raise TierRefused(RefusedReason.CLOSED, f"{self._root}: the tier is closed")
        if self._clock() >= deadline:
            raise TierTimeout(f"{self._root}: the deadline passed before the operation began")
