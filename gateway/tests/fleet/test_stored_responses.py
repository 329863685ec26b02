from __future__ import annotations

import sys
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.fleet.stored_responses import Owner, ResponseOwners, response_id_in


def test_an_id_is_its_tenants_alone_even_when_another_chooses_it() -> None:
    owners = ResponseOwners()
    owners.record("resp_1", Owner("a", "m", "e0"))
    owners.record("resp_1", Owner("b", "m", "e1"))

    assert owners.of("resp_1", "a") == Owner("a", "m", "e0")
    assert owners.of("resp_1", "b") is None


def test_the_oldest_are_dropped() -> None:
    owners = ResponseOwners(2)
    for number in range(3):
        owners.record(f"resp_{number}", Owner("", "m", f"e{number}"))

    assert owners.of("resp_0", "") is None
    assert owners.of("resp_2", "") == Owner("", "m", "e2")


def test_a_tenants_flood_makes_nobody_else_forget() -> None:
    owners = ResponseOwners(100)
    for tenant in ("a", "b"):
        for number in range(20):
            owners.record(f"resp_{tenant}{number}", Owner(tenant, "m", "e0"))
    for number in range(1_000):
        owners.record(f"resp_flood{number}", Owner("flood", "m", "e0"))

    assert all(owners.of(f"resp_{tenant}{number}", tenant) for tenant in ("a", "b") for number in range(20))
    kept = [number for number in range(1_000) if owners.of(f"resp_flood{number}", "flood")]
    assert kept == list(range(940, 1_000))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 12)), max_size=60))
def test_at_the_bound_a_tenant_with_the_most_loses_its_oldest(records: list[tuple[int, int]]) -> None:
    owners, kept = ResponseOwners(5), dict[str, str]()  # tenant of each response, the oldest first
    for tenant, number in records:
        owner, response = Owner(f"t{tenant}", "m", "e"), f"resp_{number}"
        assert owners.record(response, owner) == (kept.get(response, owner.tenant) == owner.tenant)
        kept.setdefault(response, owner.tenant)
        found = {name: of for name, of in kept.items() if owners.of(name, of) is not None}
        gone = [of for name, of in kept.items() if name not in found]
        assert len(found) == min(5, len(kept))
        for of in gone:
            counts = Counter(kept.values())
            assert counts[of] == max(counts.values())
            assert of == owner.tenant or counts[owner.tenant] < counts[of]
            assert next(name for name, each in kept.items() if each == of) not in found
        kept = found


def test_a_record_at_the_bound_looks_at_no_other_tenant() -> None:
    owners = ResponseOwners(2_000)
    for number in range(2_000):
        owners.record(f"resp_{number}", Owner(f"t{number}", "m", "e"))
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        owners.record("resp_new", Owner("new", "m", "e"))
    finally:
        sys.setprofile(None)

    assert calls < 50


def test_a_stream_names_it_in_its_first_event() -> None:
    event = b'event: response.created\ndata: {"response":{"id":"resp_x","output":[]},"type":"response.created"}\n\n'

    assert response_id_in(event) == "resp_x"
    assert response_id_in(b'{"id":"resp_y","output":[{"id":"msg_1"}]}') == "resp_y"
    assert response_id_in(b"no id at all") is None
