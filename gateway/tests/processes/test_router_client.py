from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from spillway_gateway import errors
from spillway_gateway.access.keys import NOBODY
from spillway_gateway.errors import GatewayError, GatewayOverloaded
from spillway_gateway.processes import messages
from spillway_gateway.processes.channel import Channel
from spillway_gateway.processes.messages import Message, from_front
from spillway_gateway.processes.router_client import RouterClient
from spillway_gateway.testing.running import until
from spillway_gateway.turns import Turns

KINDS = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, GatewayError)]


@asynccontextmanager
async def asked_of(
    answer: Callable[[Any], Message], on_message: Callable[[Message], None] = lambda message: None
) -> AsyncIterator[tuple[RouterClient, Channel, list[Message]]]:
    """A client, the router's end of its channel, and what arrives there. answer: to each question."""
    arrived: list[Message] = []

    def received(message: Any) -> None:
        arrived.append(message)
        router.send(answer(message))

    own, its = socket.socketpair()
    client = RouterClient(on_message, lambda: None)
    router = await Channel.over(own, from_front, received, lambda: None, Turns(1))
    await client.connect(its)
    try:
        yield client, router, arrived
    finally:
        client.close()
        router.close()


def owner_question(client: RouterClient) -> messages.FindOwner:
    return messages.FindOwner(client.number(), "r", "t")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("retry_after_seconds", [None, 7])
async def test_each_error_of_the_router_is_raised_as_what_it_is(
    kind: type[GatewayError], retry_after_seconds: int | None
) -> None:
    raised = kind("so it is")
    if retry_after_seconds is not None:
        raised.retry_after_seconds = retry_after_seconds
    refused = kind.__name__, raised.message, raised.retry_after_seconds
    async with asked_of(lambda asked: messages.Refused(asked.number, *refused)) as (client, *_):
        with pytest.raises(kind) as caught:
            await client.ask(owner_question(client), messages.OwnerIs)
    heard = caught.value
    assert type(heard) is kind
    for name in ("message", "status", "kind", "code", "retry_after_seconds"):
        assert getattr(heard, name) == getattr(raised, name)


async def test_an_error_that_no_class_is_named_after_is_the_gateway_s_fault() -> None:
    async with asked_of(lambda asked: messages.Refused(asked.number, "Exception", "so it is", None)) as (client, *_):
        with pytest.raises(GatewayError) as caught:
            await client.ask(owner_question(client), messages.OwnerIs)
    assert (type(caught.value), caught.value.message) == (GatewayError, "so it is")


async def test_nothing_is_asked_of_a_router_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async with asked_of(lambda asked: messages.OwnerIs(asked.number, None, "", 0)) as (client, _, arrived):
        monkeypatch.setattr(Channel, "full", True)
        with pytest.raises(GatewayOverloaded):
            await client.ask(owner_question(client), messages.OwnerIs)
        monkeypatch.undo()
        await client.ask(owner_question(client), messages.OwnerIs)
        assert len(arrived) == 1


async def test_what_answers_no_question_is_handed_on_and_a_late_answer_is_not() -> None:
    heard: list[Message] = []
    others = [messages.Drain(False), messages.Count(1), messages.Waiting(1, "e", 16), messages.State(())]
    answer = asked_of(lambda asked: messages.OwnerIs(asked.number, None, "", 0), heard.append)
    async with answer as (client, router, _):
        for message in [*others, messages.Begun(5)]:
            router.send(message)
        await client.ask(owner_question(client), messages.OwnerIs)
    assert heard == others


async def test_a_request_that_began_after_its_client_had_left_is_ended() -> None:
    heard: list[Message] = []
    async with asked_of(lambda asked: messages.Judged(0, True), heard.append) as (client, router, arrived):
        asked = asyncio.create_task(client.ask(messages.Begin(9, NOBODY, 1), messages.Begun))
        await until(lambda: bool(arrived))
        asked.cancel()
        await asyncio.wait([asked])
        router.send(messages.Begun(9))
        await until(lambda: len(arrived) == 2)
    assert arrived[1] == messages.Settle(9, 0, 0, 0)
