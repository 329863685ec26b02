"""The contract suite of copiers finds what it is there to find: each broken copier fails the test of its promise."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from spillway_connector.device.copier import CopyResult, Direction
from spillway_connector.device.cpu import HostCopier, copy_spans
from spillway_connector.errors import DeviceCopyError
from spillway_connector.plan.copies import CopyPlan
from spillway_connector.testing.copier_contract import MEMORY_BYTES, CopierContract


class Reversed(HostCopier):
    """Runs the newest job first."""

    def __init__(self, direction: Direction) -> None:
        super().__init__(direction)
        self._jobs.put(None)
        self._thread.join()
        self._waiting: list[tuple[int, CopyPlan]] = []

    def submit(self, job_id: int, plan: CopyPlan) -> None:
        super().submit(job_id, plan)
        self._waiting.append((job_id, plan))

    def finished(self) -> list[CopyResult]:
        self._run_all()
        return super().finished()

    def wait(self, job_ids: set[int]) -> None:
        self._run_all()

    def close(self) -> None:
        self._run_all()

    def _run_all(self) -> None:
        while self._waiting:
            job_id, plan = self._waiting.pop()
            copy_spans(self._direction, plan)
            self._results.put(CopyResult(job_id, plan.total_bytes, 0.0))


class EagerlyFinished(HostCopier):
    """Reports jobs that have not run."""

    def submit(self, job_id: int, plan: CopyPlan) -> None:
        self._running[job_id] = threading.Event()
        self._results.put(CopyResult(job_id, plan.total_bytes, 0.0))


class Repeating(HostCopier):
    """Reports the last result of a call again."""

    _kept: tuple[CopyResult, ...] = ()

    def finished(self) -> list[CopyResult]:
        kept, found = self._kept, super().finished()
        self._kept = tuple(found[-1:])
        return [*kept, *found]


class Impatient(HostCopier):
    def wait(self, job_ids: set[int]) -> None:
        """Returns at once."""


class ConsumingWait(HostCopier):
    def wait(self, job_ids: set[int]) -> None:
        super().wait(job_ids)
        super().finished()


class Shortened(HostCopier):
    """Leaves the last byte of a job out."""

    def submit(self, job_id: int, plan: CopyPlan) -> None:
        sizes = plan.sizes_bytes.copy()
        sizes[-1:] -= 1
        super().submit(job_id, CopyPlan(plan.device_addresses, plan.host_addresses, sizes))


class Silent(HostCopier):
    """Reports failed jobs as successful."""

    def finished(self) -> list[CopyResult]:
        return [CopyResult(result.job_id, result.size_bytes, result.seconds) for result in super().finished()]


class GivesUp(HostCopier):
    """Reports nothing any more after a failure."""

    failed = False

    def finished(self) -> list[CopyResult]:
        found: list[CopyResult] = []
        for result in super().finished():
            if not self.failed:
                found.append(result)
                self.failed = result.error is not None
        return found


class AcceptsTwice(HostCopier):
    """Accepts a job id twice."""

    def submit(self, job_id: int, plan: CopyPlan) -> None:
        self._running.pop(job_id, None)
        super().submit(job_id, plan)


class DropsAtClose(HostCopier):
    def close(self) -> None:
        try:
            while True:
                self._jobs.get_nowait()
        except queue.Empty:
            pass
        super().close()


class NeverClosed(HostCopier):
    """Accepts jobs after its end."""

    def submit(self, job_id: int, plan: CopyPlan) -> None:
        try:
            super().submit(job_id, plan)
        except DeviceCopyError:
            self._results.put(CopyResult(job_id, 0, 0.0))


class Rig:
    def __init__(self, kind: type[HostCopier], direction: Direction) -> None:
        self.device, self.host = (np.zeros(MEMORY_BYTES, np.uint8) for _ in range(2))
        self.open, self.failing = threading.Event(), False
        self.open.set()
        self.copier = kind(direction)

    def hold(self) -> None:
        self.open.clear()

    def release(self) -> None:
        self.open.set()

    def fail_next(self) -> None:
        self.failing = True


@pytest.fixture
def make_rig_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[type[HostCopier], Direction], Rig]]:
    rigs: list[Rig] = []

    def copy(direction: Direction, plan: CopyPlan) -> None:
        rigs[-1].open.wait(30)
        failing, rigs[-1].failing = rigs[-1].failing, False
        if failing:
            raise OSError(14, "bad address")
        copy_spans(direction, plan)

    def make(kind: type[HostCopier], direction: Direction) -> Rig:
        rigs.append(Rig(kind, direction))
        return rigs[-1]

    monkeypatch.setattr("spillway_connector.device.cpu.copy_spans", copy)
    yield make
    for rig in rigs:
        rig.release()
        rig.copier.close()


@pytest.mark.parametrize(
    ("kind", "promise"),
    [
        (Shortened, "test_a_job_moves_the_bytes_of_its_plan_and_no_others"),
        (Reversed, "test_jobs_run_in_the_order_of_their_submission"),
        (Reversed, "test_closing_finishes_what_was_submitted"),
        (EagerlyFinished, "test_neither_submitting_nor_polling_waits_for_a_copy"),
        (Repeating, "test_a_result_is_reported_once"),
        (Impatient, "test_waiting_ends_when_the_bytes_are_there"),
        (ConsumingWait, "test_waiting_ends_when_the_bytes_are_there"),
        (Silent, "test_a_failed_job_is_reported_and_the_next_one_runs"),
        (GivesUp, "test_a_failed_job_is_reported_and_the_next_one_runs"),
        (AcceptsTwice, "test_a_job_id_in_flight_is_refused"),
        (DropsAtClose, "test_closing_finishes_what_was_submitted"),
        (NeverClosed, "test_a_closed_copier_refuses_jobs_and_can_be_closed_again"),
    ],
)
def test_a_broken_promise_is_found(
    make_rig_of: Callable[[type[HostCopier], Direction], Rig],
    kind: type[HostCopier],
    promise: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    getattr(CopierContract(), promise)(lambda direction: make_rig_of(HostCopier, direction))
    monkeypatch.setattr("spillway_connector.testing.copier_contract.PATIENCE_SECONDS", 1.0)
    with pytest.raises(AssertionError):
        getattr(CopierContract(), promise)(lambda direction: make_rig_of(kind, direction))
