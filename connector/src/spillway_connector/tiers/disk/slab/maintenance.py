"""The thread that keeps house for a slab tier, also while nobody stores: what has expired leaves, and where others need
the disk, chunks are given back."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable

from spillway_connector.errors import TierError

_log = logging.getLogger(__name__)

STOP_SECONDS = 1.0  # bounds how long a thread stuck in a dead disk holds up the engine's exit; it is a daemon


class Housekeeper:
    """Calls ``keep_house``, a method, every ``pause_seconds`` until :meth:`stop`, or until its object is forgotten.

    TierError and OSError are logged. ``what``: begins the line.
    """

    def __init__(self, what: str, keep_house: Callable[[], None], pause_seconds: float) -> None:
        self._what = what
        self._keep_house = weakref.WeakMethod(keep_house)
        self._pause_seconds = pause_seconds
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Harmless when it runs already, or was stopped."""
        if self._thread is not None:
            return
        with self._lock:
            if self._thread is None and not self._stopped.is_set():
                self._thread = threading.Thread(target=self._run, name="spillway-slab-house", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        with self._lock:
            self._stopped.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        while not self._stopped.wait(self._pause_seconds):
            keep_house = self._keep_house()
            if keep_house is None:
                return
            try:
                keep_house()
            except (TierError, OSError) as error:
                _log.warning("%s: housekeeping failed: %s", self._what, error)
            del keep_house
