"""Bounds the time and rows that requests may use while they wait for promotions, each request and all together; and the
records of promotions under way."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Protocol

from vllm.v1.kv_offload.base import OffloadKey, ReqContext

from spillway_connector.engine.requests.state import Prefix


@dataclass(slots=True)
class Wait:
    """The waiting time and rows of one request, over all its lookups."""

    deadline: float | None = None  # from the first answer that made it wait
    rows_promoted: int = 0
    answers: dict[OffloadKey, Prefix] = field(default_factory=dict)  # by first key


@dataclass(slots=True)
class Bounds:
    in_flight_rows_max: int
    request_rows_max: int
    rows_in_flight: int = 0
    waits: dict[str, Wait] = field(default_factory=dict)


@dataclass(slots=True)
class Promotion:
    """The chunks that one tier is to load for one request, and their rows."""

    context: ReqContext
    keys: list[OffloadKey] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)


class TierJob(Protocol):
    """Chunks on their way between the CPU tier and a shared tier, as each generation's tiers take them."""

    job_id: int
    keys: Collection[OffloadKey]
    is_promotion: bool  # from the shared tier to the CPU tier; else the other way
    req_context: ReqContext
