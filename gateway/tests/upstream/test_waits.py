"""How a wait ends from outside, and which cause the task then raises."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from spillway_gateway.config.settings import TimeoutsConfig
from spillway_gateway.errors import EngineFirstByteTimeout, EngineIdleTimeout, EngineWentDown
from spillway_gateway.upstream.waits import ClientDisconnected, ClientStalled, RequestWaits

FOREVER = 3600.0


def engine(name: str, *, routable: bool = True) -> Any:
    return SimpleNamespace(name=name, routable=routable)


async def cause_of(end: Any, *engines: Any, stream: bool = True, **state: bool) -> Exception | None:
    """What a task raises whose wait `end` is to end; None where the wait goes on."""
    fleet: Any = SimpleNamespace(engines={each.name: each for each in engines})
    services: Any = SimpleNamespace(timeouts=TimeoutsConfig())
    started: asyncio.Future[RequestWaits] = asyncio.get_running_loop().create_future()

    async def serve() -> None:
        waits = RequestWaits(fleet, services, stream=stream)
        waits.abortable = True
        for name, value in state.items():
            setattr(waits, name, value)
        started.set_result(waits)
        try:
            await asyncio.sleep(FOREVER)
        except asyncio.CancelledError:
            cause = waits.take_cause()
            if cause is None:
                raise
            raise cause from None
        finally:
            waits.close()

    task = asyncio.create_task(serve())
    waits = await started
    end(waits)
    for _ in range(3):
        await asyncio.sleep(0)
    if not task.done():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return None
    error = task.exception()
    assert isinstance(error, Exception)
    return error


async def test_a_disconnect_ends_it_and_the_first_cause_counts() -> None:
    def both(waits: RequestWaits) -> None:
        waits.client_disconnected()
        waits.abort(ValueError("later"))

    assert type(await cause_of(both)) is ClientDisconnected
    assert await cause_of(RequestWaits.client_disconnected, abortable=False) is None
    assert await cause_of(RequestWaits.client_disconnected, answered=True) is None


@pytest.mark.parametrize(
    ("others", "bytes_sent", "ends"),
    [([True], False, True), ([False], False, False), ([], False, False), ([True], True, False)],
)
async def test_an_engine_that_goes_down_ends_it_where_another_could_answer(
    others: list[bool], bytes_sent: bool, ends: bool
) -> None:
    down = engine("down", routable=False)
    rest = [engine(f"other-{at}", routable=routable) for at, routable in enumerate(others)]
    cause = await cause_of(lambda waits: waits.engine_went_down(down), down, *rest, bytes_sent=bytes_sent)
    assert isinstance(cause, EngineWentDown) if ends else cause is None


@pytest.mark.parametrize(
    ("state", "expected"),
    [({}, EngineFirstByteTimeout), ({"begun": True}, EngineIdleTimeout), ({"sending": True}, ClientStalled)],
)
async def test_a_passed_deadline_blames_the_side_that_was_waited_for(
    state: dict[str, bool], expected: type[Exception]
) -> None:
    def pass_deadline(waits: RequestWaits) -> None:
        waits.expect_within(FOREVER)
        waits.deadline = asyncio.get_running_loop().time() - 1
        waits._on_timer()

    assert type(await cause_of(pass_deadline, **state)) is expected


async def test_a_deadline_that_was_moved_does_not_end_it() -> None:
    def move(waits: RequestWaits) -> None:
        waits.expect_within(0.0)
        waits.deadline = asyncio.get_running_loop().time() + FOREVER
        waits._on_timer()

    assert await cause_of(move) is None
