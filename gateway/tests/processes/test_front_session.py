from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

from spillway_gateway.fleet.stored_responses import Owner
from spillway_gateway.processes import messages
from spillway_gateway.processes.channel import Channel
from spillway_gateway.processes.front_session import RELEASED_PER_ITERATION, FrontSession
from spillway_gateway.processes.messages import from_router
from spillway_gateway.testing.running import until
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


class Owners:
    """A router that knows who owns which response."""

    def __init__(self) -> None:
        self.known: dict[str, Owner] = {}

    def record_response(self, response_id: str, owner: Owner) -> None:
        self.known[response_id] = owner

    async def owner_of(self, response_id: str, tenant: str) -> Owner | None:
        return self.known.get(response_id)


async def fail(*given: Any) -> None:
    raise ZeroDivisionError


def session_of(router: Any, turns: Turns, closed: list[FrontSession] | None = None) -> FrontSession:
    nothing: Any = None
    on_closed = closed.append if closed is not None else lambda session: None
    return FrontSession(nothing, router, nothing, fail, turns, on_listening=lambda: None, on_closed=on_closed)


@asynccontextmanager
async def front_of(session: FrontSession) -> AsyncIterator[tuple[Channel, list[Any]]]:
    """A front's end of its channel to the session, and what arrives there."""
    arrived: list[Any] = []
    own, its = socket.socketpair()
    front = await Channel.over(own, from_router, arrived.append, lambda: None, Turns(1_000))
    await session.connect(its)
    yield front, arrived
    front.abort()
    await session.ended.wait()


async def test_a_question_whose_answer_fails_is_refused() -> None:
    async with front_of(session_of(None, Turns(8))) as (front, arrived):
        front.send(messages.Operator(7, "/spillway/config", []))
        front.send(messages.FindOwner(8, "r", "t"))
        await until(lambda: len(arrived) == 2)
    assert [
        (type(answer), answer.number, answer.error) for answer in sorted(arrived, key=lambda each: each.number)
    ] == [
        (messages.Refused, 7, "GatewayError"),
        (messages.Refused, 8, "GatewayError"),
    ]


async def test_an_owner_is_found_whose_message_was_still_in_the_socket_of_another_front() -> None:
    owners, turns = Owners(), Turns(8)
    async with (
        front_of(session_of(owners, turns)) as (first, _),
        front_of(session_of(owners, turns)) as (second, found),
    ):
        for number in range(320):
            first.send(messages.OwnResponse(f"{number:01000}", "t", "m", "e"))  # more than one read
        first.flush()
        second.send(messages.FindOwner(1, f"{319:01000}", "t"))
        await until(lambda: bool(found))
    assert found == [messages.OwnerIs(1, "m", "e", 0)]


async def test_a_request_that_cannot_be_released_keeps_no_other() -> None:
    closed: list[FrontSession] = []
    session = session_of(None, Turns(1), closed)
    left: list[int] = []
    places = {number: Place(left, number) for number in range(4)}
    places[2]._left = cast(Any, None)  # it fails
    session._places = cast(Any, places)
    session._closed()
    await asyncio.wait_for(session.ended.wait(), 10)
    assert (sorted(left), closed) == ([0, 1, 3], [session])


async def test_requests_of_a_front_that_has_ended_are_released_over_iterations_those_that_wait_first() -> None:
    closed: list[FrontSession] = []
    session = session_of(None, Turns(1), closed)
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
