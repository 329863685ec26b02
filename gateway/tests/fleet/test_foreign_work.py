from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.fleet.engine_metrics import EngineReading
from spillway_gateway.fleet.foreign_work import NO_FOREIGN_WORK, foreign_work

counts = st.integers(0, 500)


@given(counts, counts, counts, counts)
def test_never_more_than_the_engine_has_and_never_less_than_none(
    waiting: int, running: int, before: int, after: int
) -> None:
    work = foreign_work(EngineReading(waiting, running), before, after)

    assert 0 <= work.waiting_requests <= work.requests <= waiting + running
    assert work.waiting_requests <= waiting
    assert work.share >= 1


@given(counts, counts, counts)
def test_own_work_at_either_end_of_the_scrape_explains_the_count(waiting: int, running: int, later: int) -> None:
    own = waiting + running

    assert foreign_work(EngineReading(waiting, running), own, later) == NO_FOREIGN_WORK
    assert foreign_work(EngineReading(waiting, running), later, own) == NO_FOREIGN_WORK


def test_waiting_is_shared_in_proportion() -> None:
    work = foreign_work(EngineReading(10, 30), 10, 10)

    assert (work.requests, work.waiting_requests, work.share) == (30, 7.5, 4)
