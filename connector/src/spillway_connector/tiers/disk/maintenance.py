"""The thread in which a disk tier removes expired frames and gives space back, also while no stores arrive."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable

from spillway_connector.errors import TierError

_log = logging.getLogger(__name__)

REST_SECONDS = 0.05  # after a wake, so that those which follow it cost one run
STOP_SECONDS = 1.0  # bounds how long a thread stuck in an unresponsive disk delays the engine's exit; it is a daemon


class MaintenanceThread:
    """Calls ``maintain``, a bound method, every ``pause_seconds``, and soon after each :meth:`wake`.

    Ends with :meth:`stop`, or when the object that the method is bound to is garbage collected. TierError and OSError
    are logged; ``name`` begins the line.
    """

    def __init__(self, name: str, maintain: Callable[[], None], pause_seconds: float) -> None:
        self._name = name
        self._maintain = weakref.WeakMethod(maintain)
        self._pause_seconds = pause_seconds
        self._wake = threading.Event()
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start the thread, unless it runs already or was stopped."""
        if self._thread is not None:
            return
        with self._lock:
            if self._thread is None and not self._stopped.is_set():
                self._thread = threading.Thread(target=self._run, name="spillway-disk-maintenance", daemon=True)
                self._thread.start()

    def wake(self) -> None:
        """Make the thread run before its pause ends. Returns at once; safe from any thread."""
        if not self._wake.is_set():
            self._wake.set()

    def stop(self) -> bool:
        """End the thread, waiting at most STOP_SECONDS; it cannot be started again. Returns whether it has ended."""
        with self._lock:  # a thread that is being started can be joined afterwards
            self._stopped.set()
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(STOP_SECONDS)
        return not self.is_running

    def _run(self) -> None:
        while True:
            if self._wake.wait(self._pause_seconds):
                self._stopped.wait(REST_SECONDS)
            self._wake.clear()
            if self._stopped.is_set():  # looked at last: clearing takes the wake of a stop away, too
                return
            maintain = self._maintain()
            if maintain is None:
                return
            try:
                maintain()
            except (TierError, OSError) as error:
                _log.warning("%s: maintenance failed: %s", self._name, error)
            del maintain
