"""How long a connect may take, by the loop's own clock and by what the loop itself was late for."""

from __future__ import annotations

import asyncio

import pytest

from spillway_gateway.upstream.pool import EXTENSIONS_MAX, LATE_SECONDS, _patient_timeout, loop_was_late


def test_a_loop_that_was_late_itself_gives_the_time_again_but_not_for_ever() -> None:
    assert not loop_was_late(10.0, 10.0, 0)
    assert loop_was_late(10.0 + 2 * LATE_SECONDS, 10.0, EXTENSIONS_MAX - 1)
    assert not loop_was_late(10.0 + 2 * LATE_SECONDS, 10.0, EXTENSIONS_MAX)


async def test_a_side_that_never_answers_is_given_up() -> None:
    with pytest.raises(TimeoutError):
        async with _patient_timeout(0.01):
            await asyncio.get_running_loop().create_future()


async def test_one_that_answers_is_not() -> None:
    async with _patient_timeout(3600.0):
        await asyncio.sleep(0)
