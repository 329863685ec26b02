"""The routes that Spillway adds to vLLM's HTTP server, as plain ASGI: ready, configuration, hints, self-check, drain.

Loaded by vLLM through `--middleware spillway_engine.middleware.ReadinessMiddleware`, so it runs in the API-server
process, outermost, on that process's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

from spillway_engine import promotion_hints
from spillway_engine.in_flight import AsgiApp, InFlightRequests, Message, Receive, Scope, Send, error_body, send_json
from spillway_engine.in_process import Ask, ask_through
from spillway_engine.messages_usage import report_cached_tokens
from spillway_engine.pod_channel import MessageBuffer, PodBrief, encode_message
from spillway_engine.self_check import SelfCheckFailed, check_ranks
from spillway_engine.settling import IDLE_SECONDS, IDLE_SETTLE_SECONDS_MAX, Settled, settle
from spillway_engine.weight_names import WeightNames
from spillway_settings.vllm_salts import why_salts_are_dropped
from spillway_settings.wire import CONFIG_PATH, ENDING_ERROR, PROMOTE_PATH, WEIGHTS_PATH

logger = logging.getLogger("vllm.spillway_engine")

# Answered at any time and never counted: probes and scrapes must work while draining.
UNCOUNTED_PATHS = ("/health", "/ping", "/metrics", "/version", "/load")
ORPHAN_SECONDS = 15.0
VERSION = version("spillway-engine")  # of the process that runs, whatever is installed later
DRAINING = "the engine is draining and takes no new requests"
ABORT_SECONDS = 5.0  # from cancelling the last requests to their tasks having ended


class ReadinessMiddleware:
    """Readiness moves one way: starting -> self-check -> ready -> draining, or to failed instead of ready."""

    def __init__(self, app: AsgiApp, brief: PodBrief | None = None) -> None:
        self._app = app
        self._brief = brief if brief is not None else PodBrief.from_environment(os.environ)
        self._reason: str | None = "starting"  # None: ready
        self._requests = InFlightRequests()
        self._hints = promotion_hints.PromotionHints(self._brief.data_parallel_ranks)
        self._weights = WeightNames(self._brief.data_parallel_ranks)
        self._refusal: str | None = None  # the answer to new requests; None: they are served
        self._hurry = asyncio.Event()
        self._ranks_lost = False
        self._parent: asyncio.StreamWriter | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._engine: Any = None  # vLLM's application, once it has started

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, self._watching_startup(scope, send))
        elif scope["type"] != "http" or scope["path"].startswith(UNCOUNTED_PATHS):
            await self._app(scope, receive, send)
        elif scope["path"] == "/ready":
            await self._answer_ready(send)
        elif scope["path"] == CONFIG_PATH:
            await send_json(send, 200, {**self._brief.configuration, "version": VERSION})
        elif scope["path"] == PROMOTE_PATH and self._refusal is None:
            await send_json(send, *await self._hints.answer(scope, receive))
        elif scope["path"] == WEIGHTS_PATH and self._refusal is None:
            await send_json(send, *await self._weights.answer(scope, receive))
        elif self._refusal is not None:
            await send_json(send, 503, error_body(self._refusal, 503, ENDING_ERROR))
        else:
            await self._requests.run(self._app, scope, receive, send)

    async def _answer_ready(self, send: Send) -> None:
        if self._reason is None:
            await send_json(send, 200, {"ready": True})
        else:
            await send_json(send, 503, {"ready": False, "reason": self._reason})

    def _watching_startup(self, scope: Scope, send: Send) -> Send:
        async def watch(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                self._refusal = self._join_vllm(scope)  # before the port is open
            await send(message)
            if message["type"] == "lifespan.startup.complete":
                ranks = self._brief.data_parallel_ranks
                asks = [ask_through(self._app, scope, rank if ranks > 1 else None) for rank in range(ranks)]
                self._engine = scope.get("app")
                self._start(self._serve(asks))

        return watch

    def _join_vllm(self, scope: Scope) -> str | None:
        """Add to vLLM's server what it lacks.

        Returns why this engine must not serve, judged by the configuration that vLLM made of all its arguments.
        """
        config = getattr(getattr(scope.get("app"), "state", None), "vllm_config", None)
        if config is None:
            return None  # not vLLM's own application
        import vllm  # noqa: PLC0415  loaded already in vLLM's server; the package does without it
        from vllm.entrypoints.anthropic import serving  # noqa: PLC0415

        report_cached_tokens(serving)
        why = why_salts_are_dropped(config, vllm.__version__)
        return None if why is None else f"{self._brief.names.name('extraArgs')}: {why}"

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, asks: Sequence[Ask]) -> None:
        if self._brief.control_fd is not None:
            await self._connect_parent(self._brief.control_fd)
        self._tell({"event": "serving"})
        if self._refusal is not None:
            self._fail(self._refusal)
            return
        if self._brief.self_check:
            self._move("self-check", only_from="starting")
            try:
                measured = await check_ranks(asks, self._brief)
            except Exception as error:
                known = isinstance(error, SelfCheckFailed)
                self._fail(f"self-check failed: {error if known else f'{type(error).__name__}: {error}'}")
                return
            logger.info("self-check passed: %s", measured)
        if self._reason in ("starting", "self-check"):
            self._reason = None
            self._tell({"event": "ready"})
            if self._brief.settles:
                await self._settle_when_idle()

    def _fail(self, reason: str) -> None:
        """The parent ends an engine that may never serve."""
        for state in ("starting", "self-check"):
            self._move(reason, only_from=state)
        logger.error("%s", reason)
        self._tell({"event": "self_check_failed", "reason": reason})

    def _move(self, reason: str, only_from: str) -> None:
        if self._reason == only_from:
            self._reason = reason

    async def _connect_parent(self, control_fd: int) -> None:
        reader, self._parent = await asyncio.open_connection(sock=socket.socket(fileno=control_fd))
        self._start(self._follow_parent(reader))

    async def _follow_parent(self, reader: asyncio.StreamReader) -> None:
        buffer = MessageBuffer()
        while data := await reader.read(4096):
            for order in buffer.feed(data):
                if order["order"] == "drain":
                    self._start(self._drain(order["delay_seconds"], order["timeout_seconds"]))
                elif order["order"] == "hurry":
                    self._hurry.set()
                elif order["order"] == "abandon":
                    self._ranks_lost = True
                    self._hurry.set()
                    self._start(self._drain(0.0, 0.0))
        # The parent is gone without having stopped us. The watchdog ends this group within moments; should it have been
        # killed as well, no other process will.
        await asyncio.sleep(ORPHAN_SECONDS)
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpgrp(), signal.SIGKILL)

    def _tell(self, event: dict[str, Any]) -> None:
        if self._parent is not None:
            self._parent.write(encode_message(event))

    async def _drain(self, delay_seconds: float, timeout_seconds: float) -> None:
        """Report "not ready" at once, serve on during the delay, then refuse new work, wait for what runs, and end what
        is left."""
        if self._reason == "draining":
            return
        self._reason = "draining"
        logger.info("draining: %d requests running", len(self._requests))
        await self._wait_unless_hurried(self._hurry.wait(), delay_seconds)
        self._refusal = DRAINING
        running, until = len(self._requests), time.monotonic() + timeout_seconds
        await self._wait_unless_hurried(self._requests.wait_idle(timeout_seconds), timeout_seconds)
        cancelled = self._requests.cancel_all()
        await self._requests.wait_idle(ABORT_SECONDS)
        settled = await self._settle(until - time.monotonic(), self._hurry.is_set)
        logger.info(
            "drained: %d requests cancelled; %d chunks (%d bytes) stored in %.1f s, %d left behind",
            cancelled,
            settled.chunks,
            settled.size_bytes,
            settled.seconds,
            settled.left,
        )
        self._tell(
            {
                "event": "drained",
                "finished": running - cancelled,
                "cancelled": cancelled,
                "stored": settled.chunks,
                "left": settled.left,
            }
        )

    async def _settle(self, seconds: float, interrupted: Callable[[], bool]) -> Settled:
        if self._engine is None or not self._brief.settles or self._ranks_lost or seconds <= 0:
            return Settled()
        return await settle(self._engine, self._brief.data_parallel_ranks, seconds, interrupted)

    def _is_wanted_since(self, begun: int) -> bool:
        """Whether a request has begun behind the first `begun` ones, or the engine serves no longer."""
        return self._requests.begun != begun or self._reason is not None

    async def _settle_when_idle(self) -> None:
        """Let the engine settle; called once for each time that it becomes idle."""
        settled_at = 0  # how many requests had begun
        while self._reason is None:
            begun = self._requests.begun
            await asyncio.sleep(IDLE_SECONDS)
            if len(self._requests) or begun == settled_at or self._is_wanted_since(begun):
                continue
            settled_at = begun
            settled = await self._settle(IDLE_SETTLE_SECONDS_MAX, partial(self._is_wanted_since, begun))
            if settled.chunks:
                logger.info("idle: %d chunks stored in %.1f s, %d left", settled.chunks, settled.seconds, settled.left)

    async def _wait_unless_hurried(self, wait: Any, timeout_seconds: float) -> None:
        hurried = asyncio.ensure_future(self._hurry.wait())
        waiting = asyncio.ensure_future(wait)
        await asyncio.wait({hurried, waiting}, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        waiting.cancel()
