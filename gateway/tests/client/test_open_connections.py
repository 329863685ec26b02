"""Connections that a tick looks at."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.client.open_connections import (
    CHECK_SECONDS,
    CHECKED_PER_TICK_MIN,
    TICKS_PER_CHECK,
    OpenConnections,
)
from spillway_gateway.config.settings import ConnectionsConfig


class Looked:
    """A connection that counts how often it is looked at."""

    def __init__(self) -> None:
        self.times = 0

    def is_expired(self, now: float) -> bool:
        self.times += 1
        return False

    def expire(self, now: float) -> None: ...

    def evict(self) -> None: ...

    def stalled_since(self) -> float | None:
        return None


@given(st.integers(0, 3 * TICKS_PER_CHECK * CHECKED_PER_TICK_MIN))
def test_each_connection_is_looked_at_once_a_second_and_each_tick_looks_at_a_share(count: int) -> None:
    opened = OpenConnections(ConnectionsConfig(per_address_max=10 * count + 1), 10 * count + 10)
    connections = [Looked() for _ in range(count)]
    for connection in connections:
        assert opened.admit(connection, "")
    seen = []
    for at in range(10):  # ten ticks a second
        before = sum(each.times for each in connections)
        opened.tick(100.0 + at * CHECK_SECONDS / 10)
        seen.append(sum(each.times for each in connections) - before)
    assert all(each.times == 1 for each in connections)
    assert max(seen) <= max(CHECKED_PER_TICK_MIN, count // TICKS_PER_CHECK + 1)
