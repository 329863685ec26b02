from __future__ import annotations

from itertools import islice

import pytest
from soak.schedule import (
    DISTURBED_SHARE,
    ENGINE_KINDS,
    GATEWAY_KINDS,
    RESET_KINDS,
    STORE_KINDS,
    Fault,
    engine_faults,
    may_disturb,
    reset_faults,
    store_faults,
)


@pytest.mark.parametrize("tier", STORE_KINDS)
def test_a_seed_gives_one_schedule(tier: str) -> None:
    assert list(islice(store_faults(3, tier), 50)) == list(islice(store_faults(3, tier), 50))
    assert list(islice(store_faults(3, tier), 50)) != list(islice(store_faults(4, tier), 50))
    assert list(islice(engine_faults(3, tier, 2), 50)) == list(islice(engine_faults(3, tier, 2), 50))


@pytest.mark.parametrize("tier", STORE_KINDS)
def test_every_kind_comes_before_any_comes_again(tier: str) -> None:
    kinds = STORE_KINDS[tier]
    drawn = [fault.kind for fault in islice(store_faults(1, tier), 3 * len(kinds))]
    for deck in range(3):
        assert sorted(drawn[deck * len(kinds) : (deck + 1) * len(kinds)]) == sorted(kinds)


def test_engines_and_gateway_are_all_struck() -> None:
    drawn = list(islice(engine_faults(1, "nvme", 2), 40))
    assert {fault.kind for fault in drawn} == set(ENGINE_KINDS + GATEWAY_KINDS)
    assert {fault.target for fault in drawn} == {0, 1}
    assert drawn[0].kind in GATEWAY_KINDS, "later it is left alone, so that it can be seen not to grow"


def test_the_last_engine_and_the_gateway_are_spared_later() -> None:
    last = Fault("engine_killed", 1.0, 0.0, 1, 7)
    gateway = Fault("gateway_terminated", 1.0, 0.0, 0, 7)
    assert may_disturb(last, 0.0, 2) == last
    assert may_disturb(gateway, 0.0, 2) == gateway
    later = may_disturb(last, DISTURBED_SHARE, 2)
    assert later is not None
    assert (later.kind, later.target) == ("engine_killed", 0)
    assert may_disturb(gateway, DISTURBED_SHARE, 2) is None


def test_resets_go_on_to_the_end_on_every_engine() -> None:
    drawn = list(islice(reset_faults(1, "nvme", 2, 5.0), 40))
    assert {fault.kind for fault in drawn} == set(RESET_KINDS)
    assert {fault.target for fault in drawn} == {0, 1}
    assert 3.0 < sum(fault.gap_seconds for fault in drawn) / len(drawn) < 7.0
    assert all(may_disturb(fault, 0.9, 2) == fault for fault in drawn)
    assert list(reset_faults(1, "nvme", 2, 0.0)) == []
