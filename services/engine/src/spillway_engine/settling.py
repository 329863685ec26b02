"""Stores to the shared tier what only an engine's device holds: before a drained engine ends, and while one is idle.

The connector stores (connector, engine/scheduler/settling.py); this module asks for it, a moment at a time, so that a
request or a second signal waits for nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spillway_engine.engine_core import ask_engine_core
from spillway_settings.wire import SETTLE_UTILITY

logger = logging.getLogger("vllm.spillway_engine")

IDLE_SECONDS = 5.0  # without a request, until what the device alone holds is stored
IDLE_SETTLE_SECONDS_MAX = 60.0
_ASK_SECONDS = 0.1  # between two questions
_STEP_SECONDS = 1.0  # that the engine core steps on for, from each question


@dataclass(frozen=True, slots=True)
class Settled:
    """chunks, size_bytes: the amount that was stored meanwhile. left: chunks that no shared tier holds."""

    chunks: int = 0
    size_bytes: int = 0
    left: int = 0
    seconds: float = 0.0


async def settle(app: Any, ranks: int, seconds: float, interrupted: Callable[[], bool]) -> Settled:
    """Let the engine store until nothing is left, the time is over, or `interrupted`."""
    begun = time.monotonic()
    first: tuple[int, int] | None = None
    while True:
        try:
            of_rank = range(ranks) if ranks > 1 else [None]
            remaining = max(0.0, seconds - (time.monotonic() - begun))
            step_seconds = 0.0 if interrupted() else min(_STEP_SECONDS, remaining)
            answers = [await ask_engine_core(app, SETTLE_UTILITY, step_seconds, rank=rank) for rank in of_rank]
        except Exception as error:  # an engine without the connector, or one that is ending
            logger.debug("nothing is stored before the end: %s", error)
            return Settled()
        left, chunks = sum(answer[0] for answer in answers), sum(answer[1] for answer in answers)
        size_bytes = sum(answer[1] * answer[2] for answer in answers)
        first = first or (chunks, size_bytes)
        if not left or not step_seconds:
            return Settled(chunks - first[0], size_bytes - first[1], left, time.monotonic() - begun)
        await asyncio.sleep(min(_ASK_SECONDS, remaining))
