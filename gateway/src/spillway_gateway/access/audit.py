"""Audit log: one JSON line per request with tenant, model, engine, outcome and usage. No text of prompts or replies.

    {"time": "2026-01-31T12:00:00.123Z", "request_id": "...", "trace_id": "...", "tenant": "search", "model": "m",
     "path": "/v1/chat/completions", "engine": "engine-0", "route": "prefix", "status": 200, "error": null,
     "stream": true, "prompt_tokens": 812, "cached_tokens": 768, "completion_tokens": 64, "milliseconds": 913.2,
     "first_byte_milliseconds": 88.1, "retained_token_hours": null}

Anybody may send requests without a key that is known here. At most REFUSALS_PER_SECOND of them get a line in the long
run, so that they do not fill the disk; the others are counted.

A thread writes, so a slow disk or pipe delays no stream. The queue of lines is bounded, and dropped lines are counted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from spillway_gateway.config.settings import AuditConfig
from spillway_gateway.errors import ConfigError

logger = logging.getLogger(__name__)

CLOSE_SECONDS_MAX = 2.0
REFUSALS_PER_SECOND = 10.0  # lines about callers without a tenant; 370 bytes each, so 320 MB a day at most
REFUSALS_BURST = 100.0
UNKNOWN_CALLER = 401  # status: no API key, or none that is known here
_encode = msgspec.json.encode


class AuditLine(msgspec.Struct, kw_only=True):
    """Fields in the order in which they are written. tenant, engine, route: None if there is none."""

    time: str
    request_id: str
    trace_id: str | None
    tenant: str | None
    model: str | None
    path: str
    engine: str | None = None
    route: str | None = None
    status: int
    error: str | None = None
    stream: bool = False
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    milliseconds: float
    first_byte_milliseconds: float | None = None
    retained_token_hours: float | None = None


def now_text() -> str:
    """The time in UTC, ISO 8601 with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class AuditLog:
    """Owns the writing thread. Raises ConfigError when its file cannot be opened. clock: monotonic seconds.

    dropped_total: lines that were lost. refusals_unwritten_total: refusals of unknown callers beyond their bound.
    """

    def __init__(self, config: AuditConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._refusals_left = REFUSALS_BURST
        self._refused_at = clock()
        self.refusals_unwritten_total = 0
        self._path = Path(config.file) if config.file is not None else None
        self._lines: queue.Queue[AuditLine | None] = queue.Queue(config.waiting_lines_max)
        self.dropped_total = 0
        self._opened_inode = -1
        self._descriptor = self._open() if self._path is not None else sys.stdout.fileno()
        self._thread = threading.Thread(target=self._write_all, name="audit", daemon=True)
        self._thread.start()

    def write(self, line: AuditLine) -> None:
        """Queue a line; drop and count it when the queue is full. On the event loop; does not block."""
        if line.tenant is None and line.status == UNKNOWN_CALLER and not self._may_write_refusal():
            self.refusals_unwritten_total += 1
            return
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self.dropped_total += 1

    def _may_write_refusal(self) -> bool:
        now = self._clock()
        left = self._refusals_left + (now - self._refused_at) * REFUSALS_PER_SECOND
        self._refusals_left, self._refused_at = min(REFUSALS_BURST, left), now
        if self._refusals_left < 1:
            return False
        self._refusals_left -= 1
        return True

    def close(self) -> None:
        """Write the queued lines and end the thread, within twice CLOSE_SECONDS_MAX. Blocks."""
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=CLOSE_SECONDS_MAX)
        self._thread.join(CLOSE_SECONDS_MAX)

    def _write_all(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                if self._path is not None and self._was_rotated():
                    before, self._descriptor = self._descriptor, self._open()
                    os.close(before)
                data = _encode(line) + b"\n"
                while data:
                    data = data[os.write(self._descriptor, data) :]
            except (OSError, ConfigError) as error:
                self.dropped_total += 1
                logger.error("audit line not written (%s)", error)
            except Exception:  # of one line; the thread goes on
                self.dropped_total += 1
                logger.exception("audit line not written")
        if self._path is not None:
            os.close(self._descriptor)

    def _was_rotated(self) -> bool:
        assert self._path is not None
        try:
            return self._path.stat().st_ino != self._opened_inode
        except OSError:
            return True

    def _open(self) -> int:
        assert self._path is not None
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        except OSError as error:
            raise ConfigError(
                f"audit.file {self._path}: cannot be opened ({error.strerror}); give a path in a writable folder"
            ) from error
        self._opened_inode = os.fstat(descriptor).st_ino
        return descriptor
