from __future__ import annotations

import asyncio
from typing import Any, cast

from spillway_gateway.processes.front_session import RELEASED_PER_ITERATION, FrontSession
from spillway_gateway.turns import Turns

REQUESTS = 5 * RELEASED_PER_ITERATION


class Place:
    """A request of a front. waiting: as RoutedPlace."""

    def __init__(self, left: list[int], number: int) -> None:
        self.waiting = None if number % 2 else object()
        self._left = left
        self._number = number

    def leave(self) -> None:
        self._left.append(self._number)


async def test_requests_of_a_front_that_has_ended_are_released_over_iterations_those_that_wait_first() -> None:
    closed: list[FrontSession] = []
    nothing: Any = None
    session = FrontSession(
        nothing, nothing, nothing, nothing, Turns(1), on_listening=lambda: None, on_closed=closed.append
    )
    left: list[int] = []
    session._places = cast(Any, {number: Place(left, number) for number in range(REQUESTS)})
    session._closed()
    released = 0
    while not session.ended.is_set():
        await asyncio.sleep(0)
        assert len(left) - released <= RELEASED_PER_ITERATION
        released = len(left)
    assert sorted(left) == [*range(REQUESTS)]
    assert [number % 2 for number in left] == [0] * (REQUESTS // 2) + [1] * (REQUESTS // 2)
    assert closed == [session]
