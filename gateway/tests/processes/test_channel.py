"""Messages of thousands of requests may come in one read: they are handled in turns, in order, and none is lost."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from spillway_gateway.processes import messages
from spillway_gateway.processes.channel import Channel
from spillway_gateway.processes.messages import from_router
from spillway_gateway.testing.running import until
from spillway_gateway.turns import Turns

PER_ITERATION = 8
MANY = 1_000


class Iterations:
    """Number of messages that were handled in each iteration of the event loop."""

    def __init__(self) -> None:
        self.handled: list[int] = []
        self.counts = [0]
        self._begin()

    def _begin(self) -> None:
        self.counts.append(0)
        asyncio.get_running_loop().call_soon(self._begin)

    def count(self, message: messages.Judged) -> None:
        self.handled.append(message.number)
        self.counts[-1] += 1


@asynccontextmanager
async def joined(
    on_message: Callable[[Any], None], on_closed: Callable[[], None] = lambda: None, turns: Turns | None = None
) -> AsyncIterator[Channel]:
    """The other end of a channel that handles messages so."""
    turns = turns or Turns(PER_ITERATION)
    own, its = socket.socketpair()
    sending = await Channel.over(own, from_router, lambda message: None, lambda: None, Turns(1))
    handling = await Channel.over(its, from_router, on_message, on_closed, turns)
    try:
        yield sending
    finally:
        sending.abort()
        handling.abort()


def send_all(channel: Channel, begin: int = 0) -> None:
    for number in range(begin, begin + MANY):
        channel.send(messages.Judged(number, False))
    channel.flush()


async def test_what_one_read_brings_is_handled_over_iterations_in_order() -> None:
    seen = Iterations()
    async with joined(seen.count) as sending:
        send_all(sending)
        await until(lambda: len(seen.handled) == MANY)
    assert seen.handled == [*range(MANY)]
    assert max(seen.counts) <= PER_ITERATION + 1


async def test_channels_of_one_process_share_their_turns() -> None:
    seen, turns = Iterations(), Turns(PER_ITERATION)
    async with joined(seen.count, turns=turns) as first, joined(seen.count, turns=turns) as second:
        send_all(first)
        send_all(second, MANY)
        await until(lambda: len(seen.handled) == 2 * MANY)
    assert max(seen.counts) <= PER_ITERATION + 1
    assert [number for number in seen.handled if number < MANY] == [*range(MANY)]


async def test_what_was_sent_before_the_end_is_handled_before_it() -> None:
    handled: list[int] = []
    ended_after: list[int] = []
    async with joined(
        lambda message: handled.append(message.number), lambda: ended_after.append(len(handled))
    ) as sending:
        send_all(sending)
        sending.close()
        await until(lambda: bool(ended_after))
    assert ended_after == [MANY]
    assert handled == [*range(MANY)]


async def test_a_message_that_fails_stops_no_other() -> None:
    handled: list[int] = []

    def fail_at_times(message: messages.Judged) -> None:
        handled.append(message.number)
        assert message.number % 100

    async with joined(fail_at_times) as sending:
        send_all(sending)
        await until(lambda: len(handled) == MANY)
