"""Targets that the load may ask now, and failures that a fault explains.

A fault that ends a process closes its target before it acts and opens it when the successor is ready. A client notes
the time, then checks the target: a request that found it open and fails is excused only if it was closed while the
request was under way, that is, if it was in flight when the process was killed. An orderly stop excuses nothing that
fails within the time it grants for draining.

The gateway does not see this: it may hand a request to an engine that was struck a moment ago and does not show
it yet. What it routed is therefore excused if the request and the outage overlap at all.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

GATEWAY = "gateway"


@dataclass(slots=True)
class _Outage:
    begun: float
    kind: str
    drain_seconds: float
    ended: float = math.inf


@dataclass
class Outages:
    """targets: names of engines, and "gateway"."""

    targets: tuple[str, ...]
    clock: Callable[[], float] = time.monotonic
    _closed: set[str] = field(default_factory=set)
    _past: dict[str, list[_Outage]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def close(self, target: str, kind: str, *, drain_seconds: float = 0.0) -> None:
        """drain_seconds: what requests in flight are granted to finish; 0 for a kill, which may cost them at once."""
        with self._lock:
            self._closed.add(target)
            self._past.setdefault(target, []).append(_Outage(self.clock(), kind, drain_seconds))

    def open(self, target: str) -> None:
        with self._lock:
            self._closed.discard(target)
            for outage in self._past.get(target, []):
                outage.ended = min(outage.ended, self.clock())

    def open_targets(self) -> list[str]:
        with self._lock:
            return [target for target in self.targets if target not in self._closed]

    def is_open(self, target: str) -> bool:
        with self._lock:
            return target not in self._closed

    def excuse(self, target: str, begun: float, ended: float, *, routed: bool = False) -> str | None:
        """The kind of a fault at `target` that explains a failure at `ended` of what was asked at `begun`."""
        with self._lock:
            for outage in self._past.get(target, []):
                asked_in_time = begun <= (outage.ended if routed else outage.begun)
                if asked_in_time and outage.begun + outage.drain_seconds <= ended:
                    return outage.kind
        return None
