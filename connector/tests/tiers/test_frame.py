from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_connector.errors import CorruptReason, TierCorrupt
from spillway_connector.tiers.frame import (
    HEADER_BYTES,
    PAGE_BYTES,
    PARTS_MAX,
    Part,
    build_header,
    digest_of_parts,
    read_header,
    running_digest,
    verify,
    verify_digest,
)

NAMESPACE = bytes(range(16))
KEY = bytes(range(100, 136))
PAYLOAD = bytes(i * 7 % 256 for i in range(1000))


def _verify(header: bytes, payload: bytes = PAYLOAD, *, namespace: bytes = NAMESPACE, key: bytes = KEY) -> None:
    verify(header, memoryview(payload), namespace=namespace, key=key, payload_bytes=len(PAYLOAD))


def _reason(*args: object, **kwargs: object) -> str:
    with pytest.raises(TierCorrupt) as caught:
        _verify(*args, **kwargs)  # type: ignore[arg-type]
    return caught.value.reason


@given(
    namespace=st.binary(min_size=16, max_size=16),
    key=st.binary(min_size=1, max_size=64),
    payload=st.binary(max_size=300),
    created_ms=st.integers(0, 2**63),
    header_bytes=st.sampled_from([HEADER_BYTES, HEADER_BYTES + 1, PAGE_BYTES, 65535]),
    tenant=st.binary(min_size=8, max_size=8),
)
def test_what_is_packed_is_read(
    namespace: bytes, key: bytes, payload: bytes, created_ms: int, header_bytes: int, tenant: bytes
) -> None:
    header = build_header(namespace, key, payload, created_ms=created_ms, header_bytes=header_bytes, tenant=tenant)
    assert len(header) == header_bytes
    found = verify(header, payload, namespace=namespace, key=key, payload_bytes=len(payload))
    assert (found.namespace, found.key, found.created_ms) == (namespace, key, created_ms)
    assert (found.header_bytes, found.payload_bytes, found.tenant) == (header_bytes, len(payload), tenant)


@pytest.mark.parametrize("header_bytes", [HEADER_BYTES, PAGE_BYTES])
def test_every_bit_of_the_header_matters(header_bytes: int) -> None:
    header = build_header(NAMESPACE, KEY, PAYLOAD, created_ms=1, header_bytes=header_bytes)
    _verify(header)
    bits = range(8) if header_bytes == HEADER_BYTES else (0, 7)
    for position in range(header_bytes):
        for bit in bits:
            damaged = bytearray(header)
            damaged[position] ^= 1 << bit
            assert _reason(bytes(damaged)), f"byte {position} bit {bit}"


