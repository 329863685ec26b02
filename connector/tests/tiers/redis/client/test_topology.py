from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis._parsers.base import BaseParser

from spillway_connector.errors import RefusedReason, TierRefused
from spillway_connector.tiers.redis.client.endpoint import Address, RedisEndpoint
from spillway_connector.tiers.redis.client.errors import ProtocolError, Redirected, Reply, refusal
from spillway_connector.tiers.redis.client.topology import SLOTS, parse_slots

ASKED = Address("here", 7000)


def test_a_slot_map_is_read() -> None:
    reply: Reply = [
        [0, 100, [b"10.0.0.1", 7001, b"id", []], [b"10.0.0.9", 7009, b"replica", []]],
        [101, 101, [None, 7002, b"id"]],
        [200, SLOTS - 1, [b"", 7003]],
        [150, 150, [b"?", 7004, b"id"]],
    ]
    slots = parse_slots(reply, ASKED)
    assert slots[0] == slots[100] == Address("10.0.0.1", 7001)
    assert slots[101] == Address("here", 7002)
    assert slots[102] is None
    assert slots[150] == Address("here", 7004)
    assert slots[200] == slots[SLOTS - 1] == Address("here", 7003)


@pytest.mark.parametrize(
    "reply",
    [
        None, b"text", 7, {}, [7], [[0, 1]], [[0, 1, []]], [[0, 1, [b"h"]]], [[0, SLOTS, [b"h", 1]]],
        [[-1, 1, [b"h", 1]]], [[5, 4, [b"h", 1]]], [[0, 1, [b"h", 0]]], [[0, 1, [b"h", 65536]]], [[0, 1, [7, 7000]]],
        [[b"0", 1, [b"h", 1]]],
    ],
)  # fmt: skip
def test_what_is_no_slot_map_is_refused(reply: Reply) -> None:
    with pytest.raises(ProtocolError):
        parse_slots(reply, ASKED)


def test_a_cluster_without_slots_is_refused_with_that_reason() -> None:
    with pytest.raises(TierRefused, match="no slots") as caught:
        parse_slots([], ASKED)
    assert caught.value.reason == RefusedReason.MOVED


@pytest.mark.parametrize(
    ("message", "slot", "address", "ask"),
    [
        ("MOVED 3999 127.0.0.1:6381", 3999, Address("127.0.0.1", 6381), False),
        ("ASK 1 ::1:6381", 1, Address("::1", 6381), True),
        ("MOVED 0 :6381", 0, Address("kv", 6381), False),
    ],
)
def test_a_redirection_is_understood(message: str, slot: int, address: Address, ask: bool) -> None:
    error = refusal(RedisEndpoint("kv"), BaseParser.parse_error(message))
    assert isinstance(error, Redirected)
    assert message in str(error)
    assert (error.slot, error.address, error.ask) == (slot, address, ask)


@given(st.integers(-(1 << 20), 1 << 40), st.text("0123456789.:-x", max_size=20), st.integers(-2, 1 << 20))
def test_a_redirection_to_an_impossible_port_is_still_a_refusal(slot: int, host: str, port: int) -> None:
    for code in ("MOVED", "ASK"):
        error = refusal(RedisEndpoint("kv"), BaseParser.parse_error(f"{code} {slot} {host}:{port}"))
        assert error.reason == RefusedReason.MOVED
        assert isinstance(error, Redirected) == (0 < port < 1 << 16 and slot >= 0)
