"""Stores of an engine without work: `EngineCore.spillway_settle(seconds)`.

The engine service calls it when the last request of a drain has ended, and when an engine has been idle for a while,
again and again until nothing is left; the end of a request that another engine goes on with has the same effect. For so
many seconds the engine core then steps without requests: copies that the last steps began are reported and offered to
the shared tiers, and chunks that the device alone holds are stored. A request that comes meanwhile is scheduled like
any other.

An engine that has just started steps too, until it has announced the stores that it loads from: vLLM publishes events
behind a step, and an engine whose store nobody knows gets no prompt to compute for another one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from spillway_connector.engine.own_connector import own_connector

INTRODUCTION_SECONDS_MAX = (
    10.0  # after its start, in which an engine steps until it has said which stores it loads from
)
HAND_OVER_SECONDS = 2.0  # after a request that another engine goes on with, until its chunks are stored and announced
IN_FLIGHT_BYTES_MAX = 256 << 20  # between the device and the shared tiers at once, so that no store waits for seconds


@dataclass(frozen=True, slots=True)
class Unsettled:
    """What would be lost if the engine ended now. chunks: stored by this engine while it settled, so far."""

    left: int
    chunks: int
    chunk_bytes: int


@runtime_checkable
class SettlingConnector(Protocol):
    """A connector that stores while the engine has no work."""

    def settle(self, seconds: float) -> Unsettled: ...


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
