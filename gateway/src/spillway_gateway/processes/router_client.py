"""A front's end of the channel: questions to the router process and its answers, many at a time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any, TypeVar

from spillway_gateway import errors
from spillway_gateway.errors import GatewayError, GatewayOverloaded
from spillway_gateway.processes import messages
from spillway_gateway.processes.channel import Channel
from spillway_gateway.processes.messages import Message

Answer = TypeVar("Answer", bound=Message)

_ERRORS: dict[str, type[GatewayError]] = {
    name: each for name, each in vars(errors).items() if isinstance(each, type) and issubclass(each, GatewayError)
}


class RouterClient:
    """On the event loop. on_message: handles what answers no question that is open."""

    def __init__(self, on_message: Callable[[Message], None]) -> None:
        self._on_message = on_message
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Message]] = {}
        self.channel: Channel | None = None

    def number(self) -> int:
        """A number for a request that has none yet."""
        return next(self._numbers)

    def send(self, message: Message) -> None:
        assert self.channel is not None
        self.channel.send(message)

    def defer(self, tell: Callable[[], None]) -> None:
        """Call `tell`, which may send, at the end of the event loop's iteration."""
        assert self.channel is not None
        self.channel.defer(tell)

    async def ask(self, message: Any, kind: type[Answer]) -> Answer:
        """The router's answer to a message with a number. Raises the error of a refusal."""
        assert self.channel is not None
        if self.channel.full:
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

    def received(self, message: Message) -> None:
        if isinstance(message, messages.ANSWERS):
            answer = self._answers.get(message.number)
            if answer is not None and not answer.done():
                answer.set_result(message)
        else:
            self._on_message(message)


def _error(refused: messages.Refused) -> GatewayError:
    error = _ERRORS.get(refused.error, GatewayError)(refused.text)
    if refused.retry_after_seconds is not None:
        error.retry_after_seconds = refused.retry_after_seconds
    return error
