"""Sizes as people write them (512MiB, 64Gi) and as the rest of the code wants them: a count of bytes."""

from __future__ import annotations

import re
from decimal import Decimal


class ByteCount(int):
    """A number of bytes, at least 1, that a person may also write as a size: 512MiB, 64Gi."""

    @classmethod
    def read(cls, value: object) -> ByteCount:
        """Raises ValueError."""
        size_bytes = parse_byte_count(value)
        if size_bytes < 1:
            raise ValueError(f"{value!r} given, at least 1 byte needed")
        return cls(size_bytes)


_PREFIXES = "KMGTPE"
# Kubernetes' decimal suffixes are one letter in this case; its "m" means thousandths and "K" does not exist there.
_LETTERS = {"B": 1, "k": 10**3, **{letter: 10 ** (3 * (power + 2)) for power, letter in enumerate(_PREFIXES[1:])}}
# Two letters and more mean one thing in any case.
_WORDS = {
    "": 1,
    **{f"{letter}B": 10 ** (3 * (power + 1)) for power, letter in enumerate(_PREFIXES)},
    **{f"{letter}I": 1 << (10 * (power + 1)) for power, letter in enumerate(_PREFIXES)},
    **{f"{letter}IB": 1 << (10 * (power + 1)) for power, letter in enumerate(_PREFIXES)},
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:[eE][0-9]{1,2}(?=\s*$))?)\s*([A-Za-z]*)\s*")
_LIMIT_BYTES = int(9.2e18)  # below what 64 bits with a sign hold, which is what the chart reckons with


def parse_byte_count(text: object) -> int:
    """A Kubernetes quantity of whole bytes (`64G`, `16Gi`, `12e9`) or a spelt-out unit (`512 MiB`, `1GB`) -> bytes.

    The chart's `spillway.parsedBytes` is the same grammar. Raises ValueError when the text is no size or is negative.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise ValueError(f"{text} is negative; a size counts bytes")
        return text
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if match is not None:
        number, unit = match.groups()
        factor = _LETTERS.get(unit) if len(unit) == 1 else _WORDS.get(unit.upper())
        if factor is not None and Decimal(number) * factor < _LIMIT_BYTES:
            return int(Decimal(number) * factor)
    raise ValueError(f"{text!r} is not a size; write for example 512MiB, 64Gi or a number of bytes")


def format_byte_count(size_bytes: int) -> str:
    """Bytes -> the shortest honest binary form: `23,040 B`, `2.8 MiB`, `11.2 GiB`."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20)):
        if abs(size_bytes) >= factor:
            return f"{size_bytes / factor:.1f} {unit}"
    return f"{size_bytes:,} B"
