"""Stores of an engine without work: `EngineCore.spillway_settle(seconds)`.

The engine service calls it when the last request of a drain has ended, and when an engine has been idle for a while,
again and again until nothing is left; the end of a request that another engine goes on with has the same effect. For
that time the engine core steps without requests: copies that the last steps began are reported and offered to the
shared tiers, and chunks that the device alone holds are stored. A request that comes meanwhile is scheduled like any
other.

An engine that has just started steps too, until it has announced the stores that it loads from: vLLM publishes events
behind a step, and the gateway has an engine compute prompts for another one only if it knows the store of both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from spillway_connector.engine.patches.own_connector import own_connector

# After the start; until then an engine steps without requests to announce the stores that it loads from.
INTRODUCTION_SECONDS_MAX = 10.0
HAND_OVER_SECONDS = 2.0  # after a request that another engine goes on with, until its chunks are stored and announced
_SETTLING_ROWS_PART = 4  # at most one in this number of the CPU tier's rows is on its way to the shared tiers
IN_FLIGHT_BYTES_MAX = 256 << 20  # between the device and the shared tiers at once, so that no store waits for seconds


@dataclass(frozen=True, slots=True)
class Unsettled:
    """The chunks that would be lost if the engine ended now. chunks: stored by this engine while it settled, so far."""

    left: int
    chunks: int
    chunk_bytes: int


@runtime_checkable
class SettlingConnector(Protocol):
    """A connector that stores while the engine has no work."""

    def settle(self, seconds: float) -> Unsettled: ...


class SharedChunks(Protocol):
    """The part of the manager that this module needs."""

    settled_chunks: int

    @property
    def secondary_tiers(self) -> Sized: ...

    @property
    def chunk_bytes(self) -> int: ...

    @property
    def cpu_rows(self) -> int: ...

    @property
    def introduced(self) -> bool: ...

    def stores_under_way(self) -> int: ...


class StepsWithoutRequests:
    """Whether an engine without requests is to step, and what it then stores.

    Args:
        manager: has the tiers.
        copying: counts the chunks on their way from the device.
        alone: counts those that the device alone holds.
    """

    def __init__(self, manager: SharedChunks, copying: Callable[[], int], alone: Callable[[], int]) -> None:
        self._manager = manager
        self._copying = copying
        self._alone = alone
        self._settle_until = 0.0  # by time.monotonic()
        self.introduce()

    def introduce(self) -> None:
        """Let the engine step until it has announced the stores that it loads from."""
        self._introduce_until = time.monotonic() + INTRODUCTION_SECONDS_MAX

    def settle(self, seconds: float) -> Unsettled:
        """Let the engine step for so long, while anything is left."""
        unsettled = self._unsettled()
        self._settle_until = time.monotonic() + seconds
        return Unsettled(unsettled, self._manager.settled_chunks, self._manager.chunk_bytes)

    @property
    def wanted(self) -> bool:
        """Whether it settles, or has not said what it loads from."""
        return self._settling or (not self._manager.introduced and time.monotonic() < self._introduce_until)

    def room(self) -> int | None:
        """Count the chunks that may be stored now though the device keeps them; None if the engine does not settle."""
        if not self._settling:
            return None
        chunks = min(IN_FLIGHT_BYTES_MAX // self._manager.chunk_bytes, self._manager.cpu_rows // _SETTLING_ROWS_PART)
        return max(1, chunks) - self._storing()

    @property
    def _settling(self) -> bool:
        return bool(self._settle_until) and time.monotonic() < self._settle_until and self._unsettled() > 0

    def _unsettled(self) -> int:
        """Count the chunks that no shared tier holds, and those on their way to one; 0 without a shared tier."""
        return self._storing() + self._alone() if len(self._manager.secondary_tiers) else 0

    def _storing(self) -> int:
        """Count the chunks on their way from the device to the shared tiers."""
        return self._copying() + self._manager.stores_under_way()


def settle_utility(_: None) -> Callable[..., list[int]]:
    """Make the function that is added to EngineCore, which has no such utility."""
    return _settle


def _settle(core: Any, seconds: float) -> list[int]:
    """Unsettled's fields, as they are before the steps that follow; all 0 without Spillway's connector."""
    connector = own_connector(core.scheduler, SettlingConnector)  # type: ignore[type-abstract]
    if connector is None:
        return [0, 0, 0]
    unsettled = connector.settle(seconds)
    return [unsettled.left, unsettled.chunks, unsettled.chunk_bytes]
