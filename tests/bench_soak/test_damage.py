from __future__ import annotations

import random

import pytest
from soak.damage import flipped, foreign, pairs, torn, truncated

from spillway_connector.errors import CorruptReason, TierCorrupt
from spillway_connector.tiers.frame import HEADER_BYTES, PAGE_BYTES, build_header, verify

NAMESPACE, KEY, PAYLOAD = b"n" * 16, b"k" * 36, random.Random(1).randbytes(5000)


def frame(header_bytes: int) -> bytes:
    return build_header(NAMESPACE, KEY, PAYLOAD, created_ms=1, header_bytes=header_bytes) + PAYLOAD


def reason(found: bytes, header_bytes: int) -> CorruptReason:
    with pytest.raises(TierCorrupt) as error:
        verify(found[:header_bytes], found[header_bytes:], namespace=NAMESPACE, key=KEY, payload_bytes=len(PAYLOAD))
    return error.value.reason


@pytest.mark.parametrize("header_bytes", [HEADER_BYTES, PAGE_BYTES])
def test_a_foreign_frame_is_intact_and_of_another_namespace(header_bytes: int) -> None:
    damaged = foreign(frame(header_bytes), random.Random(2))
    assert reason(damaged, header_bytes) == CorruptReason.NAMESPACE


@pytest.mark.parametrize("seed", range(50))
def test_flips_and_cuts_are_always_damage(seed: int) -> None:
    chance = random.Random(seed)
    whole = frame(HEADER_BYTES)
    assert len(flipped(whole, chance)) == len(whole)
    reason(flipped(whole, chance), HEADER_BYTES)
    assert len(truncated(whole, chance)) < len(whole)
    reason(truncated(whole, chance), HEADER_BYTES)
    assert len(torn(whole, chance)) == len(whole)
    reason(torn(whole, chance), HEADER_BYTES)


def test_what_was_damaged_before_can_be_damaged_again() -> None:
    chance = random.Random(3)
    for length in (1, 191, 193):
        assert foreign(frame(PAGE_BYTES)[:length], chance) != frame(PAGE_BYTES)[:length]
    assert foreign(b"", chance) == b"?"


def test_pairs_are_disjoint() -> None:
    names = [str(number) for number in range(7)]
    swapped = pairs(names, random.Random(1))
    assert len(swapped) == 3
    assert len({name for pair in swapped for name in pair}) == 6
