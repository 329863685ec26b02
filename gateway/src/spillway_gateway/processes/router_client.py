"""A front's end of the channel: questions to the router process and its answers, many at a time."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Callable
from typing import Any, TypeVar

from spillway_gateway import errors
from spillway_gateway.access.limits import NOTHING_OWED
from spillway_gateway.errors import GatewayError, GatewayOverloaded
from spillway_gateway.processes import messages
from spillway_gateway.processes.channel import HANDLED_PER_ITERATION, Channel
from spillway_gateway.processes.messages import Message, from_router
from spillway_gateway.turns import Turns

Answer = TypeVar("Answer", bound=Message)

_ERRORS: dict[str, type[GatewayError]] = {
    name: each for name, each in vars(errors).items() if isinstance(each, type) and issubclass(each, GatewayError)
}


class RouterClient:
    """A front's questions, on the event loop. on_message: handles messages that answer no question. on_lost: called
    once, when the router is gone. Nothing may be sent or asked before connect()."""

    def __init__(self, on_message: Callable[[Message], None], on_lost: Callable[[], None]) -> None:
        self._on_message = on_message
        self._on_lost = on_lost
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Message]] = {}
        self._connected: Channel | None = None

    async def connect(self, router: socket.socket) -> None:
        """router: one end of a socket pair, which the client then owns."""
        turns = Turns(HANDLED_PER_ITERATION)
        self._connected = await Channel.over(router, from_router, self._received, self._on_lost, turns)

    @property
    def _channel(self) -> Channel:
        assert self._connected is not None
        return self._connected

    def close(self) -> None:
        """Close the connection once what waits is written."""
        self._channel.close()

    def abort(self) -> None:
        if self._connected is not None:
            self._connected.abort()

    def number(self) -> int:
        """A number for a request that has none yet."""
        return next(self._numbers)

    def send(self, message: Message) -> None:
        self._channel.send(message)

    def defer(self, tell: Callable[[], None]) -> None:
        """Call `tell`, which may send, at the end of the event loop's iteration."""
        self._channel.defer(tell)

    async def ask(self, message: Any, kind: type[Answer]) -> Answer:
        """The router's answer to a message with a number. Raises the error of a refusal."""
        if self._channel.full:
            raise GatewayOverloaded("the process that routes does not keep up")
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._answers[message.number] = answer
        try:
            self.send(message)
            given = await answer
        finally:
            del self._answers[message.number]
        if isinstance(given, messages.Refused):
            raise _error(given)
        assert isinstance(given, kind)
        return given

    def _received(self, message: Message) -> None:
        if isinstance(message, messages.ANSWERS):
            answer = self._answers.get(message.number)
            if answer is not None and not answer.done():
                answer.set_result(message)
            elif isinstance(message, messages.Begun):  # who asked is gone: nothing else would end what has begun
                self.send(messages.Settle(message.number, *NOTHING_OWED))
        else:
            self._on_message(message)


def _error(refused: messages.Refused) -> GatewayError:
    error = _ERRORS.get(refused.error, GatewayError)(refused.text)
    if refused.retry_after_seconds is not None:
        error.retry_after_seconds = refused.retry_after_seconds
    return error
