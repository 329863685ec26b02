"""Ctrl-C takes effect between two frames, never within one: the store stays intact, the progress is reported."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interruption:
    """Set by the first SIGINT or SIGTERM; a second one ends the process at once."""

    def __init__(self) -> None:
        self._asked = threading.Event()

    @property
    def asked(self) -> bool:
        return self._asked.is_set()

    def ask(self) -> None:
        self._asked.set()

    def wait(self, seconds: float) -> None:
        """Sleep, but not through an interruption."""
        self._asked.wait(seconds)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Catch the signals; for the main thread."""

        def note(number: int, frame: FrameType | None) -> None:
            self.ask()
            signal.signal(number, signal.SIG_DFL)

        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
