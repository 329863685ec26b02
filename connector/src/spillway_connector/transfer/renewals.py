"""Keeps in a shared tier what clients asked to retain: the engine renews its age again and again until its time.

Every engine and every server evicts by use in some way, so all of them keep an entry that is renewed once in
RENEW_SECONDS, without a mark in the store. An engine that dies renews nothing any more. The bounds of each engine are
those of plan/holds.py, applied to what the store has room for.

The scheduler's thread makes holds, and the lookup thread renews.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Sequence

from spillway_connector.plan.holds import Holds
from spillway_connector.tiers.tier import Clock, Tier

RENEW_SECONDS = 30.0
PAGE_KEYS = 256  # renewed at once, between two lookups
PAGES_MAX = 4096  # waiting; of more the oldest have their next turn


class Renewals:
    """The retained chunks of one engine in one tier."""

    def __init__(self, tier: Tier, clock: Clock) -> None:
        self._tier = tier
        self._clock = clock
        self._lock = threading.Lock()
        self._holds: Holds[bytes] = Holds(0)
        self._pages: deque[tuple[bytes, Sequence[bytes]]] = deque(maxlen=PAGES_MAX)  # to be renewed
        self._due_at = clock() + RENEW_SECONDS

    def __len__(self) -> int:
        """Chunks that are held, in the tier or not."""
        with self._lock:
            self._holds.expire(self._clock())
            return len(self._holds)

    def hold(
        self, tenant: bytes, share: float, seconds: float, keys: Sequence[bytes], *, room_bytes: int, chunk_bytes: int
    ) -> None:
        """room_bytes: The room of the store, if it is known. Nothing is held if a renewal keeps nothing there."""
        if not self._tier.renews:
            return
        with self._lock:
            now = self._clock()
            self._holds.resize(room_bytes // chunk_bytes, now)
            self._holds.hold(tenant, share, seconds, keys, now)
            held = self._holds.held_of(keys, now)
        self._add(tenant, [key for key in keys if key in held])  # at once: its session may end

    def held_of(self, keys: Collection[bytes]) -> set[bytes]:
        """Return those of the keys that are held."""
        with self._lock:
            return self._holds.held_of(keys, self._clock())

    def clear(self) -> None:
        """The held chunks are useless from now on."""
        with self._lock:
            self._holds.clear()

    @property
    def waiting(self) -> bool:
        """Whether :meth:`renew_page` has more to do."""
        if not self._pages and self._clock() >= self._due_at:
            self._due_at = self._clock() + RENEW_SECONDS
            with self._lock:
                held = list(self._holds.by_tenant(self._clock()))
            for tenant, keys in held:
                self._add(tenant, keys)
        return bool(self._pages)

    def _add(self, tenant: bytes, keys: Sequence[bytes]) -> None:
        self._pages.extend((tenant, keys[at : at + PAGE_KEYS]) for at in range(0, len(keys), PAGE_KEYS))

    def renew_page(self, deadline: float) -> None:
        """Raises TierError; the rest is then renewed in its next turn."""
        tenant, keys = self._pages.popleft()
        try:
            self._tier.renew(keys, deadline, tenant)
        except BaseException:
            self._pages.clear()
            raise
