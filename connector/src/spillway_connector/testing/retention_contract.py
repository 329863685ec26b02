"""The contract suite of retention: what clients asked to keep outlives other chunks of its age in every store.

    class TestMyTier(RetentionContract):
        pass

The module provides a pytest fixture ``make_retaining``, a callable ``(chunks) -> Retaining``: a store, empty, with room
for about that many chunks. Shared tiers are driven by :class:`RenewedTier`, as an engine drives them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from spillway_connector.testing.clock import SteppedClock
from spillway_connector.testing.tier_contract import key_of, payload_of
from spillway_connector.tiers.tier import NO_TENANT, Clock, Tier
from spillway_connector.transfer.renewals import RENEW_SECONDS, Renewals

ANN, BOB = b"tenant-a", b"tenant-b"
ROOM_CHUNKS = 24
SHARE = 0.25  # of the room, 6 chunks
HELD_SECONDS = 200.0
UNUSED_SECONDS = 100.0  # after which a store that evicts by time alone gives up what was not used
_FLOOD_CHUNKS = 6  # every RENEW_SECONDS, so that nothing stays for longer than UNUSED_SECONDS by its age


class Retaining(Protocol):
    """A store to which retention is applied as an engine does it. Chunks are numbers."""

    @property
    def honours_holds(self) -> bool:
        """Whether the store honours holds; False if an engine decides nothing of it."""
        ...

    def store(self, chunks: Iterable[int], tenant: bytes = NO_TENANT) -> None: ...

    def hold(self, tenant: bytes, share: float, seconds: float, chunks: range) -> None: ...

    def held(self) -> int:
        """Number of chunks that the engine's metrics count as held."""
        ...

    def pass_time(self, seconds: float) -> None: ...

    def there(self, chunks: range) -> set[int]: ...


class RenewedTier:
    """A shared tier and the engine's renewals. `clock` is the tier's; `step`, which makes time pass, is of the medium
    if that has a clock of its own."""

    def __init__(
        self, tier: Tier, chunks: int, clock: SteppedClock, deadline_clock: Clock, step: Callable[[float], object]
    ) -> None:
        self._tier, self._chunks = tier, chunks
        self._clock, self._deadline_clock, self._step = clock, deadline_clock, step
        self._renewals = Renewals(tier, clock)

    @classmethod
    def stepped(
        cls, make: Callable[[Clock, Clock], Tier], chunks: int, settle: Callable[[Any], None] = lambda tier: None
    ) -> RenewedTier:
        """make: from a monotonic and a wall clock. settle: does what the tier's thread has to do before time passes."""
        clock = SteppedClock()
        tier = make(clock, lambda: 1e9 + clock())
        return cls(tier, chunks, clock, clock, lambda seconds: settle(tier))

    @property
    def honours_holds(self) -> bool:
        return self._tier.renews

    def store(self, chunks: Iterable[int], tenant: bytes = NO_TENANT) -> None:
        for chunk in chunks:
            self._tier.store(key_of(chunk), payload_of(chunk, self._tier.payload_bytes), self._soon(), tenant)

    def hold(self, tenant: bytes, share: float, seconds: float, chunks: range) -> None:
        each = self._tier.payload_bytes
        keys = [key_of(chunk) for chunk in chunks]
        self._renewals.hold(tenant, share, seconds, keys, room_bytes=self._chunks * each, chunk_bytes=each)
        self._renew()

    def held(self) -> int:
        return len(self._renewals)

    def pass_time(self, seconds: float) -> None:
        while seconds > 0:
            passed = min(seconds, RENEW_SECONDS)
            self._step(passed)
            self._clock.advance(passed)
            self._renew()
            seconds -= passed

    def there(self, chunks: range) -> set[int]:
        present = self._tier.contains([key_of(chunk) for chunk in chunks], self._soon())
        return {chunk for chunk, is_there in zip(chunks, present, strict=True) if is_there}

    def _renew(self) -> None:
        while self._renewals.waiting:
            self._renewals.renew_page(self._soon())

    def _soon(self) -> float:
        return self._deadline_clock() + 30.0


MakeRetaining = Callable[[int], Retaining]


class RetentionContract:
    """Every promise of docs/gateway.md on retention that a store can show."""

    def test_held_chunks_outlive_others_of_their_age_until_their_time(self, make_retaining: MakeRetaining) -> None:
        store = make_retaining(ROOM_CHUNKS)
        held, others = range(6), range(100, 106)
        for pair in zip(held, others, strict=True):
            store.store(pair, ANN)
        store.hold(ANN, SHARE, HELD_SECONDS, held)
        if not store.honours_holds:
            assert store.held() == 0, "what nothing keeps is not reported as held"
            return
        assert store.held() == len(held)
        came = _flood_until(store, HELD_SECONDS - RENEW_SECONDS, 1000)
        assert (store.there(held), store.there(others)) == (set(held), set())
        store.pass_time(UNUSED_SECONDS + 2 * RENEW_SECONDS)
        for chunk in range(came, came + 6 * ROOM_CHUNKS):  # used more than once, as the held ones were
            store.store((chunk, chunk))
        assert (store.there(held), store.held()) == (set(), 0), "their time is over"

    def test_a_tenant_holds_its_share_and_the_beginning_of_its_prompt(self, make_retaining: MakeRetaining) -> None:
        store = make_retaining(ROOM_CHUNKS)
        prompt = range(12)
        store.store(prompt, ANN)
        store.hold(ANN, SHARE, HELD_SECONDS, prompt)
        if store.honours_holds:
            _flood_until(store, HELD_SECONDS - RENEW_SECONDS, 1000)
            assert store.there(prompt) == set(range(int(SHARE * ROOM_CHUNKS)))

    def test_all_tenants_together_hold_half_and_none_loses_to_one_that_holds_more(
        self, make_retaining: MakeRetaining
    ) -> None:
        store = make_retaining(ROOM_CHUNKS)
        little, much = range(2), range(100, 112)
        store.store(little, BOB)
        store.hold(BOB, 0.5, HELD_SECONDS, little)
        store.store(much, ANN)
        store.hold(ANN, 0.5, HELD_SECONDS, much)
        if store.honours_holds:
            _flood_until(store, HELD_SECONDS - RENEW_SECONDS, 1000)
            assert (store.there(little), len(store.there(much))) == (set(little), ROOM_CHUNKS // 2 - len(little))


def _flood_until(store: Retaining, seconds: float, first: int) -> int:
    """Others' chunks come until so much time has passed. Returns the number after the last one."""
    while seconds > 0:
        store.pass_time(min(seconds, RENEW_SECONDS))
        store.store(range(first, first + _FLOOD_CHUNKS))
        first += _FLOOD_CHUNKS
        seconds -= RENEW_SECONDS
    return first
