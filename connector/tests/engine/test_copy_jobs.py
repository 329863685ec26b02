"""Copies are reported once, whichever way they end, and a failure names what it left undefined."""

from __future__ import annotations

from spillway_connector import metrics
from spillway_connector.engine.copy_jobs import CopyJobs, EndedCopy, Received, StepReport
from spillway_connector.engine.samples import sample_key

YES, NO = (lambda: True), (lambda: False)


def ended(job_id: int, success: bool = True) -> EndedCopy:
    return EndedCopy(job_id, success, 100, 0.5)


def test_a_load_that_fails_steps_later_is_received_with_its_blocks():
    jobs = CopyJobs()
    jobs.start_load(1, "a", [5, 6], YES)
    jobs.start_load(2, "b", [7], YES)
    assert jobs.finish([]) == Received()
    assert jobs.take_report() == StepReport()
    assert jobs.finish([ended(1, success=False), ended(2)]) == Received({"a", "b"}, {"a"})
    assert (jobs.take_invalid_blocks(), jobs.take_invalid_blocks()) == ({5, 6}, set())
    assert jobs.take_report() == StepReport({1, 2}, {1})
    assert jobs.take_report() == StepReport()


def test_a_refused_load_ends_with_the_next_look():
    jobs = CopyJobs()
    jobs.start_load(1, "a", [5], NO)
    assert jobs.finish([]) == Received({"a"}, {"a"})
    assert jobs.take_invalid_blocks() == {5}
    assert jobs.finish([]) == Received()
    assert jobs.take_report() == StepReport({1}, {1})


def test_a_store_is_submitted_when_asked_and_fails_alone():
    submitted: list[int] = []
    jobs = CopyJobs()
    for job_id in (1, 2):
        jobs.queue_store(job_id, lambda job_id=job_id: submitted.append(job_id) or job_id == 1)
    assert submitted == []
    jobs.submit_stores()
    jobs.submit_stores()
    assert submitted == [1, 2]
    assert jobs.take_report() == StepReport({2}, {2})
    assert jobs.finish([ended(1, success=False)]) == Received()
    assert jobs.take_report() == StepReport({1}, {1})
    assert jobs.take_invalid_blocks() == set()


def test_a_load_in_pieces_ends_with_its_last_piece_and_loses_what_any_of_them_lost():
    jobs = CopyJobs()
    jobs.start_piece(10, 1, "a", ([5], YES), last=False, lost_blocks=[])
    jobs.start_piece(11, 1, "a", ([6], NO), last=False, lost_blocks=[])
    jobs.start_piece(12, 1, "a", ([7], YES), last=False, lost_blocks=[])
    assert jobs.copies_of({1}) == {1, 10, 12}
    assert jobs.is_load(10)
    assert jobs.finish([ended(10), ended(12, success=False)]) == Received()
    jobs.start_piece(13, 1, "a", None, last=True, lost_blocks=[8, 9])
    assert jobs.finish([]) == Received({"a"}, {"a"})
    assert jobs.take_invalid_blocks() == {6, 7, 8, 9}
    assert jobs.take_report() == StepReport({1}, {1})
    assert jobs.finish([]) == Received()


def test_a_load_whose_last_piece_overtook_another_still_waits_for_it():
    jobs = CopyJobs()
    jobs.start_piece(10, 1, "a", ([5], YES), last=False, lost_blocks=[])
    jobs.start_piece(11, 1, "a", ([6], YES), last=True, lost_blocks=[])
    assert jobs.finish([ended(11)]) == Received()
    assert jobs.finish([ended(10)]) == Received({"a"})


def test_idle_means_that_nothing_is_held():
    jobs = CopyJobs()
    assert jobs.idle
    jobs.start_load(1, "a", [5], YES)
    jobs.queue_store(2, YES)
    assert not jobs.idle
    jobs.submit_stores()
    jobs.finish([ended(1, success=False), ended(2)])
    assert not jobs.idle, "the failed blocks and the report are still to be asked for"
    jobs.take_invalid_blocks()
    assert not jobs.idle
    jobs.take_report()
    assert jobs.idle


def test_what_moved_and_what_failed_is_counted():
    jobs = CopyJobs()
    jobs.start_load(1, "a", [5], YES)
    jobs.start_load(2, "b", [6], YES)
    jobs.queue_store(3, YES)
    jobs.submit_stores()
    jobs.finish([ended(1), ended(2, success=False), ended(3)])
    counted = jobs.take_samples().samples()
    assert counted == {
        sample_key(metrics.DEVICE_COPY_BYTES, "load"): 100,
        sample_key(metrics.DEVICE_COPY_SECONDS, "load"): 0.5,
        sample_key(metrics.DEVICE_COPY_FAILURES, "load"): 1,
        sample_key(metrics.DEVICE_COPY_BYTES, "store"): 100,
        sample_key(metrics.DEVICE_COPY_SECONDS, "store"): 0.5,
    }
    assert not jobs.take_samples()
