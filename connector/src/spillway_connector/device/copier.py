"""The contract between the plan of a copy and the hardware that carries it out."""

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
    """The end of one job; `error` is why its bytes must not be trusted."""

    job_id: int
    size_bytes: int
    seconds: float
    error: Exception | None = None


class Copier(Protocol):
    """Carries out the plans of one direction, in order. All methods are called on the model thread."""

    def submit(self, job_id: int, plan: CopyPlan) -> None:
        """Start a job; returns at once. Raises DeviceCopyError when the transport refuses it."""

    def finished(self) -> list[CopyResult]:
        """Jobs that ended since the last call, each exactly once."""

    def wait(self, job_ids: set[int]) -> None:
        """Block until these jobs no longer touch memory; unknown ids count as done."""

    def close(self) -> None:
        """Finish what was submitted and release threads, streams and events."""
