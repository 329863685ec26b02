"""The whole: engines, two replicas, the crowd, the storm, and the counts that are left when all is over."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from pathlib import Path

from stack_driver.deadlines import eventually

from .crowd import Counts, Crowd
from .machines import SECONDS_MAX, Engines, Replica, gateway_document
from .storm import Storm
from .tenants import Answers, asks, write_keys, write_model_folder

IDLE = ("spillway_gateway_in_flight_requests", "spillway_gateway_queued_tokens",
        "spillway_gateway_admission_waiting_requests")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outcome:
    counts: Counts
    steps: list[str]
    left: dict[str, float]  # counts of requests that should be zero once no request runs any more
    drain_status: int | None

    @property
    def faults(self) -> list[str]:
        """List what must not have happened; empty after a good run."""
        counts = self.counts
        found = {
            "requests lost before their first byte": counts.lost,
            "requests refused": counts.refused,
            "wrong answers": counts.wrong,
            "replies broken without a fault on their way": counts.broken_without_cause,
            "hits across tenants": counts.wrong_tenant_hits,
            "requests unaccounted for": counts.requests
            - (counts.whole + counts.broken + counts.lost + counts.refused + counts.wrong),
            "exit status of the drained replica": self.drain_status or 0,
            **{f"left: {name}": value for name, value in self.left.items()},
        }
        return [f"{what}: {value:g}" for what, value in found.items() if value]

    def __str__(self) -> str:
        counts = self.counts
        lines = [
            *self.steps,
            "",
            f"{counts.requests:>6} requests of clients",
            f"{counts.whole:>6} whole, with the right answer",
            f"{counts.broken:>6} broken after their first byte, {counts.broken_without_cause} of them without a fault",
            f"{counts.lost:>6} lost before their first byte",
            f"{counts.refused:>6} refused, {counts.wrong} answered wrongly",
            f"{counts.moved:>6} moved to another engine before their first byte",
            f"{counts.resent:>6} sent again by clients, as their replica had ended before the first byte",
            f"{counts.first_asks:>6} first asks of a tenant for what others had asked, "
            f"{counts.wrong_tenant_hits} of them hits",
            f"{counts.own_hits:>6} later asks that found their tenant's own blocks",
            f"       by engine: {dict(sorted(counts.by_engine.items()))}",
            f"       left at the end: {self.left}",
            *counts.violations,
        ]
        return "\n".join(lines)


async def run(folder: Path, streams: int, requests_per_step: int) -> Outcome:
    tokenizer = folder / "tokenizer"
    write_model_folder(tokenizer)
    with contextlib.ExitStack() as stack:
        engines = Engines(folder, tokenizer)
        stack.callback(engines.close)
        document = gateway_document(engines.entries, tokenizer, write_keys(folder))
        replicas = [Replica(f"replica-{number}", folder, document) for number in range(2)]
        for replica in replicas:
            stack.callback(replica.close)
            await asyncio.to_thread(replica.start)
        crowd = Crowd(streams, replicas, asks(), Answers(tokenizer))
        storm = Storm(engines, replicas, crowd, requests_per_step)
        await asyncio.gather(crowd.run(), asyncio.to_thread(storm.run))
        left = await asyncio.to_thread(_left, engines, replicas)
        return Outcome(crowd.counts, storm.steps, left, storm.drain_status)


def _left(engines: Engines, replicas: list[Replica]) -> dict[str, float]:
    """Wait until nothing is in flight. Returns the counts: all zero, or those at the deadline."""

    def in_flight() -> dict[str, float]:
        found = {f"{replica.name} {name}": replica.sum_of(name) for replica in replicas for name in IDLE}
        for name, state in engines.state().items():
            found[f"{name} running"] = state["running"]
            found[f"{name} waiting"] = state["waiting"]
        return found

    with contextlib.suppress(AssertionError):
        eventually("nothing is in flight", lambda: not any(in_flight().values()), SECONDS_MAX)
    return in_flight()
