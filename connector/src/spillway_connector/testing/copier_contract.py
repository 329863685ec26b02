"""The contract suite of a copier: subclass it in a test module and it runs against yours.

    class TestMyCopier(CopierContract):
        pass

The module provides a pytest fixture ``make_rig``, a callable ``(direction) -> CopierRig``; it closes the copiers and
gives back what they used. Needs no pytest import, so that shipping it costs nothing.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from spillway_connector.device.copier import Copier, CopyResult, Direction
from spillway_connector.errors import DeviceCopyError
from spillway_connector.plan.copies import CopyPlan

Bytes = npt.NDArray[np.uint8]
Span = tuple[int, int, int]
"""Offset in the device memory, offset in the host memory, bytes."""

MEMORY_BYTES = 1 << 16  # of each side of a rig; at least
SPANS: tuple[Span, ...] = ((0, 104, 4096), (9000, 20_000, 8), (30_000, 50_000, 776))
PATIENCE_SECONDS = 30.0  # for what a healthy copier does at once


class CopierRig(Protocol):
    """A copier between two memories, and what can happen to it."""

    copier: Copier
    device: Bytes
    host: Bytes

    def hold(self) -> None:
        """Jobs that are submitted from now on move no byte before :meth:`release`."""

    def release(self) -> None:
        """End the wait; any thread may call this."""

    def fail_next(self) -> None:
        """The copies of the job that is submitted next fail, those of no other. Called with no job in flight."""


MakeRig = Callable[[Direction], CopierRig]


class CopierContract:
    """Every promise of device.copier.Copier that can be seen from outside."""

    def test_a_job_moves_the_bytes_of_its_plan_and_no_others(self, make_rig: MakeRig) -> None:
        for direction in Direction:
            rig = filled(make_rig(direction))
            device, host = expected(rig, direction, [SPANS])
            rig.copier.submit(1, plan_of(rig, SPANS))
            [result] = results(rig.copier, 1)
            assert (result.job_id, result.size_bytes, result.error) == (1, 4880, None)
            assert result.seconds >= 0
            assert np.array_equal(rig.device, device) and np.array_equal(rig.host, host)

    def test_jobs_run_in_the_order_of_their_submission(self, make_rig: MakeRig) -> None:
        """A later job overwrites what an earlier one wrote."""
        for direction in Direction:
            rig = filled(make_rig(direction))
            jobs = random_jobs(seed=3, count=30)
            device, host = expected(rig, direction, jobs)
            for job_id, spans in enumerate(jobs):
                rig.copier.submit(job_id, plan_of(rig, spans))
            assert [result.job_id for result in results(rig.copier, len(jobs))] == list(range(len(jobs)))
            assert np.array_equal(rig.device, device) and np.array_equal(rig.host, host)

    def test_neither_submitting_nor_polling_waits_for_a_copy(self, make_rig: MakeRig) -> None:
        for direction in Direction:
            rig = filled(make_rig(direction))
            before = rig.device.copy(), rig.host.copy()
            rig.hold()
            for job_id in range(3):
                rig.copier.submit(job_id, plan_of(rig, SPANS))
                assert rig.copier.finished() == []
            assert np.array_equal(rig.device, before[0]) and np.array_equal(rig.host, before[1])
            rig.release()
            assert [result.error for result in results(rig.copier, 3)] == [None] * 3

    def test_a_result_is_reported_once(self, make_rig: MakeRig) -> None:
        rig = filled(make_rig(Direction.STORE))
        reported: list[int] = []
        for job_id in range(50):
            rig.copier.submit(job_id, plan_of(rig, SPANS))
            reported += [result.job_id for result in rig.copier.finished()]
        rig.copier.wait(set(range(50)))
        reported += [result.job_id for result in rig.copier.finished()]
        assert reported == list(range(50))
        assert rig.copier.finished() == []

    def test_waiting_ends_when_the_bytes_are_there(self, make_rig: MakeRig) -> None:
        for direction in Direction:
            rig = filled(make_rig(direction))
            device, host = expected(rig, direction, [SPANS])
            released = threading.Event()

            def release(rig: CopierRig = rig, released: threading.Event = released) -> None:
                released.set()
                rig.release()

            rig.hold()
            rig.copier.submit(1, plan_of(rig, SPANS))
            timer = threading.Timer(0.02, release)
            timer.start()
            rig.copier.wait({1, 99})
            assert released.is_set(), "it returned before the copy could run"
            assert np.array_equal(rig.device, device) and np.array_equal(rig.host, host)
            timer.join()
            assert [result.job_id for result in rig.copier.finished()] == [1], "waiting takes no result away"
            rig.copier.wait({1})

    def test_waiting_for_unknown_jobs_returns(self, make_rig: MakeRig) -> None:
        rig = make_rig(Direction.LOAD)
        rig.hold()
        rig.copier.submit(1, plan_of(rig, SPANS))
        rig.copier.wait({2, 3})
        rig.copier.wait(set())
        rig.release()
        results(rig.copier, 1)

    def test_the_caller_may_drop_a_plan_once_it_is_submitted(self, make_rig: MakeRig) -> None:
        rig = filled(make_rig(Direction.STORE))
        spans = [(64 * number, 64 * (999 - number), 32) for number in range(1000)]
        device, host = expected(rig, Direction.STORE, [spans])
        rig.hold()
        rig.copier.submit(1, plan_of(rig, spans))
        churn = [np.full(1000, 7, np.int64) for _ in range(50)]  # takes memory that was freed, if any was
        rig.release()
        assert [result.error for result in results(rig.copier, 1)] == [None]
        assert len(churn) == 50
        assert np.array_equal(rig.device, device) and np.array_equal(rig.host, host)

    def test_a_failed_job_is_reported_and_the_next_one_runs(self, make_rig: MakeRig) -> None:
        for direction in Direction:
            rig = filled(make_rig(direction))
            rig.fail_next()
            rig.copier.submit(1, plan_of(rig, SPANS))
            rig.copier.submit(2, plan_of(rig, SPANS))
            first, second = results(rig.copier, 2)
            assert (first.job_id, second.job_id) == (1, 2)
            assert isinstance(first.error, Exception)
            assert second.error is None
            moved = [(rig.device, at) for at, _, _ in SPANS], [(rig.host, at) for _, at, _ in SPANS]
            for (device, at), (host, to), (_, _, size) in zip(*moved, SPANS, strict=True):
                assert np.array_equal(device[at : at + size], host[to : to + size])

    def test_a_plan_without_copies_ends(self, make_rig: MakeRig) -> None:
        rig = filled(make_rig(Direction.STORE))
        before = rig.host.copy()
        rig.copier.submit(1, plan_of(rig, ()))
        [result] = results(rig.copier, 1)
        assert (result.job_id, result.size_bytes, result.error) == (1, 0, None)
        assert np.array_equal(rig.host, before)

    def test_a_job_id_in_flight_is_refused(self, make_rig: MakeRig) -> None:
        rig = filled(make_rig(Direction.STORE))
        device, host = expected(rig, Direction.STORE, [SPANS])
        rig.hold()
        rig.copier.submit(1, plan_of(rig, SPANS))
        assert isinstance(refusal(rig, 1, [(0, 0, 64)]), DeviceCopyError)
        rig.release()
        assert [result.job_id for result in results(rig.copier, 1)] == [1]
        assert np.array_equal(rig.device, device) and np.array_equal(rig.host, host)
        rig.copier.submit(1, plan_of(rig, SPANS))
        assert [result.job_id for result in results(rig.copier, 1)] == [1], "free again once it was reported"

    def test_closing_finishes_what_was_submitted(self, make_rig: MakeRig) -> None:
        for direction in Direction:
            rig = filled(make_rig(direction))
            jobs = random_jobs(seed=4, count=5)
            device, host = expected(rig, direction, jobs)
            for job_id, spans in enumerate(jobs):
                rig.copier.submit(job_id, plan_of(rig, spans))
            rig.copier.close()
            assert np.array_equal(rig.device, device) and np.array_equal(rig.host, host)
            assert [result.error for result in rig.copier.finished()] == [None] * len(jobs)

    def test_a_closed_copier_refuses_jobs_and_can_be_closed_again(self, make_rig: MakeRig) -> None:
        rig = make_rig(Direction.STORE)
        before = rig.host.copy()
        rig.copier.close()
        rig.copier.close()
        assert isinstance(refusal(rig, 1, SPANS), DeviceCopyError)
        rig.copier.wait({1})
        assert rig.copier.finished() == []
        assert np.array_equal(rig.host, before)


def filled(rig: CopierRig) -> CopierRig:
    """``rig`` with reproducible noise on both sides."""
    lots = np.random.default_rng(5)
    rig.device[:] = lots.integers(0, 255, rig.device.size)
    rig.host[:] = lots.integers(0, 255, rig.host.size)
    return rig


def plan_of(rig: CopierRig, spans: Sequence[Span]) -> CopyPlan:
    columns = np.array(spans, dtype=np.int64).reshape(-1, 3)
    return CopyPlan(
        rig.device.ctypes.data + columns[:, 0],
        rig.host.ctypes.data + columns[:, 1],
        np.ascontiguousarray(columns[:, 2]),
    )


def random_jobs(seed: int, count: int) -> list[list[Span]]:
    """Jobs that overlap each other; within a job no span overlaps another, on either side."""
    lots = random.Random(seed)  # noqa: S311 - reproducible, not secret
    jobs = []
    for _ in range(count):
        places = 32
        cell = MEMORY_BYTES // places
        device, host = (lots.sample(range(places), 8) for _ in range(2))
        jobs.append(
            [(at * cell, to * cell, 8 * lots.randrange(1, cell // 8)) for at, to in zip(device, host, strict=True)]
        )
    return jobs


def expected(rig: CopierRig, direction: Direction, jobs: Iterable[Sequence[Span]]) -> tuple[Bytes, Bytes]:
    """Device and host memory after the jobs were copied one after the other."""
    device, host = rig.device.copy(), rig.host.copy()
    for spans in jobs:
        for at_device, at_host, size in spans:
            if direction is Direction.STORE:
                host[at_host : at_host + size] = device[at_device : at_device + size]
            else:
                device[at_device : at_device + size] = host[at_host : at_host + size]
    return device, host


def results(copier: Copier, count: int) -> list[CopyResult]:
    """The results of the ``count`` jobs in flight, by polling alone; an assertion fails when they do not come."""
    found: list[CopyResult] = []
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} jobs were reported"
        found += copier.finished()
    assert len(found) == count
    return found


def refusal(rig: CopierRig, job_id: int, spans: Sequence[Span]) -> DeviceCopyError | None:
    """Return the error that submitting the job raises; None: the job is accepted."""
    try:
        rig.copier.submit(job_id, plan_of(rig, spans))
    except DeviceCopyError as error:
        return error
    return None
