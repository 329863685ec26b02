"""Demotions from a shared tier to the one below it, in virtual time, by the connector's own order of idleness.

Rules and constants are those of transfer/demotions.py; a copy takes the store's time on the link of the tier below, and
the load's time on that of the tier above, from which it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from spillway_connector.plan.idle_chunks import IdleChunks
from spillway_connector.tiers.tier import NO_TENANT
from spillway_connector.transfer.demotions import BATCH_CHUNKS, KNOWN_CHUNKS_MAX, PRESSED_SHARE, WAIT_SECONDS
from spillway_settings.values.offload import TierBelow
from spillway_simulator.model.tiering import SharedLevel

IDLE_SECONDS = float(TierBelow().idle_seconds)


class Demotions:
    """Demotions of one engine. begin_store: Tiering's method. lost: blocks that the tier above evicted uncopied."""

    def __init__(
        self,
        above: SharedLevel,
        below: SharedLevel,
        begin_store: Callable[[SharedLevel, Sequence[int], float], None],
        block_tokens: int,
    ) -> None:
        self.next_time: float | None = None  # when to look again
        self.lost = 0
        self._above, self._below = above, below
        self._begin_store, self._block_tokens = begin_store, block_tokens
        self._idle = IdleChunks(KNOWN_CHUNKS_MAX)

    def add(self, keys: Sequence[int], now: float) -> None:
        """Follow blocks that lie in the tier above, or soon will."""
        self._idle.add(cast(Any, keys), NO_TENANT, now)
        if self.next_time is None and keys:
            self.next_time = now + WAIT_SECONDS

    def use(self, keys: Sequence[int], now: float) -> None:
        self._idle.use(cast(Any, keys), now)

    def look(self, now: float) -> None:
        """Begin to copy what is due, if the copies before have ended."""
        if self.next_time is None or now < self.next_time:
            return
        above, below = self._above, self._below
        evicts = len(above.tier) >= above.tier.capacity
        idle_seconds = IDLE_SECONDS * (PRESSED_SHARE if evicts else 1.0)
        due = [cast(int, chunk.key) for chunk in self._idle.take(now - idle_seconds, BATCH_CHUNKS)]
        absent = [key for key in due if key not in below.tier]
        copied = [key for key in absent if key in above.tier]
        on_their_way = {key for store in above.stores for key in store.keys}
        self._idle.add(cast(Any, [key for key in absent if key in on_their_way]), NO_TENANT, now)
        self.lost += len(absent) - len(copied) - len(on_their_way.intersection(absent))
        if copied:
            seconds = len(copied) * self._block_tokens / above.rates.load_tokens_per_second
            above.link.free_at = max(now, above.link.free_at) + seconds
            self._begin_store(below, copied, now)
        if not len(self._idle):
            self.next_time = None
        else:
            self.next_time = max(now, below.store_free_at) if due else now + WAIT_SECONDS
