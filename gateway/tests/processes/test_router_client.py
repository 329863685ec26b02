from __future__ import annotations

from typing import Any, cast

import pytest

from spillway_gateway import errors
from spillway_gateway.errors import GatewayError, GatewayOverloaded
from spillway_gateway.processes import messages
from spillway_gateway.processes.messages import Message
from spillway_gateway.processes.router_client import RouterClient

KINDS = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, GatewayError)]


class ChannelDouble:
    """Answers each question at once."""

    def __init__(self, answer: Any) -> None:
        self.full = False
        self.client: RouterClient | None = None
        self.sent: list[Message] = []
        self._answer = answer

    def send(self, message: Any) -> None:
        self.sent.append(message)
        assert self.client is not None
        self.client.received(self._answer(message.number))


def client_over(channel: ChannelDouble) -> RouterClient:
    client = channel.client = RouterClient(lambda message: None)
    client.channel = cast(Any, channel)
    return client


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("retry_after_seconds", [None, 7])
async def test_each_error_of_the_router_is_raised_as_what_it_is(
    kind: type[GatewayError], retry_after_seconds: int | None
) -> None:
    raised = kind("so it is")
    if retry_after_seconds is not None:
        raised.retry_after_seconds = retry_after_seconds
    client = client_over(
        ChannelDouble(
            lambda number: messages.Refused(number, kind.__name__, raised.message, raised.retry_after_seconds)
        )
    )
    with pytest.raises(kind) as caught:
        await client.ask(messages.FindOwner(client.number(), "r", "t"), messages.OwnerIs)
    heard = caught.value
    assert type(heard) is kind
    for name in ("message", "status", "kind", "code", "retry_after_seconds"):
        assert getattr(heard, name) == getattr(raised, name)


async def test_an_error_that_this_version_does_not_name_is_the_gateway_s_fault() -> None:
    client = client_over(ChannelDouble(lambda number: messages.Refused(number, "Exception", "so it is", None)))
    with pytest.raises(GatewayError) as caught:
        await client.ask(messages.FindOwner(client.number(), "r", "t"), messages.OwnerIs)
    assert (type(caught.value), caught.value.message) == (GatewayError, "so it is")


async def test_nothing_is_asked_of_a_router_that_does_not_read() -> None:
    channel = ChannelDouble(lambda number: messages.OwnerIs(number, None, "", 0))
    client = client_over(channel)
    channel.full = True
    with pytest.raises(GatewayOverloaded):
        await client.ask(messages.FindOwner(client.number(), "r", "t"), messages.OwnerIs)
    assert channel.sent == []


def test_what_answers_no_question_is_handed_on() -> None:
    heard: list[Message] = []
    client = RouterClient(heard.append)
    others = [messages.Drain(False), messages.Count(1), messages.Waiting(1, "e", 16), messages.State(())]
    for message in [*others, messages.Begun(5)]:  # no request waits for this answer any more
        client.received(message)
    assert heard == others
