"""Chunks that clients asked to retain stay in a shared tier against a flood, within shares, and every hold ends."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from spillway_connector.errors import TierTimeout
from spillway_connector.plan.holds import TOTAL_SHARE_MAX
from spillway_connector.testing.clock import SteppedClock
from spillway_connector.testing.tier_contract import NAMESPACE, key_of, payload_of
from spillway_connector.tiers.frame import HEADER_BYTES
from spillway_connector.tiers.memory import MemoryStore, MemoryTier
from spillway_connector.tiers.tier import NO_TENANT
from spillway_connector.transfer.renewals import RENEW_SECONDS, Renewals

PAYLOAD = 64
CHUNKS = 40
ANN, BOB = b"tenant-a", b"tenant-b"
FOREVER = 1e9


class Counted(MemoryTier):
    """renewed: by one call after the other."""

    def __init__(self, clock: SteppedClock) -> None:
        super().__init__(NAMESPACE, PAYLOAD, MemoryStore(CHUNKS * (PAYLOAD + HEADER_BYTES)), clock=clock)
        self.renewed: list[tuple[bytes, list[bytes]]] = []
        self.fails = False

    def renew(self, keys: Sequence[bytes], deadline: float, tenant: bytes = NO_TENANT) -> None:
        self.renewed.append((tenant, list(keys)))
        if self.fails:
            raise TierTimeout("it hangs")
        super().renew(keys, deadline, tenant)


class Engine:
    def __init__(self) -> None:
        self.clock = SteppedClock()
        self.tier = Counted(self.clock)
        self.renewals = Renewals(self.tier, self.clock)
        self.flooded = 1000

    def hold(self, tenant: bytes, share: float, seconds: float, seeds: range) -> None:
        for seed in seeds:
            self.tier.store(key_of(seed), payload_of(seed, PAYLOAD), FOREVER, tenant)
        keys = [key_of(seed) for seed in seeds]
        self.renewals.hold(tenant, share, seconds, keys, room_bytes=CHUNKS * PAYLOAD, chunk_bytes=PAYLOAD)
        self.renew()

    def renew(self) -> None:
        """Renew all pages, as the lookup thread does between lookups."""
        while self.renewals.waiting:
            self.renewals.renew_page(FOREVER)

    def flood(self, blocks: int) -> None:
        for seed in range(self.flooded, self.flooded + blocks):
            self.tier.store(key_of(seed), payload_of(seed, PAYLOAD), FOREVER)
        self.flooded += blocks

    def there(self, seeds: range) -> int:
        return sum(self.tier.contains([key_of(seed) for seed in seeds], FOREVER))


def test_what_is_held_outlives_a_flood_until_its_time_is_over() -> None:
    engine = Engine()
    engine.hold(ANN, 0.25, 200.0, range(10))
    for _ in range(6):
        engine.flood(CHUNKS // 2)
        engine.clock.advance(RENEW_SECONDS)
        engine.renew()
    assert (engine.there(range(10)), len(engine.renewals)) == (10, 10)
    engine.clock.advance(RENEW_SECONDS)
    engine.renew()
    engine.flood(CHUNKS)
    assert (engine.there(range(10)), len(engine.renewals)) == (0, 0)


def test_a_tier_that_fails_is_asked_again_in_the_next_turn() -> None:
    engine = Engine()
    engine.hold(ANN, 0.25, 200.0, range(10))
    engine.tier.fails = True
    engine.clock.advance(RENEW_SECONDS)
    assert engine.renewals.waiting
    try:
        engine.renewals.renew_page(FOREVER)
    except TierTimeout:
        pass
    assert not engine.renewals.waiting, "not at once"
    engine.tier.fails = False
    engine.clock.advance(RENEW_SECONDS)
    before = len(engine.tier.renewed)
    engine.renew()
    assert len(engine.tier.renewed) == before + 1


def test_new_weights_end_every_hold() -> None:
    engine = Engine()
    engine.hold(ANN, 0.25, 200.0, range(10))
    engine.renewals.clear()
    engine.clock.advance(RENEW_SECONDS)
    assert not engine.renewals.waiting


asked = st.tuples(
    st.sampled_from([ANN, BOB]),
    st.sampled_from([0.0, 0.1, 0.25, 1.0]),
    st.sampled_from([40.0, 200.0]),
    st.integers(0, 30),
    st.integers(0, 30),
    st.floats(0.0, 2 * RENEW_SECONDS),
)


@given(st.lists(asked, max_size=12))
def test_no_share_is_exceeded_and_everything_ends(steps) -> None:
    engine = Engine()
    shares: dict[bytes, float] = {}
    for tenant, share, seconds, first, count, pause in steps:
        engine.clock.advance(pause)
        engine.renew()
        seeds = range(first, first + count) if tenant == ANN else range(100 + first, 100 + first + count)
        engine.hold(tenant, share, seconds, seeds)
        shares[tenant] = max(share, shares.get(tenant, 0.0))
        engine.tier.renewed.clear()
        engine.clock.advance(RENEW_SECONDS)
        engine.renew()
        of_tenant = {
            each: [key for owner, keys in engine.tier.renewed if owner == each for key in keys] for each in shares
        }
        assert sum(map(len, of_tenant.values())) <= CHUNKS * TOTAL_SHARE_MAX
        for each, keys in of_tenant.items():
            assert len(set(keys)) == len(keys) <= CHUNKS * shares[each]
    engine.clock.advance(200.0)
    engine.renew()
    engine.tier.renewed.clear()
    engine.clock.advance(RENEW_SECONDS)
    engine.renew()
    assert engine.tier.renewed == [] and len(engine.renewals) == 0
