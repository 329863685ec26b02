"""`make status`: components with size and readiness."""

from __future__ import annotations

import time

from spillway_stack.local_stack import ComponentStatus
from spillway_stack.processes import descendants, resident_bytes

_COLUMNS = ("component", "state", "pid", "port", "memory", "uptime", "restarts")


def render_status(statuses: list[ComponentStatus], now: float | None = None) -> str:
    """Return a table with one row per component. The reason of a component that is not ready follows below it."""
    moment = time.time() if now is None else now
    rows = [_COLUMNS, *(_row(status, moment) for status in statuses)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    reasons = [f"{status.name}: {status.detail}" for status in statuses if not status.ready and status.detail]
    return "\n".join([*lines, *reasons])


def _row(status: ComponentStatus, now: float) -> tuple[str, ...]:
    if status.identity is None:
        return (status.name, status.state, "-", str(status.port), "-", "-", str(status.restarts))
    memory_bytes = resident_bytes(descendants(status.identity.pid))
    return (
        status.name,
        status.state,
        str(status.identity.pid),
        str(status.port),
        f"{memory_bytes / (1 << 30):.2f} GiB",
        _duration(now - status.started_at),
        str(status.restarts),
    )


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s"
