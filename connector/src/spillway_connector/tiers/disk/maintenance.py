"""The thread in which a disk tier removes expired frames and gives space back, also while no stores arrive."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable

from spillway_connector.errors import TierError

_log = logging.getLogger(__name__)

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
        self._stopped = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Does nothing when the thread runs already or was stopped."""
        if self._thread is not None:
            return
        with self._lock:
            if self._thread is None and not self._stopped:
                self._thread = threading.Thread(target=self._run, name="spillway-disk-maintenance", daemon=True)
                self._thread.start()

    def wake(self) -> None:
        """Have it run without waiting for the pause to end. Returns at once; safe from any thread."""
        self._wake.set()

    def stop(self) -> bool:
        """End the thread, waiting at most STOP_SECONDS; it cannot be started again. Returns whether it has ended."""
        with self._lock:  # a thread that is being started can be joined afterwards
            self._stopped = True
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(STOP_SECONDS)
        return not self.is_running

    def _run(self) -> None:
        while True:
            self._wake.wait(self._pause_seconds)
            self._wake.clear()
            if self._stopped:
                return
            maintain = self._maintain()
            if maintain is None:
                return
            try:
                maintain()
            except (TierError, OSError) as error:
                _log.warning("%s: maintenance failed: %s", self._name, error)
            del maintain
