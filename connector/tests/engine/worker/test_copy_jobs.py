"""Copies are reported once, whichever way they end, and a failure names what it left undefined."""

from __future__ import annotations

from spillway_connector import metrics
from spillway_connector.engine.ipc.samples import sample_key
from spillway_connector.engine.worker.copy_jobs import CopyJobs, EndedCopy, Received, StepReport

YES, NO = (lambda: True), (lambda: False)


class Stores:
    """The transport of stores: takes every copy but those with a side that it refuses."""

    def __init__(self, refuse: str = "") -> None:
        self.refuse = refuse
        self.taken: list[tuple[int, list[str]]] = []

    def __call__(self, copy_id, stores):
        sources = [source for source, _ in stores]
        if self.refuse in sources:
            return False
        self.taken.append((copy_id, sources))
        return True


def make_jobs(refuse: str = "") -> CopyJobs:
    return CopyJobs(Stores(refuse))


def ended(job_id: int, success: bool = True) -> EndedCopy:
    return EndedCopy(job_id, success, 100, 0.5)


def test_a_load_that_fails_steps_later_is_received_with_its_blocks():
    jobs = make_jobs()
    jobs.start_load(1, "a", [5, 6], YES)
    jobs.start_load(2, "b", [7], YES)
    assert jobs.finish([]) == Received()
    assert jobs.take_report() == StepReport()
    assert jobs.finish([ended(1, success=False), ended(2)]) == Received({"a", "b"}, {"a"})
    assert (jobs.take_invalid_blocks(), jobs.take_invalid_blocks()) == ({5, 6}, set())
    assert jobs.take_report() == StepReport({1, 2}, {1})
    assert jobs.take_report() == StepReport()


def test_a_refused_load_ends_with_the_next_look():
    jobs = make_jobs()
    jobs.start_load(1, "a", [5], NO)
    assert jobs.finish([]) == Received({"a"}, {"a"})
    assert jobs.take_invalid_blocks() == {5}
    assert jobs.finish([]) == Received()
    assert jobs.take_report() == StepReport({1}, {1})


def test_the_stores_of_a_step_are_one_copy_and_are_reported_one_by_one():
    jobs = CopyJobs(stores := Stores())
    for job_id, source in ((1, "a"), (2, "b")):
        jobs.queue_store(job_id, (source, ""))
    assert stores.taken == []
    jobs.submit_stores()
    jobs.submit_stores()
    jobs.queue_store(3, ("c", ""))
    jobs.submit_stores()
    assert stores.taken == [(1, ["a", "b"]), (3, ["c"])]
    assert jobs.copies_of({2}) >= {1}, "waiting for a store waits for the copy that it is part of"
    assert 3 not in jobs.copies_of({2})
    assert jobs.finish([ended(3)]) == Received()
    assert jobs.take_report() == StepReport({3})
    assert not jobs.idle
    assert jobs.finish([ended(1, success=False)]) == Received()
    assert jobs.take_report() == StepReport({1, 2}, {1, 2})
    assert jobs.take_invalid_blocks() == set()
    assert jobs.idle


def test_a_store_that_is_refused_fails_alone():
    jobs = CopyJobs(stores := Stores(refuse="b"))
    for job_id, source in ((1, "a"), (2, "b"), (3, "c")):
        jobs.queue_store(job_id, (source, ""))
    jobs.submit_stores()
    assert stores.taken == [(1, ["a"]), (3, ["c"])]
    assert jobs.take_report() == StepReport({2}, {2})
    jobs.finish([ended(1), ended(3)])
    assert jobs.take_report() == StepReport({1, 3})
    jobs.queue_store(4, ("b", ""))
    jobs.submit_stores()
    assert jobs.take_report() == StepReport({4}, {4})


def test_a_load_in_pieces_ends_with_its_last_piece_and_loses_what_any_of_them_lost():
    jobs = make_jobs()
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
    jobs = make_jobs()
    jobs.start_piece(10, 1, "a", ([5], YES), last=False, lost_blocks=[])
    jobs.start_piece(11, 1, "a", ([6], YES), last=True, lost_blocks=[])
    assert jobs.finish([ended(11)]) == Received()
    assert jobs.finish([ended(10)]) == Received({"a"})


def test_idle_means_that_nothing_is_held():
    jobs = make_jobs()
    assert jobs.idle
    jobs.start_load(1, "a", [5], YES)
    jobs.queue_store(2, ("a", ""))
    assert not jobs.idle
    jobs.submit_stores()
    jobs.finish([ended(1, success=False), ended(2)])
    assert not jobs.idle, "the failed blocks and the report are still to be asked for"
    jobs.take_invalid_blocks()
    assert not jobs.idle
    jobs.take_report()
    assert jobs.idle


def test_what_moved_and_what_failed_is_counted():
    jobs = make_jobs()
    jobs.start_load(1, "a", [5], YES)
    jobs.start_load(2, "b", [6], YES)
    jobs.queue_store(3, ("a", ""))
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


def test_the_log_says_how_each_copy_ended(decisions: list[str]):
    jobs = make_jobs()
    jobs.start_load(1, "r", [7], lambda: True)
    jobs.queue_store(2, ([1], [1]))
    jobs.queue_store(3, ([2], [2]))
    jobs.submit_stores()
    jobs.finish([EndedCopy(1, success=True, size_bytes=4096, seconds=0.5), EndedCopy(2, success=False)])
    assert decisions[:2] == [
        "load jobs [1] are copied: 4096 bytes in 0.5 s",
        "store jobs [2, 3] are not copied: None bytes in None s",
    ]