@given(st.lists(st.integers(0, len(PAYLOAD))), st.integers(0, len(PAYLOAD) * 8 - 1))
def test_a_payload_that_comes_in_stretches_is_proven_like_a_whole_one(cuts: list[int], bit: int) -> None:
    header = build_header(NAMESPACE, KEY, PAYLOAD, created_ms=1)
    damaged = bytearray(PAYLOAD)
    damaged[bit // 8] ^= 1 << bit % 8
    places = [0, *sorted(cuts), len(PAYLOAD)]
    for came in (PAYLOAD, bytes(damaged)):
        digest = running_digest()
        for start, end in itertools.pairwise(places):
            digest.update(came[start:end])
        expected = {"namespace": NAMESPACE, "key": KEY, "payload_bytes": len(PAYLOAD)}
        if came == PAYLOAD:
            verify_digest(header, digest.digest(), **expected)
        else:
            with pytest.raises(TierCorrupt) as caught:
                verify_digest(header, digest.digest(), **expected)
            assert caught.value.reason == CorruptReason.PAYLOAD


@given(st.integers(0, len(PAYLOAD) * 8 - 1), st.integers(0, len(PAYLOAD) * 8 - 1))
def test_flipped_bits_of_the_payload_are_found(one: int, two: int) -> None:
    header = build_header(NAMESPACE, KEY, PAYLOAD, created_ms=1)
    damaged = bytearray(PAYLOAD)
    for bit in {one, two}:
        damaged[bit // 8] ^= 1 << bit % 8
    assert _reason(header, bytes(damaged)) == CorruptReason.PAYLOAD


@given(st.binary(max_size=5000))
def test_noise_is_never_a_header(noise: bytes) -> None:
    with pytest.raises(TierCorrupt):
        read_header(noise)


def test_truncation_and_growth_are_found_at_every_length() -> None:
    header = build_header(NAMESPACE, KEY, PAYLOAD, created_ms=1)
    for length in range(len(header)):
        assert _reason(header[:length]) == CorruptReason.SHORT
    assert _reason(header + b"\0") == CorruptReason.HEADER
    for length in range(len(PAYLOAD)):
        assert _reason(header, PAYLOAD[:length]) == CorruptReason.SHORT
    assert _reason(header, PAYLOAD + b"\0") == CorruptReason.SHORT


def test_foreign_frames_are_named() -> None:
    header = build_header(NAMESPACE, KEY, PAYLOAD, created_ms=1)
    assert _reason(header, namespace=bytes(16)) == CorruptReason.NAMESPACE
    assert _reason(header, key=KEY[:-1]) == CorruptReason.KEY
    assert _reason(header, key=KEY + b"\0") == CorruptReason.KEY
    assert _reason(build_header(NAMESPACE, KEY, PAYLOAD[:-1], created_ms=1)) == CorruptReason.LENGTH
    assert _reason(b"other program's data".ljust(HEADER_BYTES, b" ")) == CorruptReason.MAGIC
    assert _reason(header[:8] + b"\2\0" + header[10:]) == CorruptReason.VERSION


def test_the_layout_is_a_promise() -> None:
    # Written by version 1; a change that breaks this line needs a new format version.
    header = build_header(NAMESPACE, KEY, b"payload", created_ms=0x0102030405060708)
    assert header[:16].hex() == "5350494c4c4b560a0100c00000000000"
    assert header[16:32] == NAMESPACE
    assert header[32:96] == KEY.ljust(64, b"\0")
    assert header[96:112].hex() == "24000000010000000700000000000000"
    assert header[112:128].hex() == "f3d6e72eb800dea99613f8bbf13ce4e5"
    assert header[128:136].hex() == "0807060504030201"
    assert header[136:176] == bytes(40)
    assert header[176:192].hex() == "d3d2aeb4d59feccc5dc448a4d2d8400f"
    whose = build_header(NAMESPACE, KEY, b"payload", created_ms=0x0102030405060708, tenant=b"tenant-8")
    assert whose[136:176] == bytes(16) + b"tenant-8" + bytes(16)


def test_a_part_passes_for_no_other_part() -> None:
    part = Part(2, 5, digest_of_parts([b"0" * 16, b"1" * 16]))
    header = build_header(NAMESPACE, KEY, PAYLOAD, created_ms=1, part=part)
    assert header[98:102].hex() == "02000500"
    assert header[136:152].hex() == "28e03a081a5158d424182e335bc0c398"
    assert read_header(header).part == part
    expected = {"namespace": NAMESPACE, "key": KEY, "payload_bytes": len(PAYLOAD)}
    verify(header, PAYLOAD, **expected, part_index=2, part_count=5)  # type: ignore[arg-type]
    for index, count in ((0, 1), (1, 5), (2, 4), (2, 6)):
        with pytest.raises(TierCorrupt) as caught:
            verify(header, PAYLOAD, **expected, part_index=index, part_count=count)  # type: ignore[arg-type]
        assert caught.value.reason == CorruptReason.KEY


@given(st.lists(st.binary(min_size=16, max_size=16), min_size=2, max_size=6), st.randoms())
def test_a_set_digest_tells_order_and_contents(digests: list[bytes], lots: random.Random) -> None:
    others = lots.sample(digests, len(digests))
    assert (digest_of_parts(others) == digest_of_parts(digests)) == (others == digests)


def test_wrong_argument_sizes_are_value_errors() -> None:
    for part in (Part(1, 1), Part(-1, 2), Part(0, PARTS_MAX + 1), Part(0, 2, b"short")):
        with pytest.raises(ValueError, match="set digest"):
            build_header(NAMESPACE, KEY, PAYLOAD, created_ms=1, part=part)
    for namespace, key in ((b"short", KEY), (NAMESPACE, b""), (NAMESPACE, bytes(65))):
        with pytest.raises(ValueError, match="needed"):
            build_header(namespace, key, PAYLOAD, created_ms=1)
    with pytest.raises(ValueError, match="tenant: 5 bytes"):
        build_header(NAMESPACE, KEY, PAYLOAD, created_ms=1, tenant=b"short")
    with pytest.raises(ValueError, match="header_bytes"):
        build_header(NAMESPACE, KEY, PAYLOAD, created_ms=1, header_bytes=100)
