"""The progress of a walk in one line on a terminal's stderr; nothing if stderr is a file or a pipe."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO

from spillway_connector.tiers.tier import Clock
from spillway_ctl.quantities import format_bytes, format_seconds, plural

REDRAW_SECONDS = 0.2


class ProgressLine:
    """doing: what is done to the frames, e.g. "verified". Call :meth:`show` as often as you like."""

    def __init__(self, doing: str, out: TextIO | None = None, clock: Clock = time.monotonic) -> None:
        self._doing = doing
        self._out = sys.stderr if out is None else out
        self._is_terminal = self._out.isatty()
        self._clock = clock
        self._began = clock()
        self._next = self._began + REDRAW_SECONDS
        self._drawn = False

    def show(self, frames: int, done_bytes: int, share: float | None, extra: str = "") -> None:
        """share: the part of the walk that is done, 0 to 1."""
        now = self._clock()
        if not self._is_terminal or now < self._next:
            return
        self._next = now + REDRAW_SECONDS
        seconds = now - self._began
        parts = [
            f"{self._doing} {plural(frames, 'frame')}",
            format_bytes(done_bytes),
            f"{format_bytes(done_bytes / seconds)}/s" if done_bytes >= seconds else f"{frames / seconds:,.0f} frames/s",
        ]
        if extra:
            parts.append(extra)
        if share:
            left = seconds * (1 - share) / share
            parts.append(f"{share:.0%}, {format_seconds(left)} left")
        width = shutil.get_terminal_size().columns
        self._out.write("\r\x1b[K" + "  ".join(parts)[: width - 1])
        self._out.flush()
        self._drawn = True

    def clear(self) -> None:
        """Take the line away before something else is written."""
        if self._drawn:
            self._out.write("\r\x1b[K")
            self._out.flush()
            self._drawn = False
