"""Bytes per second in and out of an engine's tiers, from the totals on its /metrics page."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

_TIER = re.compile(rb'[{,]tier="([a-zA-Z0-9_.-]{1,32})"')
_GROUP = re.compile(rb'[{,]group="([a-z0-9-]{1,32})"')  # of KV; engines report it if they have several
_SAMPLES = (
    (b"spillway_kv_group_bytes_total", b'direction="load"', "load"),
    (b"spillway_kv_group_bytes_total", b'direction="store"', "store"),
    (b"spillway_device_copy_bytes_total", b'direction="load"', "load"),
    (b"spillway_device_copy_bytes_total", b'direction="store"', "store"),
    (b"spillway_tier_read_bytes_total", b"", "load"),
    (b"spillway_tier_written_bytes_total", b"", "store"),
)
TIERS_MAX = 48  # of one page; further ones are ignored
STALE_SECONDS = 10.0  # after which the last rate is no longer reported


class Way(NamedTuple):
    """tier: cpu, cpu with a KV group's name, or the shared tier's name. direction: load is towards the device."""

    tier: str
    direction: str


def moved_bytes(page: bytes) -> dict[Way, float]:
    """Totals since the engine's start, summed over its ranks. Pure; what is not a finite number is left out."""
    page = b"\n" + page
    totals: dict[Way, float] = {}
    for name, wanted, direction in _SAMPLES:
        at = page.find(b"\n" + name)
        while at >= 0:
            end = page.find(b"\n", at + 1)
            labels, _, value = page[at + 1 + len(name) : end if end >= 0 else len(page)].rpartition(b"}")
            tier, group = _TIER.search(labels), _GROUP.search(labels)
            part = f"cpu, KV group {group[1].decode()}:" if group else "cpu"
            way = Way(tier[1].decode() if tier else part, direction)
            number = _number(value)
            fits = wanted in labels and (tier is None) == bool(wanted)
            if fits and number is not None and (way in totals or len(totals) < TIERS_MAX):
                totals[way] = totals.get(way, 0.0) + number
            at = page.find(b"\n" + name, at + 1)
    return totals


def _number(text: bytes) -> float | None:
    try:
        value = float(text.split()[0])
    except (IndexError, ValueError):
        return None
    return value if 0 <= value < float("inf") else None


class TierTraffic:
    """Rates between the last two readings of one engine."""

    def __init__(self) -> None:
        self._totals: Mapping[Way, float] = {}
        self._read_at = float("-inf")
        self._rates: dict[Way, float] = {}

    def observed(self, totals: Mapping[Way, float], now: float) -> None:
        """A total below the last one comes from a restarted engine: its counter delta is the whole total."""
        seconds = now - self._read_at
        if 0 < seconds < float("inf"):
            self._rates = {
                way: (total - before if total >= (before := self._totals.get(way, 0.0)) else total) / seconds
                for way, total in totals.items()
            }
        self._totals = totals
        self._read_at = now

    def bytes_per_second(self, now: float) -> Mapping[Way, float]:
        """Return the rates by way; none if the last reading is stale."""
        return self._rates if now - self._read_at <= STALE_SECONDS else {}
