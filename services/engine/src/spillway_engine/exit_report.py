"""The reason for an engine's end, in one sentence, from its exit status and the last lines it wrote."""

from __future__ import annotations

import re
import signal
from collections import deque

LINES_KEPT = 400
LINE_CHARACTERS_MAX = 600

_ERROR = re.compile(r"(?:^|[\s\]:])((?:[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)): .+)$")
# Exceptions that vLLM has caught and only tells of, such as that of a chat template it tries at its start.
_CAUGHT = re.compile(r"^(?:\([^)]*\) )?(?:WARNING|INFO|DEBUG) \d\d-\d\d ")
# vLLM's outer processes repeat that something below failed; the cause is an earlier line.
_CONSEQUENCE = re.compile(
    r"Engine core initialization failed|WorkerProc initialization failed|See (?:root cause|stack trace)|EngineDeadError"
)


class OutputTail:
    """The last lines of a byte stream, whole lines only, bounded."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._rest = b""

    def feed(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[-LINE_CHARACTERS_MAX:]
        self._lines.extend(line.decode(errors="replace")[:LINE_CHARACTERS_MAX] for line in lines)

    def lines(self) -> list[str]:
        return [*self._lines, *([self._rest.decode(errors="replace")] if self._rest else [])]


def exit_code_of(status: int) -> int:
    """Popen's return code -> what a shell would report: 128 + signal number for a killed process."""
    return 128 - status if status < 0 else status


def explain_exit(status: int, lines: list[str]) -> str:
    """One plain sentence; `status` is Popen's return code."""
    cause = root_cause(lines)
    if status == -signal.SIGKILL:
        how = "the engine was killed (SIGKILL; most often the memory limit of the machine or container)"
    elif status < 0:
        how = f"the engine died of {signal.Signals(-status).name}"
    else:
        how = f"the engine ended by itself with status {status}"
    return f"{how}: {cause}" if cause else f"{how}; its last lines are above"


def root_cause(lines: list[str]) -> str | None:
    """The first exception line that is not the mere report of an exception elsewhere, or of one that was caught."""
    causes = [match[1] for line in lines if not _CAUGHT.match(line) and (match := _ERROR.search(line))]
    first_hand = [cause for cause in causes if not _CONSEQUENCE.search(cause)]
    return (first_hand or causes or [None])[0]
