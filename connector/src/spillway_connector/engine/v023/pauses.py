"""Pauses of vLLM 0.23 with modes `wait` and `keep`, and sleeps behind them.

vLLM 0.23 takes a pause for complete once no request runs. A request that waits for a load does not run, but a rank
still writes to its blocks: the reset that a pause then makes failed in an idle callback, where nothing catches it, and
the engine core ended; and a sleep would have taken the memory away under the copy. Here a paused engine steps on until
its copies have ended, as vLLM does in later versions, and what fails at the end of a pause is the answer to its caller.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, Protocol, runtime_checkable

from vllm.v1.core.sched.interface import PauseState

from spillway_connector.engine.generation import own_class
from spillway_connector.engine.own_connector import own_connector

logger = logging.getLogger(__name__)

_MARK = "_spillway_pauses"


@runtime_checkable
class CopyingConnector(Protocol):
    """A connector whose ranks copy between steps."""

    def copies_under_way(self) -> bool: ...


def install_pauses() -> None:
    """Patch vLLM's schedulers and engine cores of this process. Idempotent."""
    from vllm.v1.engine.core import EngineCoreProc

    scheduler = own_class("vllm.v1.core.sched.scheduler", "Scheduler")
    original = scheduler.has_requests
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def has_requests(self: Any) -> bool:
        if original(self):
            return True
        if self.pause_state is PauseState.UNPAUSED:
            return False
        connector = own_connector(self, CopyingConnector)  # type: ignore[type-abstract]
        return connector is not None and connector.copies_under_way()

    @functools.wraps(EngineCoreProc._notify_idle_state_callbacks)
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

    setattr(has_requests, _MARK, True)
    scheduler.has_requests = has_requests
    EngineCoreProc._notify_idle_state_callbacks = notify
