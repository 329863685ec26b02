"""Sizes as people write them (512MiB, 2GiB) and as the rest of the code wants them: a count of bytes."""

from __future__ import annotations

import re
from typing import NewType

ByteCount = NewType("ByteCount", int)

_UNITS = {
    "": 1,
    "B": 1,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
    "KI": 1 << 10,
    "MI": 1 << 20,
    "GI": 1 << 30,
    "TI": 1 << 40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_byte_count(text: str | int) -> ByteCount:
    """`2GiB`, `512 MiB`, `4Gi`, `1GB`, `1048576` -> bytes.

    Raises ValueError when the text is no size or is negative.
    """
    if isinstance(text, bool):
        raise ValueError(f"{text!r} is not a size; write for example 512MiB")
    if isinstance(text, int):
        if text < 0:
            raise ValueError(f"{text} is negative; a size counts bytes")
        return ByteCount(text)
    match = _SIZE.fullmatch(text)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"{text!r} is not a size; write for example 512MiB, 2GiB or a number of bytes")
    return ByteCount(int(float(match[1]) * _UNITS[match[2].upper()]))


def format_byte_count(size_bytes: int) -> str:
    """Bytes -> the shortest honest binary form: `23,040 B`, `2.8 MiB`, `11.2 GiB`."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20)):
        if abs(size_bytes) >= factor:
            return f"{size_bytes / factor:.1f} {unit}"
    return f"{size_bytes:,} B"
