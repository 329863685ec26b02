"""The contract of a copier: what turns the plan of a copy into copies between device and host memory."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

from spillway_connector.plan.copies import CopyPlan


class Direction(enum.Enum):
    STORE = "store"  # device -> host
    LOAD = "load"  # host -> device


@dataclass(frozen=True, slots=True)
class CopyResult:
    """The end of one job. error: why the target's bytes are undefined; None after a complete copy.

    seconds: time that the copies took, without the time that the job waited for its turn.
    """

    job_id: int
    size_bytes: int
    seconds: float
    error: Exception | None = None


class Copier(Protocol):
    """Carries out the plans of one direction. All methods are called on the model thread, in the worker process.

    Jobs run one after the other in the order of their submission, and behind the computation that was enqueued before
    :meth:`submit`: a store reads what it wrote, a load overwrites nothing that it still reads. The spans of one plan
    do not overlap, and run in any order. From submit until its result a job may touch the memory of its plan; the
    plan's own arrays belong to the copier and must not change. ``testing.copier_contract`` is the test suite of this
    contract.
    """

    def submit(self, job_id: int, plan: CopyPlan, *, awaited: bool = False) -> None:
        """Start a job; returns without waiting for any copy.

        awaited: :meth:`hold_computation` will be called for it.
        Raises DeviceCopyError when the transport refuses the job (closed, too many jobs in flight, `job_id` in flight):
        then it touches no memory and has no result.
        """

    def finished(self) -> list[CopyResult]:
        """Jobs that ended since the last call, each exactly once, in their order; a plan without copies may come early.

        Never waits. A job that failed on the way is here with its error, and later jobs still run.
        """

    def wait(self, job_ids: set[int]) -> None:
        """Block until these jobs no longer touch memory; unknown ids count as ended. Their results stay for `finished`.

        Raises nothing: a transport that fails ends its jobs with an error.
        """

    def hold_computation(self, job_id: int) -> Exception | None:
        """Make the computation that is launched from here on wait for an awaited job; unknown ids count as ended.

        The device waits, not the host, unless the host computes or the runtime's events serve only once.
        Returns why the job has failed, if that is known by now; its result has the reason, too.
        """

    def close(self) -> None:
        """Finish what was submitted and release threads, streams and events. May be called twice.

        Results stay for `finished`; `submit` raises from now on.
        """
