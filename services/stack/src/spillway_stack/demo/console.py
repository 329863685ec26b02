"""Terminal output of the demo: permanent lines, and one status line with a clock."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from typing import TextIO

REDRAW_SECONDS = 0.2
_CLEAR_LINE = "\r\x1b[K"


class Console:
    """A console whose status line is redrawn in place on a terminal and written once elsewhere."""

    def __init__(self, out: TextIO | None = None, is_terminal: bool | None = None) -> None:
        self._out = out if out is not None else sys.stdout
        self.is_terminal = self._out.isatty() if is_terminal is None else is_terminal

    def write_line(self, text: str = "") -> None:
        print(text, file=self._out, flush=True)

    @contextlib.contextmanager
    def status(self, text: str) -> Iterator[None]:
        """Show `text` while the block runs; a thread redraws the clock."""
        if not self.is_terminal:
            print(f"  ... {text}", file=self._out, flush=True)
            yield
            return
        over = threading.Event()
        clock = threading.Thread(target=self._draw, args=(text, over), daemon=True)
        clock.start()
        try:
            yield
        finally:
            over.set()
            clock.join()
            self._out.write(_CLEAR_LINE)
            self._out.flush()

    def _draw(self, text: str, over: threading.Event) -> None:
        started = time.monotonic()
        while True:
            line = f"  {text} ({time.monotonic() - started:.0f} s)"
            # A line that wrapped could not be cleared again.
            self._out.write(_CLEAR_LINE + line[: shutil.get_terminal_size().columns - 1])
            self._out.flush()
            if over.wait(REDRAW_SECONDS):
                return
