"""Pauses of vLLM 0.23 with modes `wait` and `keep`, and sleeps behind them.

vLLM 0.23 takes a pause for complete once no request runs. A request that waits for a load does not run, but a rank
still writes to its blocks: the reset that a pause then makes failed in an idle callback, where nothing catches it, and
the engine core ended; and a sleep would have taken the memory away under the copy. Here a paused engine steps on until
its copies have ended, as vLLM does in later versions, and what fails at the end of a pause is the answer to its caller.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from vllm.v1.core.sched.interface import PauseState

from spillway_connector.engine.patches.own_connector import own_connector

logger = logging.getLogger(__name__)


@runtime_checkable
class CopyingConnector(Protocol):
    """A connector whose ranks copy between steps."""

    def copies_under_way(self) -> bool: ...

    @property
    def steps_without_requests(self) -> bool: ...


def waiting_has_requests(original: Any) -> Callable[[Any], bool]:
    """Wrap Scheduler.has_requests: an engine steps while it is paused and its connector copies, and while the connector
    has something to do without requests."""

    def has_requests(self: Any) -> bool:
        if original(self):
            return True
        connector = own_connector(self, CopyingConnector)  # type: ignore[type-abstract]
        if connector is None:
            return False
        paused = self.pause_state is not PauseState.UNPAUSED
        return connector.steps_without_requests or (paused and connector.copies_under_way())

    return has_requests


def answering_notify(_: Any) -> Callable[[Any], None]:
    """Wrap EngineCoreProc._notify_idle_state_callbacks so that a failure is the answer to the pause's caller."""

    def notify(self: Any) -> None:
        while self._idle_state_callbacks:
            callback = self._idle_state_callbacks.pop()
            try:
                callback(self)
            except Exception as error:
                future = getattr(callback, "keywords", {}).get("future")
                if future is None or future.done():
                    raise
                logger.exception("The pause did not end as it should")
                future.set_exception(error)

    return notify
