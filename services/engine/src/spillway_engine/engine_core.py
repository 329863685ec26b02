"""Calls to EngineCore over vLLM's own line for utilities, from the API server's process."""

from __future__ import annotations

import asyncio
from typing import Any

ANSWER_SECONDS = 10.0  # EngineCore answers between two steps


class EngineEndedError(Exception):
    """EngineCore has ended, so vLLM's line to it is closed."""


async def ask_engine_core(app: Any, method: str, *arguments: object, rank: int | None = None) -> Any:
    """The answer of a method of EngineCore that the connector has added.

    Args:
        app: vLLM's application.
        rank: the number of the data parallel rank to ask; None: the engine has only one.

    Raises:
        LookupError: The application has no engine.
        TimeoutError: No answer came in time.
        EngineEndedError: None will come.
        Exception: What the method raised, or vLLM without it.
    """
    core = getattr(getattr(app.state, "engine_client", None), "engine_core", None)
    if core is None:
        raise LookupError("the application has no engine")
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            if rank is None:
                return await core.call_utility_async(method, *arguments)
            # vLLM's own public call asks every rank.
            return await core._call_utility_async(method, *arguments, engine=core.core_engines[rank])
    except Exception as error:
        if getattr(getattr(core, "resources", None), "engine_dead", False):
            raise EngineEndedError(str(error)) from error
        raise
