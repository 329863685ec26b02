"""Faults while the crowd asks, one after the other, each until enough requests have met it.

No step waits for a time: each waits for requests to finish, and for what it did to be seen and healed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from stack_driver.deadlines import eventually

from .crowd import Crowd, Disturbance
from .machines import SECONDS_MAX, Engines, Replica, now

REQUESTS_PER_STEP = 120


@dataclass
class Storm:
    engines: Engines
    replicas: Sequence[Replica]
    crowd: Crowd
    requests_per_step: int = REQUESTS_PER_STEP
    steps: list[str] = field(default_factory=list)  # done so far, with what each met
    drain_status: int | None = None  # exit status of the replica that got SIGTERM

    def run(self) -> None:
        """Run all steps in a thread of their own, while the crowd asks."""
        first, second, third, fourth = self.engines.names
        try:
            self._more("all is well", self.requests_per_step)
            with self._fault("killed", first, "kill"):
                self._seen_down(first)
            with self._fault("restarted in place", second, "restart"):
                pass
            with self._fault("hung", third, "hang"):
                self._seen_down(third)
            with self._fault("slowed down tenfold", fourth, "slow", breaks=False, factor=10):
                pass
            with self._fault("breaks off replies", first, "die_in_stream", after_tokens=0, requests=10):
                pass
            with self._fault("core dies in replies", second, "die_in_stream", how="error_event", requests=10):
                pass
            with self._fault("drains", third, "not_ready", breaks=False):
                self._seen_down(third)
            with self._fault("loses event batches", fourth, "drop_events", breaks=False, batches=20):
                pass
            self._replica_killed(self.replicas[1])
            self._replica_drained(self.replicas[0])
            self._more("all is well again", self.requests_per_step)
        finally:
            self.crowd.stop()

    @contextmanager
    def _fault(self, what: str, engine: str, fault: str, *, breaks: bool = True, **settings: object) -> Iterator[None]:
        """breaks: replies of this engine that have begun may end early."""
        eventually(f"{engine} has requests", lambda: self.engines.state()[engine]["running"] > 0, SECONDS_MAX)
        disturbance = Disturbance(frozenset({engine}), now())
        if breaks:
            self.crowd.disturbances.append(disturbance)
        before = self.crowd.counts.broken, self.crowd.counts.moved
        self.engines.fault(engine, fault, **settings)
        yield
        self._more(f"{engine} {what}", self.requests_per_step, before)
        self.engines.fault(engine, "clear")
        for replica in self.replicas:
            eventually(f"{replica.name} uses {engine} again", lambda r=replica: r.engine_up(engine), SECONDS_MAX)
        disturbance.ended = now()

    def _replica_killed(self, replica: Replica) -> None:
        eventually("streams are open", lambda: self.crowd.open_streams > 0, SECONDS_MAX)
        disturbance = Disturbance(frozenset({replica.name}), now())
        self.crowd.disturbances.append(disturbance)
        before = self.crowd.counts.broken, self.crowd.counts.moved
        replica.kill()
        disturbance.ended = now()
        self._more(f"{replica.name} killed", self.requests_per_step, before)
        replica.start()
        self._more(f"{replica.name} started again", self.requests_per_step)

    def _replica_drained(self, replica: Replica) -> None:
        """Drain the replica: its streams come to their own end, so nothing may break."""
        before = self.crowd.counts.broken, self.crowd.counts.moved
        self.drain_status = replica.drain()
        self._more(f"{replica.name} drained", self.requests_per_step, before)
        replica.start()

    def _seen_down(self, engine: str) -> None:
        for replica in self.replicas:
            eventually(f"{replica.name} leaves {engine} alone", lambda r=replica: not r.engine_up(engine), SECONDS_MAX)

    def _more(self, what: str, requests: int, before: tuple[int, int] | None = None) -> None:
        """Wait until so many more requests have finished."""
        counts = self.crowd.counts
        broken, moved = before or (counts.broken, counts.moved)
        start = self.crowd.finished
        eventually(
            f"{requests} more requests while {what}", lambda: self.crowd.finished >= start + requests, 5 * SECONDS_MAX
        )
        self.steps.append(
            f"{what:<32} {self.crowd.finished - start:>5} finished, {counts.moved - moved:>3} moved to another engine, "
            f"{counts.broken - broken:>3} broken after their first byte"
        )
