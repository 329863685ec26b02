"""A tier that every prompt meets: it counts as slower than computing, at fixed rates, whatever the machine does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

CHUNKS_COMPUTED_PER_SECOND, CHUNKS_LOADED_PER_SECOND = 15.0, 9.0  # so that a prompt takes several steps
_GIVE_UP_SECONDS = 600.0  # for the test's sake; no disk takes so long


@contextmanager
def met_loads() -> Iterator[Callable[[], int]]:
    """Let requests of this process's engines meet their loads while the block lasts. Yields a count of those that did.

    The engine goes on once what it asked for is there: a machine that computes a tiny model sooner than it reads a file
    would meet nothing.
    """
    from spillway_connector.engine.features.meetings import Meeting, Meetings
    from spillway_connector.engine.manager.prefix_lookup import PrefixLookupManager
    from spillway_connector.plan.load_cost import LoadGate
    from spillway_connector.plan.meeting import Rates

    found: list[Meetings] = []
    pays, rates, build = LoadGate.pays, PrefixLookupManager.rates, Meetings.__init__
    promote = Meetings._promote

    def remember(meetings: Meetings, *arguments: Any) -> None:
        build(meetings, *arguments)
        found.append(meetings)

    def promote_and_wait(meetings: Meetings, meeting: Meeting, meet: int, given: Rates) -> None:
        before = meeting.asked_from
        promote(meetings, meeting, meet, given)
        _wait_until_ready(meetings, meeting.keys[meeting.asked_from : before])

    LoadGate.pays = lambda gate, prefill_rate: False  # type: ignore[method-assign]
    PrefixLookupManager.rates = lambda manager: Rates(  # type: ignore[method-assign]
        CHUNKS_COMPUTED_PER_SECOND, CHUNKS_LOADED_PER_SECOND
    )
    Meetings.__init__ = remember  # type: ignore[method-assign]
    Meetings._promote = promote_and_wait  # type: ignore[method-assign]
    try:
        yield lambda: sum(meetings.jumps for meetings in found)
    finally:
        LoadGate.pays, PrefixLookupManager.rates = pays, rates  # type: ignore[method-assign]
        Meetings.__init__, Meetings._promote = build, promote  # type: ignore[method-assign]


def _wait_until_ready(meetings: Any, keys: Sequence[bytes]) -> None:
    """Wait on the scheduler's thread. Raises TimeoutError if some of the chunks do not reach the CPU tier."""
    manager = meetings._manager
    deadline = time.monotonic() + _GIVE_UP_SECONDS
    while not manager.primary_tier.ready.issuperset(keys):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(keys)} chunks were not loaded")
        time.sleep(0.001)
        manager._process_finished_jobs()
    manager.end_lookups()
