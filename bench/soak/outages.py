"""Whom the load may ask now, and which failures a fault explains.

A fault that ends a process closes its door before it acts and opens it when the successor is ready. A client notes the
time, then looks at the door: a request that found it open and fails is excused only if the door was shut while the
request was under way, that is, if it was in flight when the process was killed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

GATEWAY = "gateway"


@dataclass(slots=True)
class _Outage:
    begun: float
    kind: str
    excuses: bool


@dataclass
class Outages:
    """targets: names of engines, and "gateway"."""

    targets: tuple[str, ...]
    clock: Callable[[], float] = time.monotonic
    _closed: set[str] = field(default_factory=set)
    _past: dict[str, list[_Outage]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def close(self, target: str, kind: str, *, excuses: bool) -> None:
        """excuses: may requests in flight fail? A drained stop must not cost any."""
        with self._lock:
            self._closed.add(target)
            self._past.setdefault(target, []).append(_Outage(self.clock(), kind, excuses))

    def open(self, target: str) -> None:
        with self._lock:
            self._closed.discard(target)

    def open_targets(self) -> list[str]:
        with self._lock:
            return [target for target in self.targets if target not in self._closed]

    def is_open(self, target: str) -> bool:
        with self._lock:
            return target not in self._closed

    def excuse(self, target: str, begun: float, ended: float) -> str | None:
        """The kind of a fault that struck `target` between the two times, if that explains a failure."""
        with self._lock:
            for outage in self._past.get(target, []):
                if outage.excuses and begun <= outage.begun <= ended:
                    return outage.kind
        return None
