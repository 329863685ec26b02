"""Rendezvous (highest random weight) hashing with bounded loads.

Replicas of the gateway rank engines alike without communication, and removing an engine moves only its keys.
Rendezvous hashing: D. Thaler and C. Ravishankar, Using name-based mappings to increase hit rates, IEEE/ACM Transactions
on Networking, 1998. Bounded loads: V. Mirrokni, M. Thorup and M. Zadimoghaddam, Consistent hashing with bounded loads,
2016.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import xxhash


def weight(engine_name: str, key: int) -> int:
    """Weight of an engine for a key: uniform, 64 bits, the same in every process."""
    return xxhash.xxh3_64_intdigest(engine_name.encode(), key)


def ranked(engine_names: Sequence[str], key: int) -> list[str]:
    """All names, best first. A total order: equal weights fall back to the name."""
    return sorted(engine_names, key=lambda name: (-weight(name, key), name))


def load_bound(running_requests: Collection[int], bounded_load_factor: float) -> int:
    """Requests in flight that an engine may have, the one to be placed included. running_requests: of each engine."""
    mean = (sum(running_requests) + 1) / len(running_requests)
    return math.ceil(bounded_load_factor * mean)


def pick_bounded(running_requests: Mapping[str, int], key: int, bounded_load_factor: float) -> str:
    """Best-ranked engine whose load stays within `bounded_load_factor` times the mean, this request included.

    running_requests: name -> requests in flight; not empty. Some engine always fits, as the bound is at least the mean.
    """
    bound = load_bound(running_requests.values(), bounded_load_factor)
    for name in ranked(list(running_requests), key):
        if running_requests[name] + 1 <= bound:
            return name
    return min(running_requests, key=lambda name: (running_requests[name], name))
