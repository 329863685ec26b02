"""Tasks that run beside the requests: long-lived ones are started again when they fail."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import TypeVar

Result = TypeVar("Result")

logger = logging.getLogger(__name__)

RESTART_SECONDS_MIN = 1.0
RESTART_SECONDS_MAX = 60.0
SOUND_SECONDS = 60.0  # of running, after which a failure is no repetition


async def supervised(
    work: Callable[[], Coroutine[object, object, None]],
    name: str,
    *,
    pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> None:
    """Run `work()` until it returns or is cancelled. When it fails, which is a defect, log that and run it again after
    a pause that doubles with each failure in a row. pause: waits for the given seconds."""
    loop = asyncio.get_running_loop()
    seconds = RESTART_SECONDS_MIN
    while True:
        began = loop.time()
        try:
            return await work()
        except Exception:
            if loop.time() - began > SOUND_SECONDS:
                seconds = RESTART_SECONDS_MIN
            logger.exception("background task failed, it is started again in %g s: %s", seconds, name)
        await pause(seconds)
        seconds = min(2.0 * seconds, RESTART_SECONDS_MAX)


async def on_daemon_thread(function: Callable[[], Result]) -> Result:
    """Run the function as asyncio.to_thread() does, but do not make the end of the process wait for it."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()

    def settle(value: Result | None, error: BaseException | None) -> None:
        if not done.done():
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
        value, failure = None, None
        try:
            value = function()
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, value, failure)

    threading.Thread(target=run, daemon=True).start()
    return await done


async def guarded(work: Coroutine[object, object, None], name: str) -> None:
    """Work that is done once. It is not started again; its exception is logged."""
    try:
        await work
    except Exception:
        logger.exception("background task stopped: %s", name)
        raise
