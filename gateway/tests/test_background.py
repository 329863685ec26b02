from __future__ import annotations

import asyncio
import logging

import pytest

from spillway_gateway.background import RESTART_SECONDS_MAX, supervised


async def test_work_that_fails_is_started_again_after_growing_pauses(caplog: pytest.LogCaptureFixture) -> None:
    pauses: list[float] = []
    runs = 0

    async def work() -> None:
        nonlocal runs
        runs += 1
        if runs < 10:
            raise KeyError(runs)

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    with caplog.at_level(logging.ERROR):
        await supervised(work, "some work", pause=pause)

    assert runs == 10
    assert pauses == [1, 2, 4, 8, 16, 32, *[RESTART_SECONDS_MAX] * 3]
    assert "some work" in caplog.text


async def test_cancelling_ends_it() -> None:
    async def work() -> None:
        await asyncio.get_running_loop().create_future()

    task = asyncio.create_task(supervised(work, "endless"))
    await asyncio.sleep(0)
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
