"""Sizes as people write them (512MiB, 64Gi) and as the rest of the code wants them: a count of bytes."""

from __future__ import annotations

import math
import re
from fractions import Fraction


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
# Kubernetes' decimal suffixes are one letter in this case; "K" does not exist there.
_LETTERS: dict[str, int] = {
    "B": 1,
    "k": 10**3,
    **{letter: 10 ** (3 * (power + 2)) for power, letter in enumerate(_PREFIXES[1:])},
}
_FRACTIONS = frozenset("num")  # of a byte: Kubernetes' suffixes for 10**-9, 10**-6 and 10**-3
# Two letters and more mean one thing in any case.
_WORDS: dict[str, int] = {
    "": 1,
    **{f"{letter}B": 10 ** (3 * (power + 1)) for power, letter in enumerate(_PREFIXES)},
    **{f"{letter}I": 1 << (10 * (power + 1)) for power, letter in enumerate(_PREFIXES)},
    **{f"{letter}IB": 1 << (10 * (power + 1)) for power, letter in enumerate(_PREFIXES)},
}
_SIZE = re.compile(r" *([+-]?)([0-9]*(?:\.[0-9]*)?)([eE][+-]?[0-9]{1,2})? *([A-Za-z]*) *")
_LENGTH_MAX = 64  # characters; more are no size that a person wrote
_BYTES_MAX = (1 << 63) - 1  # of a Kubernetes quantity, and what the chart reckons with


def parse_byte_count(value: object) -> int:
    """A Kubernetes quantity of bytes (`64G`, `16Gi`, `12e9`), a spelt-out unit (`512 MiB`, `1GB`) or a number -> bytes.

    A fraction of a byte is rounded up, as Kubernetes does. The chart's `spillway.bytes` reads the same sizes, and
    tests/size_cases.yaml is the table of both. Raises ValueError, which says why.
    """
    amount = _amount(value)
    if isinstance(amount, Fraction):
        if amount < 0:
            amount = "is negative"
        elif 0 < amount < 1:
            amount = "is less than one byte"
        elif amount > _BYTES_MAX:
            amount = "is 8 EiB or more"
        else:
            return math.ceil(amount)
    raise ValueError(f"{value!r} {amount}; write for example 512MiB, 64Gi, 1TB or a number of bytes")


def _amount(value: object) -> Fraction | str:
    """Exact bytes; or what is wrong with it."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Fraction(value) if isinstance(value, int) or math.isfinite(value) else "is no size"
    match = _SIZE.fullmatch(value) if isinstance(value, str) and len(value) <= _LENGTH_MAX else None
    if match is None or not match[2].strip(".") or (match[3] and match[4]):
        return "is no size"
    sign, number, exponent, unit = match.groups(default="")
    if unit in _FRACTIONS:
        return "has a suffix for fractions of a byte"
    factor = _LETTERS.get(unit) if len(unit) == 1 else _WORDS.get(unit.upper())
    if factor is None:
        return "is no size"
    if sign == "-":
        return "is negative"
    whole, _, parts = number.partition(".")
    return Fraction(f"{whole or 0}.{parts or 0}{exponent}") * factor


def format_byte_count(size_bytes: int) -> str:
    """Bytes -> the shortest honest binary form: `23,040 B`, `2.8 MiB`, `11.2 GiB`."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20)):
        if abs(size_bytes) >= factor:
            return f"{size_bytes / factor:.1f} {unit}"
    return f"{size_bytes:,} B"
