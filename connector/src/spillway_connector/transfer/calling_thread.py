"""A thread whose calls to a tier may never end (a hung NFS): another one then takes its place."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from spillway_connector.errors import RefusedReason, TierError, TierRefused

_log = logging.getLogger(__name__)

STUCK_SECONDS = 5.0  # after its deadline a call counts as one that does not end
LOST_MAX = 4  # threads in such calls at a time; beyond that the last one is waited for


class Call:
    """deadline: the deadline of the call that the thread is in; None between calls. lost: the thread ends when its
    call does."""

    __slots__ = ("deadline", "lost")

    def __init__(self) -> None:
        self.deadline: float | None = None
        self.lost = False


class CallingThread:
    """Runs ``body`` in a daemon thread, with a :class:`Call` in which it notes what it does."""

    def __init__(self, name: str, body: Callable[[Call], None]) -> None:
        self._name = name
        self._body = body
        self._lost: list[threading.Thread] = []
        self._start()

    def _start(self) -> None:
        self._call = Call()
        self._thread = threading.Thread(target=self._body, args=(self._call,), name=self._name, daemon=True)
        self._thread.start()

    def replace_if_stuck(self, now: float) -> None:
        deadline = self._call.deadline
        if deadline is None or now < deadline + STUCK_SECONDS:
            return
        self._lost = [thread for thread in self._lost if thread.is_alive()]
        if len(self._lost) >= LOST_MAX:
            return
        self._call.lost = True
        self._lost.append(self._thread)
        late = now - deadline
        _log.warning("%s: a call has not ended %.0f s after its deadline; another thread goes on", self._name, late)
        self._start()

    def join(self, timeout_seconds: float) -> None:
        self._thread.join(timeout_seconds)


def as_tier_error(error: Exception) -> TierError:
    """The error itself, or a refusal of a tier that broke its contract, whose cause it is."""
    if isinstance(error, TierError):
        return error
    failure = TierRefused(RefusedReason.OTHER, f"the tier raised {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
