"""Ages, rates and sizes as people write and read them. Sizes are parsed as in an engine's configuration."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import TypeVar

from spillway_settings.byte_sizes import format_byte_count, parse_byte_count

_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400, "w": 604_800}
_AGE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)")
UNLIMITED = "none"
_Value = TypeVar("_Value")


def parse_age_seconds(text: str) -> float:
    """`90s`, `30m`, `1h`, `7d`, `2w` -> seconds. Raises ValueError."""
    match = _AGE.fullmatch(text.strip().lower())
    if match is None or match[2] not in _SECONDS:
        raise ValueError(f"{text!r} is not an age; write for example 30m, 12h, 7d or 2w")
    return float(match[1]) * _SECONDS[match[2]]


def parse_rate(text: str) -> int | None:
    """`200MiB/s`, `1GiB`, `none` -> bytes per second; None: as fast as it goes. Raises ValueError."""
    if text.strip().lower() == UNLIMITED:
        return None
    try:
        rate = parse_byte_count(text.strip().removesuffix("/s"))
    except ValueError:
        rate = parse_byte_count(0)
    if rate < 1:
        raise ValueError(f"{text!r} is not a rate; write for example 200MiB/s, or {UNLIMITED} for no limit")
    return rate


def format_bytes(size_bytes: float) -> str:
    """`23,040 B`, `2.8 MiB`, `11.2 GiB`."""
    return format_byte_count(int(size_bytes))


def format_seconds(seconds: float) -> str:
    """The two largest units that matter: `0.4 s`, `42 s`, `3 min`, `2 h 5 min`, `1 d 4 h`, `25 d`."""
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    whole = int(seconds)
    if whole < 120:
        return f"{whole} s"
    minutes, hours, days = whole // 60, whole // 3600, whole // 86_400
    if minutes < 120:
        return f"{minutes} min"
    if hours < 24:
        return f"{hours} h {minutes % 60} min" if minutes % 60 else f"{hours} h"
    return f"{days} d {hours % 24} h" if days < 7 and hours % 24 else f"{days} d"


def format_age(now_s: float, then_s: float) -> str:
    """`3 d 4 h ago`; a moment that a wrong clock put into the future is shown as one."""
    if then_s > now_s + 1:
        return f"{format_seconds(then_s - now_s)} in the future"
    return f"{format_seconds(now_s - then_s)} ago"


def format_share(part: float, whole: float) -> str:
    """`62%`; `<1%` if it is less but not zero."""
    share = part / whole if whole else 1.0
    return "<1%" if 0 < share < 0.01 else f"{share:.0%}"


def plural(count: int, noun: str) -> str:
    """`1 frame`, `1,234 frames`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def checked(parse: Callable[[str], _Value]) -> Callable[[str], _Value]:
    """argparse hides the message of a ValueError; this shows it."""

    def parsed(text: str) -> _Value:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed
