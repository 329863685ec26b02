"""Requests on an engine that this gateway did not send: other replicas of the gateway, batch jobs, a person with curl.

An engine's counts include this gateway's requests and are as old as the scrape. Requests beyond those that this gateway
had open at any moment of the scrape are foreign for certain; fewer can be explained by timing and count as none.
"""

from __future__ import annotations

from typing import NamedTuple

from spillway_gateway.fleet.engine_metrics import EngineReading


class ForeignWork(NamedTuple):
    """requests: all foreign requests. waiting_requests: foreign requests outside the running batch. share: all
    requests over this gateway's, to scale figures that are known for this gateway's requests only."""

    requests: int
    waiting_requests: float
    share: float


NO_FOREIGN_WORK = ForeignWork(0, 0.0, 1.0)


def foreign_work(reading: EngineReading, own_before: int, own_after: int) -> ForeignWork:
    """Pure. own_before, own_after: this gateway's requests on the engine when the page was requested and when it
    arrived."""
    own = max(own_before, own_after)
    total = reading.waiting_requests + reading.running_requests
    foreign = total - own
    if foreign <= 0:
        return NO_FOREIGN_WORK
    # The page does not tell whose requests wait; with first come, first served all senders wait alike.
    return ForeignWork(foreign, foreign * reading.waiting_requests / total, total / max(1, own))
