"""A job's items, settled by workers and given up by the scheduler in any order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spillway_connector.errors import TierMiss, TierTimeout
from spillway_connector.testing.tier_contract import key_of
from spillway_connector.transfer.jobs import Settled, TransferItem, TransferJob
from spillway_connector.transfer.stats import Operation

steps = st.lists(st.tuples(st.sampled_from(("move", "fail", "copy", "give up")), st.integers(0, 5)), max_size=20)


def job_of(items: int, operation: Operation = Operation.LOAD) -> TransferJob:
    job = TransferJob(1, operation, queued_at=10.0, deadline=20.0)
    job.fill([key_of(number) for number in range(items)], list(range(items)))
    return job


@given(steps, st.sampled_from((Operation.LOAD, Operation.STORE)))
def test_every_key_ends_once_and_the_last_end_is_marked(steps, operation):
    job = job_of(6, operation)
    copied: set[int] = set()
    fate: dict[int, str] = {}
    arrived: list[bytes] = []
    for action, index in steps:
        arrived += job.take_arrived()
        if len(fate) >= 2:
            assert sorted(arrived) == sorted(key_of(number) for number in range(6) if fate.get(number) == "moved")
        else:
            assert arrived == [], "less than a quarter is not reported"
        item = TransferItem(job, index)
        if action == "give up":
            voided = job.give_up(lambda index: TierTimeout(f"late: {index}"))
            expected = [
                number
                for number in range(6)
                if number not in fate and (number not in copied or operation is Operation.STORE)
            ]
            assert {key: str(error) for key, error in voided.items()} == {key_of(n): f"late: {n}" for n in expected}
            fate.update(dict.fromkeys(expected, "given up"))
        elif action == "copy":
            if index not in copied and item.begin_copy():
                item.end_copy()
                copied.add(index)
        elif fate.get(index) in ("moved", "failed"):
            continue  # a worker settles an item once
        else:
            settled = item.settle(TierMiss("gone") if action == "fail" else None, 11.0, 12.0 + index)
            if index in fate:
                assert settled is Settled.LATE
            else:
                fate[index] = "failed" if action == "fail" else "moved"
                assert settled is (Settled.LAST if len(fate) == 6 else Settled.MORE)
        assert job.open_items == 6 - len(fate)
        if not job.open_items:
            assert job.moved() == [key_of(number) for number in range(6) if fate[number] == "moved"]
        assert sorted(job.errors) == sorted(number for number in fate if fate[number] == "failed")


def test_a_job_has_its_workers_time_and_that_of_its_last_chunk():
    job = job_of(3)
    TransferItem(job, 0).settle(None, 11.0, 13.0)
    TransferItem(job, 1).settle(None, 11.0, 12.0)
    TransferItem(job, 2).settle(TierMiss("gone"), 12.0, 15.0)
    assert job.busy_seconds == 6.0
    assert job.outcome().seconds == 3.0, "to the last chunk that was moved"
