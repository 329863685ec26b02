"""Agents' sessions on one CPU tier of a node and on a private one of each engine, in virtual time; see node_tier.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import cast

import retention
import retention_loads
from memory_folder import memory_folder

from spillway_connector.engine.cpu_tier.tier import CpuTier
from spillway_connector.node.region import NodeRegion
from spillway_connector.testing.generation import make_cpu_tier, make_node_tier
from spillway_connector.testing.memory import unnamed_region
from spillway_connector.tiers.disk.slab.writers import new_number

NAMESPACE = b"n" * 16


class _Rows(retention.Rows):
    """Rows that may be shared: what others have changed is learnt first."""

    def begin(self, request: retention_loads.Request) -> int:
        self._tier.sync()
        return super().begin(request)


@contextmanager
def _private(rows: int) -> Iterator[CpuTier]:
    region = unnamed_region(rows, retention.ROW_BYTES)
    tier = cast(CpuTier, make_cpu_tier(rows, region, "lru", enable_events=False))
    try:
        yield tier
    finally:
        tier.shutdown()


@contextmanager
def _of_node(folder: Path, rows: int) -> Iterator[CpuTier]:
    region = NodeRegion(folder, rows, retention.ROW_BYTES, new_number())
    tier = make_node_tier(region, NAMESPACE, False)
    try:
        yield tier
    finally:
        tier.shutdown()


class Engines:
    """The tiers of an engine each. rows: of all of them together."""

    def __init__(self, kind: str, engines: int, rows: int) -> None:
        self._kind, self._rows = kind, rows if kind == "node" else rows // engines
        self._stacks = [ExitStack() for _ in range(engines)]
        self._open_folder = ExitStack()
        self._folder = self._open_folder.enter_context(memory_folder())
        self.tiers = [self._open(at) for at in range(engines)]

    def _open(self, at: int) -> retention.Rows:
        make = _of_node(self._folder, self._rows) if self._kind == "node" else _private(self._rows)
        return _Rows(self._rows, self._stacks[at].enter_context(make), lambda _: None)

    def replace(self, at: int) -> None:
        self._stacks[at].close()
        self.tiers[at] = self._open(at)

    def close(self) -> None:
        for stack in self._stacks:
            stack.close()
        self._open_folder.close()


def hit_ratio(kind: str, engines: int, rows: int, requests: Sequence[retention_loads.Request], router: str) -> float:
    """Tokens found, over tokens asked for. Each request is on one engine."""
    fleet = Engines(kind, engines, rows)
    names = {name: at for at, name in enumerate(dict.fromkeys(request.session for request in requests))}
    asked = found = replaced = 0
    moves = sorted(
        [(request.start_seconds, 1, at, request) for at, request in enumerate(requests)]
        + [(request.end_seconds, 0, at, request) for at, request in enumerate(requests)],
        key=lambda move: move[:3],
    )
    places: dict[int, retention.Rows] = {}
    replaced_at = [requests[-1].start_seconds * (at + 1) / (engines + 1) for at in range(engines)]
    try:
        for seconds, begins, number, request in moves:
            while router == "rolling" and replaced < engines and seconds >= replaced_at[replaced]:
                open_there = [at for at, tier in places.items() if tier is fleet.tiers[replaced]]
                for at in open_there:  # drained first
                    places.pop(at).end(requests[at])
                fleet.replace(replaced)
                replaced += 1
            if begins:
                at = number if router == "spread" else names[request.session]
                tier = places[number] = fleet.tiers[at % engines]
                asked += request.prompt_tokens
                found += tier.begin(request) * retention_loads.CHUNK_TOKENS
            elif number in places:
                places.pop(number).end(request)
    finally:
        fleet.close()
    return found / asked


def hit_ratios(engine_counts: Sequence[int], routers: Sequence[str], sessions: int) -> dict[str, float]:
    """A tier of half the working set, as in retention.py."""
    requests = retention_loads.loads(sessions, 0)["steady"]()
    rows = retention_loads.working_set_chunks(requests) // 2
    report: dict[str, float] = {"trace_rows": rows, "trace_requests": len(requests)}
    for router in routers:
        for count in engine_counts:
            for kind in ("private", "node"):
                ratio = hit_ratio(kind, count, rows, requests, router)
                report[f"trace_{router}_{count}_engines_{kind}_hit_ratio"] = round(ratio, 4)
                print(f"{router}, {count} engines, {kind}: {ratio:.3f}", flush=True)
    return report
