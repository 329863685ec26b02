"""The progress that `up` shows: one line per component, redrawn on a terminal, written once per change elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import dataclass
from typing import TextIO

QUIET_SECONDS = 15.0  # without a terminal: interval of repeating an unchanged line
FRAMES = "|/-\\"


@dataclass(frozen=True, slots=True)
class ComponentLine:
    name: str
    state: str  # "ready", "starting", "ended ..."
    seconds: float  # since its start
    detail: str  # last log line or reason


class ProgressDisplay:
    def __init__(self, out: TextIO = sys.stdout, is_terminal: bool | None = None) -> None:
        self._out = out
        self._is_terminal = out.isatty() if is_terminal is None else is_terminal
        self._drawn_lines = 0
        self._shown: dict[str, tuple[str, float]] = {}  # component -> state, when it was last written
        self._frame = 0

    def show(self, lines: list[ComponentLine], now: float | None = None) -> None:
        if self._is_terminal:
            self._redraw(lines)
        else:
            self._append(lines, time.monotonic() if now is None else now)
        self._out.flush()

    def write_line(self, text: str) -> None:
        """Write a permanent line."""
        self._clear()
        print(text, file=self._out, flush=True)

    def finish(self) -> None:
        """Keep the last drawing on the screen."""
        self._drawn_lines = 0

    def _redraw(self, lines: list[ComponentLine]) -> None:
        self._clear()
        width = shutil.get_terminal_size().columns
        self._frame += 1
        for line in lines:
            mark = "✓" if line.state == "ready" else FRAMES[self._frame % len(FRAMES)]
            text = f" {mark} {line.name:<10} {line.state:<12} {line.seconds:5.0f} s  {line.detail}"
            self._out.write(text[: width - 1] + "\n")
        self._drawn_lines = len(lines)

    def _clear(self) -> None:
        if self._drawn_lines:
            self._out.write(f"\x1b[{self._drawn_lines}A\x1b[J")
            self._drawn_lines = 0

    def _append(self, lines: list[ComponentLine], now: float) -> None:
        for line in lines:
            state, written = self._shown.get(line.name, ("", -QUIET_SECONDS))
            due = now - written >= QUIET_SECONDS and line.state != "ready"
            if line.state != state or due:
                self._out.write(f"{line.name:<10} {line.state:<12} {line.seconds:5.0f} s  {line.detail[:150]}\n")
                self._shown[line.name] = (line.state, now)
