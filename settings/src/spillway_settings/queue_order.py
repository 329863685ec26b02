"""Choice of the waiting request that is admitted next: the one with the most tokens at hand, within a bound on
overtaking. The rule of an engine's queue and of the gateway's.

In a closed loop least-recently-used evicts what a request that waits is about to use, while others that find less
compute before it. What a request has at hand is what it may lose by waiting. If none has any, the order is that of
arrival: not the shortest prompt's, by which long ones would wait for the bound.

No request starves: one that has waited for the bound is admitted before every younger one, whatever those find, and
such requests are admitted in order of arrival. So only requests that came before it, or within the bound after it, are
ever admitted before it.

Pure: no clock, no queue; times are arguments, in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

CANDIDATES_MAX = 64  # requests at the head of a queue that are compared: a longer queue costs no more
OVERTAKE_SECONDS: float = 4


def admission_order(
    arrived_at: Sequence[float], tokens_at_hand: Callable[[int], int], now: float, overtake_seconds: float
) -> list[int]:
    """The positions of waiting requests, in the order in which they are admitted.

    Args:
        arrived_at: when each came; -inf: no younger one is ever admitted before it. Equal ones keep their order.
        tokens_at_hand: position -> tokens that the request would find; called only for those that may be overtaken.
        now: by the clock of arrived_at.
        overtake_seconds: how long others may be admitted before a request.
    """
    due = [at for at, arrived in enumerate(arrived_at) if now - arrived >= overtake_seconds]
    due.sort(key=arrived_at.__getitem__)
    if len(due) == len(arrived_at):
        return due
    others = [at for at, arrived in enumerate(arrived_at) if now - arrived < overtake_seconds]
    others.sort(key=tokens_at_hand, reverse=True)  # which keeps the order of equal ones
    return due + others


def next_due(arrived_at: Sequence[float], now: float, overtake_seconds: float) -> float:
    """Return when the next of these requests may not be overtaken any more; inf if none of them may be already."""
    return min((at + overtake_seconds for at in arrived_at if now - at < overtake_seconds), default=math.inf)
