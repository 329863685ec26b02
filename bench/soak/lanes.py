"""Carries out the schedule: strike, hold, heal, wait for recovery; one thread per lane."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import httpx

from soak.counters import breakers_open, read_metrics, tier_moves
from soak.outages import Outages
from soak.schedule import Fault, may_disturb

RECOVERY_SECONDS = 120.0  # a breaker rests for 30 s at most, and a probe must meet a request
POLL_SECONDS = 0.5


class StoreFaults(Protocol):
    def strike(self, fault: Fault) -> AbstractContextManager[None]: ...


@dataclass
class Log:
    """Record of what the lanes did. Lists are only appended to."""

    faults: Counter[str] = field(default_factory=Counter)
    recovery_seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    broken: list[str] = field(default_factory=list)  # promises, in words
    lines: list[str] = field(default_factory=list)


class Lanes:
    """`stop` ends all at the next quiet moment: no fault is left unhealed."""

    def __init__(
        self,
        run_seconds: float,
        outages: Outages,
        engines: Mapping[str, str],
        *,
        strike_engine: Callable[[Fault], None],
        strike_caches: Callable[[Fault], None],
        store: StoreFaults,
        say: Callable[[str], None],
    ) -> None:
        self.log = Log()
        self._run_seconds, self._outages, self._engines = run_seconds, outages, engines
        self._strike_engine, self._strike_caches = strike_engine, strike_caches
        self._store, self._say = store, say
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._begun = time.monotonic()

    def start(self, store: Iterator[Fault], engine: Iterator[Fault], reset: Iterator[Fault]) -> None:
        self._begun = time.monotonic()
        lanes = (
            ("store", self._store_fault, store),
            ("engine", self._engine_fault, engine),
            ("reset", self._strike_caches, reset),
        )
        for name, lane, faults in lanes:
            thread = threading.Thread(target=self._run, args=(lane, faults), name=f"{name} lane", daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self, timeout_seconds: float = 600.0) -> None:
        self._stop.set()
        deadline = time.monotonic() + timeout_seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                self.log.broken.append(f"the {thread.name} did not end within {timeout_seconds:.0f} s")

    def _run(self, lane: Callable[[Fault], None], faults: Iterator[Fault]) -> None:
        for fault in faults:
            if self._stop.wait(fault.gap_seconds):
                return
            allowed = may_disturb(fault, (time.monotonic() - self._begun) / self._run_seconds, len(self._engines))
            if allowed is None:
                continue
            self._say(f"{time.monotonic() - self._begun:7.1f} s  {allowed.kind} {self._target(allowed)}")
            try:
                lane(allowed)
                self.log.faults[allowed.kind] += 1
            except Exception as error:  # the run goes on and is judged broken: the other lane's findings count too
                self.log.broken.append(f"{allowed.kind} {self._target(allowed)}: {type(error).__name__}: {error}")

    def _target(self, fault: Fault) -> str:
        return list(self._engines)[fault.target] if fault.kind.startswith(("engine_", "caches_")) else ""

    def _engine_fault(self, fault: Fault) -> None:
        begun = time.monotonic()
        self._strike_engine(fault)
        self.log.recovery_seconds[fault.kind].append(time.monotonic() - begun)

    def _store_fault(self, fault: Fault) -> None:
        with self._store.strike(fault):
            self._stop.wait(fault.hold_seconds)
        healed = time.monotonic()
        waiting = {name: self._moves(name) for name in self._engines if self._outages.is_open(name)}
        while waiting:
            if time.monotonic() - healed > RECOVERY_SECONDS:
                self.log.broken.append(f"{fault.kind}: {sorted(waiting)} did not use the tier again in time")
                return
            time.sleep(POLL_SECONDS)
            for name, before in list(waiting.items()):
                # One that is killed meanwhile starts with everything new; its successor is no recovery.
                if not self._outages.is_open(name) or self._uses_tier(name, before):
                    del waiting[name]
        self.log.recovery_seconds[fault.kind].append(time.monotonic() - healed)

    def _moves(self, name: str) -> float:
        with httpx.Client() as client:
            reading = read_metrics(client, self._engines[name])
        return tier_moves(reading) if reading is not None else 0.0

    def _uses_tier(self, name: str, before: float) -> bool:
        with httpx.Client() as client:
            reading = read_metrics(client, self._engines[name])
        if reading is None:
            return False
        now = tier_moves(reading)
        return (now > before or now < before) and not breakers_open(reading)
