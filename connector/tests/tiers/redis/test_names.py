from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_connector.tiers.redis.names import RedisName, RedisNames, parse_name

NAMES = RedisNames("0123456789abcdef" * 2)


@given(st.binary(min_size=1, max_size=64), st.integers(0, 65_534), st.binary(min_size=8, max_size=8))
def test_every_name_is_read_back(key: bytes, index: int, tenant: bytes) -> None:
    namespace = NAMES.namespace
    assert parse_name(NAMES.block(key)) == RedisName(namespace, key)
    assert parse_name(NAMES.stripe(key, index)) == RedisName(namespace, key, index)
    assert parse_name(NAMES.tenant(tenant)) == RedisName(namespace, tenant=tenant)
    assert parse_name(NAMES.document) == RedisName(namespace)


def test_the_names_are_a_promise() -> None:
    assert NAMES.block(b"\x01\xff") == b"spillway1:0123456789abcdef0123456789abcdef:01ff"
    assert NAMES.stripe(b"\x01\xff", 12) == b"spillway1:0123456789abcdef0123456789abcdef:01ff:12"
    assert NAMES.document == b"spillway1:0123456789abcdef0123456789abcdef:document"
    assert NAMES.tenant(bytes(8)) == b"spillway1:0123456789abcdef0123456789abcdef:tenant:0000000000000000"


@pytest.mark.parametrize("rest", [b"", b"01f", b"0G", b"01:", b"01:01", b"01:x", b"documents", b"tenant:01", b"01\n"])
def test_other_names_are_not_ours(rest: bytes) -> None:
    assert parse_name(NAMES.prefix + rest) is None
    assert parse_name(b"x" + NAMES.document) is None
    assert parse_name(b"spillway2" + NAMES.document[9:]) is None
