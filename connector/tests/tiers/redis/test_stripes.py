from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_connector.errors import CorruptReason, TierCorrupt
from spillway_connector.tiers.frame import Part, build_header, digest_of_parts, digest_of_payload, read_header
from spillway_connector.tiers.redis.stripes import STRIPE_BYTES_MAX, StripePlan, check_together


@given(st.integers(1, 64 << 20), st.sampled_from([4096, 1 << 20, 4 << 20]))
def test_stripes_cover_the_payload_once_and_none_is_too_large(payload_bytes: int, largest: int) -> None:
    ranges = StripePlan.of(payload_bytes, largest).ranges
    assert ranges[0][0] == 0
    assert ranges[-1][1] == payload_bytes
    assert all(end == start for (_, end), (start, _) in pairwise(ranges))
    assert all(0 < end - start <= largest for start, end in ranges)


@pytest.mark.parametrize(("payload_bytes", "count"), [(1, 1), (STRIPE_BYTES_MAX, 1), (STRIPE_BYTES_MAX + 1, 2)])
def test_up_to_the_largest_stripe_a_block_is_one_value(payload_bytes: int, count: int) -> None:
    assert StripePlan.of(payload_bytes).count == count


def test_a_block_of_20_mb_has_stripes_of_one_to_four_mib() -> None:
    plan = StripePlan.of(20_971_520)
    assert plan.count == 5
    assert {end - start for start, end in plan.ranges} == {4 << 20}
    assert plan.names(b"b") == [b"b:0", b"b:1", b"b:2", b"b:3", b"b"]


def test_stripes_of_two_blocks_do_not_go_together() -> None:
    def headers(fill: int) -> list:
        parts = [bytes([fill + index]) * 4096 for index in range(3)]
        whole = digest_of_parts([digest_of_payload(part) for part in parts])
        return [
            read_header(build_header(bytes(16), b"k", part, created_ms=1, part=Part(index, 3, whole)))
            for index, part in enumerate(parts)
        ]

    ours, theirs = headers(0), headers(100)
    check_together(ours)
    for mixed in ([ours[0], theirs[1], ours[2]], [theirs[0], *ours[1:]], [*ours[:2], theirs[2]]):
        with pytest.raises(TierCorrupt) as caught:
            check_together(mixed)
        assert caught.value.reason == CorruptReason.PAYLOAD
