"""Work on an engine that this gateway did not send: other replicas of the gateway, batch jobs, a person with curl.

An engine's counts include ours, and they are as old as the scrape. What is more than this gateway had open at any
moment of the scrape is foreign for certain; less can always be explained by timing and counts as none.
"""

from __future__ import annotations

from typing import NamedTuple

from spillway_gateway.fleet.engine_metrics import EngineReading


class OwnWork(NamedTuple):
    """This gateway's requests on one engine at one moment."""

    requests: int


class ForeignWork(NamedTuple):
    """requests: all of them; waiting_requests: those without a place in the batch. share: all work / own work, for
    what is only known of one's own."""

    requests: int
    waiting_requests: float
    share: float


NO_FOREIGN_WORK = ForeignWork(0, 0.0, 1.0)


def foreign_work(reading: EngineReading, before: OwnWork, after: OwnWork) -> ForeignWork:
    """Pure. before, after: own work when the page was asked for and when it came."""
    own = max(before.requests, after.requests)
    total = reading.waiting_requests + reading.running_requests
    foreign = total - own
    if foreign <= 0:
        return NO_FOREIGN_WORK
    # Nobody says whose requests wait. First come, first served makes them alike.
    return ForeignWork(foreign, foreign * reading.waiting_requests / total, total / max(1, own))
