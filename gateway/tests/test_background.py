from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from spillway_gateway.background import RESTART_SECONDS_MAX, on_daemon_thread, supervised


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


async def test_long_work_is_on_a_thread_for_which_the_process_does_not_wait() -> None:
    assert await on_daemon_thread(lambda: threading.current_thread().daemon) is True

    def fails() -> None:
        raise ValueError("work")

    with pytest.raises(ValueError, match="work"):
        await on_daemon_thread(fails)


async def test_work_that_is_given_up_ends_without_a_trace() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go_on.wait()

    task = asyncio.create_task(on_daemon_thread(work))
    await asyncio.to_thread(begun.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    go_on.set()
