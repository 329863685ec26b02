"""A tier that every prompt meets: it counts as slower than computing, at fixed rates, whatever the machine does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

CHUNKS_COMPUTED_PER_SECOND, CHUNKS_LOADED_PER_SECOND = 15.0, 9.0  # so that a prompt takes several steps


@contextmanager
def met_loads() -> Iterator[Callable[[], int]]:
    """For engines of this process, while the block lasts. Yields what counts the requests that met their load."""
    from spillway_connector.engine.prefix_lookup import PrefixLookupManager
    from spillway_connector.engine.v023.meetings import Meetings
    from spillway_connector.plan.load_cost import LoadGate
    from spillway_connector.plan.meeting import Rates

    found: list[Meetings] = []
    pays, rates, build = LoadGate.pays, PrefixLookupManager.rates, Meetings.__init__

    def remember(meetings: Meetings, *arguments: Any) -> None:
        build(meetings, *arguments)
        found.append(meetings)

    LoadGate.pays = lambda gate, prefill_rate: False  # type: ignore[method-assign]
    PrefixLookupManager.rates = lambda manager: Rates(  # type: ignore[method-assign]
        CHUNKS_COMPUTED_PER_SECOND, CHUNKS_LOADED_PER_SECOND
    )
    Meetings.__init__ = remember  # type: ignore[method-assign]
    try:
        yield lambda: sum(meetings.jumps for meetings in found)
    finally:
        LoadGate.pays, PrefixLookupManager.rates = pays, rates  # type: ignore[method-assign]
        Meetings.__init__ = build  # type: ignore[method-assign]
