"""Wrong bytes that look right: what a frame may become on its way. Pure; the layout is that of docs/formats.md."""

from __future__ import annotations

import random
from collections.abc import Callable

import xxhash

MAGIC = b"SPILLKV\n"
_NAMESPACE_AT, _NAMESPACE_BYTES = 16, 16
_HEADER_BYTES_AT = 10
_CHECKSUM_AT, _CHECKSUM_END = 176, 192

Damage = Callable[[bytes, random.Random], bytes]


def flipped(frame: bytes, chance: random.Random) -> bytes:
    """One to three bits, half of the time among the first 192 bytes."""
    damaged = bytearray(frame)
    places = set()
    for _ in range(chance.randint(1, 3)):
        among = min(len(frame), _CHECKSUM_END) if chance.random() < 0.5 else len(frame)
        places.add((chance.randrange(among), chance.randrange(8)))
    for place, bit in places:  # a set: no bit is flipped back
        damaged[place] ^= 1 << bit
    return bytes(damaged)


def truncated(frame: bytes, chance: random.Random) -> bytes:
    """Cut at a sector, in a header, or one byte short."""
    sectors = max(1, len(frame) // 512)
    return frame[: chance.choice([512 * chance.randrange(sectors), chance.randrange(193), len(frame) - 1])]


def foreign(frame: bytes, chance: random.Random) -> bytes:
    """An intact frame of another namespace under our name: other weights with the same shapes."""
    header_bytes = int.from_bytes(frame[_HEADER_BYTES_AT : _HEADER_BYTES_AT + 2], "little")
    if len(frame) < max(header_bytes, _CHECKSUM_END):
        return flipped(frame, chance) if frame else b"?"  # a fault before this one has left no header
    header = bytearray(frame[:header_bytes])
    header[_NAMESPACE_AT : _NAMESPACE_AT + _NAMESPACE_BYTES] = chance.randbytes(_NAMESPACE_BYTES)
    checked = bytes(header[:_CHECKSUM_AT] + header[_CHECKSUM_END:])
    header[_CHECKSUM_AT:_CHECKSUM_END] = xxhash.xxh3_128_digest(checked)
    return bytes(header) + frame[header_bytes:]


def torn(frame: bytes, chance: random.Random) -> bytes:
    """Zeros from some sector of the first two thirds on: a write that power ended, or that never reached the disk."""
    kept = 512 * chance.randrange(max(1, len(frame) * 2 // 3 // 512))
    return frame[:kept] + bytes(len(frame) - kept)


DAMAGES: dict[str, Damage] = {"flipped": flipped, "truncated": truncated, "foreign": foreign}


def pairs(names: list[str], chance: random.Random) -> list[tuple[str, str]]:
    """Disjoint pairs that change places."""
    mixed = list(names)
    chance.shuffle(mixed)
    return list(zip(mixed[::2], mixed[1::2], strict=False))
