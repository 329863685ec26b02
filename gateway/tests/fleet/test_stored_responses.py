from __future__ import annotations

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


def test_a_stream_names_it_in_its_first_event() -> None:
    event = b'event: response.created\ndata: {"response":{"id":"resp_x","output":[]},"type":"response.created"}\n\n'

    assert response_id_in(event) == "resp_x"
    assert response_id_in(b'{"id":"resp_y","output":[{"id":"msg_1"}]}') == "resp_y"
    assert response_id_in(b"no id at all") is None
