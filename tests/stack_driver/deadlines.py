"""Waiting for another process: a condition and a deadline, never a fixed sleep."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")
POLL_SECONDS = 0.05


def eventually(
    what: str | Callable[[], str], probe: Callable[[], Value | None], timeout_seconds: float = 120.0
) -> Value:
    """The first truthy answer of `probe`. Raises AssertionError with `what` (asked at that time, if it is a function)
    and the last answer at the deadline."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        answer = probe()
        if answer:
            return answer
        if time.monotonic() > deadline:
            waited_for = what if isinstance(what, str) else what()
            raise AssertionError(f"{waited_for}: not within {timeout_seconds:g} s; the last answer was {answer!r}")
        time.sleep(POLL_SECONDS)
