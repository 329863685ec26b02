"""Memory pressure of the servers: they refused a store at ``maxmemory``, or evict keys."""

from __future__ import annotations

import threading

from spillway_connector.errors import TierError
from spillway_connector.tiers.redis.client.endpoint import Address
from spillway_connector.tiers.redis.client.router import RedisRouter
from spillway_connector.tiers.redis.info import evicted_keys
from spillway_connector.tiers.tier import Clock

SAMPLE_SECONDS = 10.0  # the least time between two samples of the servers' counters
ANSWER_SECONDS = 1.0  # the most that one sample may add to a store
PRESSURE_SECONDS = 30.0  # how long one refusal or eviction counts


class Pressure:
    """Memory pressure of the servers. Several threads may use it at once."""

    def __init__(self, router: RedisRouter, clock: Clock) -> None:
        self._router = router
        self._clock = clock
        self._lock = threading.Lock()
        self._sampled_at = float("-inf")
        self._until = float("-inf")
        self._evicted: dict[Address, int] = {}

    @property
    def high(self) -> bool:
        return self._clock() < self._until

    def refused(self) -> None:
        """A server refused a store because it is full."""
        self._until = self._clock() + PRESSURE_SECONDS

    def sample(self, deadline: float) -> None:
        """Read the servers' counters if the last sample is 10 seconds old. A failure to read them is ignored."""
        if not self._due():
            return
        until = min(deadline, self._clock() + ANSWER_SECONDS)
        try:
            servers = self._router.servers(until)
            evicted = {server: self._router.run_at(server, evicted_keys, until) for server in servers}
        except TierError:
            return  # no permission, or unreachable: the operation itself reports that
        # The counter delta between two samples counts: a restarted server begins at zero.
        if any(count > self._evicted.get(server, count) for server, count in evicted.items()):
            self._until = self._clock() + PRESSURE_SECONDS
        self._evicted = evicted

    def _due(self) -> bool:
        """Whether a sample is due; True for one thread in SAMPLE_SECONDS."""
        with self._lock:
            now = self._clock()
            if now - self._sampled_at < SAMPLE_SECONDS:
                return False
            self._sampled_at = now
            return True
