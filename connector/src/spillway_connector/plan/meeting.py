"""The chunk at which a prefix meets that is computed from its front and loaded from its back. Pure.

If a tier is slower than computing, loading a whole prefix is a loss, but loading its end is not: computing and loading
go on at the same time, at `c` and `l` chunks a second, and n chunks take n / (c + l) seconds instead of n / c.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import NamedTuple

MARGIN = 0.9  # a meeting may take at most this share of the computation's time, as LoadPolicy.margin
# The request leaves the batch for the steps in which its loaded chunks are copied to the device; a guess at their cost.
JUMP_SECONDS = 0.03
HOLD_SECONDS_MAX = 0.05  # how long a request may wait at the meeting point for chunks that are late
STEP_SECONDS = 0.05  # of computing; shorter steps near the meeting point would cost more than they gain
JOB_SECONDS = 1.0  # of loading; a job that is much longer would be given up at the tier's deadline


class MeetingOutcome(StrEnum):
    """The outcome for a prompt that is computed while its end is loaded. Value of the metric's label."""

    PLANNED = "planned"  # its load was begun
    MET = "met"  # all that was not computed had been loaded: the prompt goes on behind it
    ABANDONED = "abandoned"  # computed to its end, because the load was late or lost; or the request was given up


class Rates(NamedTuple):
    """Chunks a second."""

    computed: float
    loaded: float


def meeting_point(position: float, loaded_from: int, rates: Rates, busy_seconds: float = 0.0) -> int:
    """The first chunk to be loaded, so that the load is not late when computing has got there.

    position: chunks that are computed, or being computed. loaded_from: chunks from here on are loaded. busy_seconds:
    until the device computes behind `position`; loading goes on meanwhile. It is neither before `position` nor behind
    `loaded_from`.
    """
    missing = max(0.0, loaded_from - position - busy_seconds * rates.loaded)
    computed = missing * rates.computed / (rates.computed + rates.loaded)
    return min(loaded_from, math.ceil(position + computed))


def meeting_pays(begin: int, end: int, rates: Rates) -> bool:
    """Whether computing chunks `begin` to `end` takes noticeably longer than meeting a load that comes from `end`."""
    meet = meeting_point(begin, end, rates)
    return meet < end and (meet - begin) / rates.computed + JUMP_SECONDS <= MARGIN * (end - begin) / rates.computed


def step_tokens_max(distance: int, chunk_tokens: int, rates: Rates) -> int:
    """Return the tokens that the next step may compute, `distance` before the meeting point. They are half of the
    distance, because the other half may be loaded sooner than its rate says, or more if half of it takes less than
    STEP_SECONDS to compute, but never more than the whole."""
    shortest = chunk_tokens * max(1, math.ceil(STEP_SECONDS * rates.computed))
    if distance <= 0:
        return shortest
    half = distance // 2 // chunk_tokens * chunk_tokens
    return min(distance, max(half, shortest))


def job_chunks_max(rates: Rates) -> int:
    """Return how many chunks one job may load."""
    return max(1, int(JOB_SECONDS * rates.loaded))
