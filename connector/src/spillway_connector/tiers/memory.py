"""The reference tier: frames in a dictionary. It shows the contract in the fewest lines and serves tests."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence

from spillway_connector.errors import RefusedReason, TierMiss, TierRefused, TierTimeout
from spillway_connector.namespace import Namespace, explain_difference, store_id_of
from spillway_connector.tiers.frame import HEADER_BYTES, build_header, verify
from spillway_connector.tiers.tier import NO_TENANT, BlockInMemory, Clock, EvictionReason, StoreOutcome, WallClock

PRESSURE_SECONDS = 5.0  # how long an eviction or a refusal for want of room counts as pressure


class MemoryStore:
    """The medium that memory tiers share. ``max_bytes`` bounds the frames; the least recently used are evicted."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.frames: OrderedDict[tuple[bytes, bytes], bytearray] = OrderedDict()
        self.documents: dict[bytes, bytes] = {}
        self.lock = threading.Lock()
        self.place = os.urandom(16)

    def used_bytes(self) -> int:
        return sum(len(frame) for frame in self.frames.values())


class MemoryTier:
    """A tier over a MemoryStore. See tier.Tier for the contract."""

    name = "memory"
    has_local_index = False  # as of most stores: lookups then run on a separate thread
    renews = True

    def __init__(
        self,
        namespace: Namespace,
        payload_bytes: int,
        store: MemoryStore,
        *,
        clock: Clock = time.monotonic,
        wall_clock: WallClock = time.time,
    ) -> None:
        self.payload_bytes = payload_bytes
        self.medium = store
        self._namespace = namespace
        self._digest = namespace.digest16
        self._clock = clock
        self._wall_clock = wall_clock
        self._closed = False
        self._pressed_until = float("-inf")
        self._evictions: Counter[EvictionReason] = Counter()

    @property
    def store_id(self) -> bytes | None:
        return store_id_of(self.medium.place, self._digest)

    @property
    def evictions(self) -> Mapping[EvictionReason, int]:
        return self._evictions

    @property
    def quarantined(self) -> Mapping[str, int]:
        return {}

    @property
    def under_pressure(self) -> bool:
        return self._clock() < self._pressed_until

    def contains_now(self, keys: Sequence[bytes]) -> list[bool] | None:
        return None

    def prepare(self, deadline: float) -> None:
        self._check(deadline)
        with self.medium.lock:
            stored = self.medium.documents.setdefault(self._digest, self._namespace.document)
        if stored != self._namespace.document:
            raise TierRefused(
                RefusedReason.NAMESPACE,
                f"namespace {self._namespace.hex} holds blocks of another layout: "
                f"{explain_difference(self._namespace.document, stored)}",
            )

    def contains(self, keys: Sequence[bytes], deadline: float) -> list[bool]:
        self.prepare(deadline)
        with self.medium.lock:
            return [(self._digest, key) in self.medium.frames for key in keys]

    def load(self, key: bytes, target: memoryview, deadline: float) -> None:
        self.peek(key, target, deadline)
        self.renew([key], deadline)

    def peek(self, key: bytes, target: memoryview, deadline: float) -> None:
        self.prepare(deadline)
        with self.medium.lock:
            frame = self.medium.frames.get((self._digest, key))
            if frame is None:
                raise TierMiss
        payload = memoryview(frame)[HEADER_BYTES:]
        verify(
            memoryview(frame)[:HEADER_BYTES],
            payload,
            namespace=self._digest,
            key=key,
            payload_bytes=self.payload_bytes,
        )
        target[:] = payload

    def in_memory(self, key: bytes, deadline: float) -> BlockInMemory | None:
        """Return None: the medium stands in for something slower."""
        return None

    def store(self, key: bytes, source: memoryview, deadline: float, tenant: bytes = NO_TENANT) -> StoreOutcome:
        self.prepare(deadline)
        header = build_header(self._digest, key, source, created_ms=int(self._wall_clock() * 1000), tenant=tenant)
        frame = bytearray(header + source)
        with self.medium.lock:
            frames = self.medium.frames
            if (self._digest, key) in frames:
                frames.move_to_end((self._digest, key))
                return StoreOutcome.PRESENT
            if self.medium.used_bytes() + len(frame) > self.medium.max_bytes:
                self._pressed_until = self._clock() + PRESSURE_SECONDS
            if len(frame) > self.medium.max_bytes:
                raise TierRefused(
                    RefusedReason.NO_SPACE, f"max_bytes: {self.medium.max_bytes} holds no frame of {len(frame)} bytes"
                )
            while self.medium.used_bytes() + len(frame) > self.medium.max_bytes:
                frames.popitem(last=False)
                self._evictions[EvictionReason.ROOM] += 1
            frames[(self._digest, key)] = frame
        return StoreOutcome.STORED

    def renew(self, keys: Sequence[bytes], deadline: float, tenant: bytes = NO_TENANT) -> None:
        self.prepare(deadline)
        with self.medium.lock:
            for key in keys:
                if (self._digest, key) in self.medium.frames:
                    self.medium.frames.move_to_end((self._digest, key))

    def discard(self, key: bytes, deadline: float) -> None:
        self._check(deadline)
        with self.medium.lock:
            self.medium.frames.pop((self._digest, key), None)

    def resident_bytes(self, deadline: float) -> int:
        self._check(deadline)
        with self.medium.lock:
            return self.medium.used_bytes()

    def close(self) -> None:
        self._closed = True

    def _check(self, deadline: float) -> None:
        if self._closed:
            raise TierRefused(RefusedReason.CLOSED, "the tier is closed")
        if self._clock() >= deadline:
            raise TierTimeout("the deadline passed before the operation began")
