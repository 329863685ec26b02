"""The engines that a source reports, and the state of the source itself."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from spillway_gateway.config.settings import EngineConfig


@dataclass(frozen=True, slots=True)
class FoundEngine:
    """instance: names the process behind the address; another one there has another instance and none of its blocks.
    withheld: the reason for which no new request may go there, for people to read; None: requests may go there.
    terminating: its process will end soon, whatever it still has to do."""

    config: EngineConfig
    instance: str = ""
    withheld: str | None = None
    terminating: bool = False


Publish = Callable[[tuple[FoundEngine, ...]], None]


class Source(Protocol):
    async def run(self) -> None:
        """Publish the whole set of engines whenever it has changed, until cancelled."""


class SourceFailed(Exception):
    """The source could not be asked, or its answer is of no use; the engines known before stay.

    reason: one of a closed set, the label of spillway_gateway_discovery_failures_total.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass
class SourceStatus:
    """The status of one model's source. Times are Unix seconds; None: not yet."""

    description: str  # names for people what it asks for engines
    heard_at: float | None = None  # when the source last confirmed its engines
    error: str | None = None  # why the last try failed; None after one that did not
    updates_total: int = 0
    failures: Counter[str] = field(default_factory=Counter)  # by reason

    def heard(self) -> None:
        self.heard_at = time.time()
        self.error = None

    def failed(self, error: SourceFailed) -> bool:
        """Count it. True when it differs from the last one, and belongs into the log."""
        self.failures[error.reason] += 1
        is_new = self.error != str(error)
        self.error = str(error)
        return is_new
