"""Polls every engine: GET /ready, or /health if the engine has no /ready.

A refused connection takes an engine down at once; polls that time out do so only after several in a row, since a busy
machine answers late. One good answer makes it ready again. A request that failed to connect triggers a poll.

The data parallel ranks of an engine are polled together, since one server answers for all of them.

A ready engine's /metrics and /v1/models are read in the same round, over the same connection: requests of other
senders and the rates it measured, and the LoRA adapters that it has loaded by now. Readiness never depends on them:
without a page, or with one that is late or too long, routing uses only what this gateway sent, and the last list.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import time

import aiohttp
import msgspec

from spillway_gateway.config.settings import HealthConfig
from spillway_gateway.fleet.engine import Engine, EngineState
from spillway_gateway.fleet.engine_metrics import PAGE_BYTES_MAX, PagesOfRanks, read_metrics, wanted_lines
from spillway_gateway.fleet.listed_models import (
    MODELS_BYTES_MAX,
    VERSION_BYTES_MAX,
    ListedModels,
    read_listed_models,
    read_version,
)
from spillway_gateway.fleet.tier_traffic import moved_bytes

logger = logging.getLogger(__name__)

DRAINING = "not ready: draining"  # answer of an engine pod while it shuts down
ADAPTERS_LOGGED_MAX = 10  # names in one line
NAME_CHARS_MAX = 100  # of an engine's name for something, in the log
RETURN_PERIOD_SECONDS = 0.25  # between two polls of an engine that was lost a moment ago
METRICS_STALE_PERIODS = 5  # without a reading, after which the last one is stale


class HealthPoller:
    """Polls one engine, or all data parallel ranks of one, until cancelled. On the event loop. engine_key: the engine's
    own, which /v1/models may need."""

    def __init__(
        self, engine: Engine, session: aiohttp.ClientSession, config: HealthConfig, engine_key: str | None = None
    ) -> None:
        self._engine = engine  # the first of those that are polled
        self._ranks = [engine]
        self._headers = {"authorization": f"Bearer {engine_key}"} if engine_key is not None else {}
        self._session = session
        self._config = config
        self._path = "/ready"
        self._timeouts = 0
        self._observed_at = float("-inf")
        self._asked_at = float("-inf")
        self._ending_since: float | None = None
        self._wake = asyncio.Event()
        engine.poll_soon = self._wake.set

    def join(self, engine: Engine) -> None:
        """Poll another rank of the same process too."""
        self._ranks.append(engine)
        engine.poll_soon = self._wake.set

    def leave(self, engine: Engine) -> bool:
        """Stop polling this one. False: it was the last, and the poller has nothing left to do."""
        if len(self._ranks) > 1:
            self._ranks.remove(engine)
            self._engine = self._ranks[0]
            return True
        return False

    async def run(self) -> None:
        """Poll every period_seconds, or when triggered, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            self._wake.clear()
            before = {engine: engine.state for engine in self._ranks}
            await self.poll_once()
            await self.observe_once()
            self._end_requests(loop.time())
            for engine, state in before.items():
                if engine.state is not state:
                    logger.info("engine %s is %s: %s", engine.name, engine.state.value, engine.answer)
            period = self._config.period_seconds
            if any(engine.may_return_for(self._config.return_seconds) for engine in self._ranks):
                period = min(period, RETURN_PERIOD_SECONDS)  # requests may wait for it
            pause = max(0.05, started + period - loop.time())
            try:
                async with asyncio.timeout(pause):
                    await self._wake.wait()
                await asyncio.sleep(0.05)  # a burst of failures causes one poll
            except TimeoutError:
                pass

    async def poll_once(self) -> None:
        """One poll; never raises but on cancellation."""
        absent: dict[int, str] = {}
        try:
            state, answer = await self._ask(self._path)
            if state is None:
                self._path = "/health" if self._path == "/ready" else "/ready"
                state, answer = await self._ask(self._path)
            if state is EngineState.READY and not self._all_ready():
                await self._require_connection()
                state, answer = await self._serves_model()
                if state is EngineState.READY:
                    absent = await self._absent_ranks()
        except TimeoutError:
            self._timeouts += 1
            answer = f"no answer within {self._config.timeout_seconds:g} s"
            for engine in list(self._ranks):
                if self._timeouts >= self._config.timeouts_before_down or engine.state is not EngineState.READY:
                    engine.hung(answer)
            return
        except (aiohttp.ClientError, OSError) as error:
            for engine in list(self._ranks):
                engine.set_state(EngineState.DOWN, _why(error))
            return
        self._timeouts = 0
        for engine in list(self._ranks):
            engine.draining = answer == DRAINING
            if engine.rank in absent:
                engine.set_state(EngineState.NOT_READY, absent[engine.rank])
            else:
                engine.set_state(state or EngineState.NOT_READY, answer)

    async def _require_connection(self) -> None:
        """Requests need a new connection to an engine that was down. The polls' own may go on while the network takes
        no new one. Raises OSError or TimeoutError."""
        if any(engine.state is EngineState.DOWN for engine in self._ranks):
            async with asyncio.timeout(self._config.timeout_seconds):
                _, writer = await asyncio.open_connection(self._engine.host, self._engine.port)
            writer.close()

    def _all_ready(self) -> bool:
        return all(engine.state is EngineState.READY for engine in self._ranks)

    async def _absent_ranks(self) -> dict[int, str]:
        """Ranks that the process does not have, with the reason: vLLM refuses requests that name one. That is so while
        engines are replaced by ones with more ranks. An engine without metrics is taken at the configuration's word."""
        ranks = [engine.rank for engine in self._ranks if engine.rank is not None]
        page = await self._metrics_page() if ranks else None
        known = PagesOfRanks(page).ranks if page is not None else ()
        if not known:
            return {}
        return {rank: f"has {len(known)} data parallel ranks" for rank in ranks if rank not in known}

    async def observe_once(self) -> None:
        """Read a ready engine's /metrics and /v1/models, at most once per metricsPeriodSeconds; never raises but on
        cancellation. One that did not answer the poll is polled again at once: each page would take as long."""
        config = self._config
        now = asyncio.get_running_loop().time()
        ready = not self._timeouts and any(engine.state is EngineState.READY for engine in self._ranks)
        if ready and now - self._asked_at >= config.metrics_period_seconds:
            self._asked_at = now
            before = {engine: engine.running_requests for engine in self._ranks}
            page = await self._metrics_page()
            if page is not None:
                self._observed_at = asyncio.get_running_loop().time()
                pages = PagesOfRanks(page if self._engine.rank is not None else b"")
                for engine, requests in before.items():
                    own = page if engine.rank is None else pages.of(engine.rank)
                    engine.observed(read_metrics(own), requests)
                    engine.traffic.observed(moved_bytes(own), time.monotonic())
                    await asyncio.sleep(0)  # a page of many ranks is read once for each
            body = await self._optional_page("/v1/models", MODELS_BYTES_MAX)
            listed = await self._read_models(body or b"")
            if listed is not None:
                self._models_listed(listed)
        if now - self._observed_at > METRICS_STALE_PERIODS * config.metrics_period_seconds:
            for engine in list(self._ranks):
                engine.unobserved()

    def _end_requests(self, now: float) -> None:
        """vLLM 0.23 may hang at its shutdown deadline while clients are connected: the gateway closes their connections
        before that."""
        if not any(engine.was_to_end for engine in self._ranks):
            self._ending_since = None
        elif self._ending_since is None:
            self._ending_since = now
        elif now - self._ending_since >= self._config.ending_seconds:
            for engine in list(self._ranks):
                engine.end_requests()

    async def _serves_model(self) -> tuple[EngineState, str]:
        """An engine is ready once it also lists the model: its address may belong to another model's engine by now. An
        engine that requires a key or has no such route is accepted."""
        version = read_version(await self._optional_page("/version", VERSION_BYTES_MAX))
        for engine in list(self._ranks):
            engine.set_version(version)
        status, body = await self._page("/v1/models", MODELS_BYTES_MAX)
        if status >= 500:
            return EngineState.NOT_READY, f"/v1/models answers status {status}"
        listed = await self._read_models(body) if status == 200 and body is not None else None
        self._models_listed(listed)
        if listed is None or self._engine.model in listed.names:
            return EngineState.READY, "ready"
        shown = ", ".join([_cut(name) for name in heapq.nsmallest(5, listed.names)]) or "no model"
        return EngineState.NOT_READY, f"serves {shown[:200]}, not {self._engine.model}"

    async def _read_models(self, body: bytes) -> ListedModels | None:
        """A list that has not changed since the last time is not read again. A list of tens of thousands of adapters
        takes some milliseconds, so reading it and noting it take one event loop iteration each."""
        known = self._engine.listed
        if known is not None and known.body == body:
            return known
        await asyncio.sleep(0)
        listed = read_listed_models(body)
        await asyncio.sleep(0)
        return listed

    def _models_listed(self, listed: ListedModels | None) -> None:
        engine = self._engine
        before = engine.adapters or frozenset()
        for each in self._ranks:
            each.models_listed(listed)
        now = engine.adapters or frozenset()
        for change, names in (("loaded", now - before), ("unloaded", before - now)):
            if names:
                shown = ", ".join([_cut(name) for name in heapq.nsmallest(ADAPTERS_LOGGED_MAX, names)])
                logger.info("engine %s: %d adapters %s: %s", engine.name, len(names), change, shown)

    async def _metrics_page(self) -> bytes | None:
        """The lines of /metrics that are read here."""
        page = await self._optional_page("/metrics", PAGE_BYTES_MAX)
        if page is None:
            return None
        steps = wanted_lines(page)
        while True:
            try:
                next(steps)
            except StopIteration as found:
                lines: bytes = found.value
                return lines
            await asyncio.sleep(0)

    async def _optional_page(self, path: str, bytes_max: int) -> bytes | None:
        """Return the page, or None if the engine does not give one."""
        try:
            status, body = await self._page(path, bytes_max)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            logger.debug("engine %s: %s not read (%s)", self._engine.name, path, error.__class__.__name__)
            return None
        return body if status == 200 else None

    async def _page(self, path: str, bytes_max: int) -> tuple[int, bytes | None]:
        """Status and body; no body of a status other than 200, nor one that is longer than bytes_max."""
        timeout = aiohttp.ClientTimeout(total=self._config.timeout_seconds)
        url = self._engine.config.url.rstrip("/") + path
        headers = self._headers
        async with self._session.get(url, timeout=timeout, allow_redirects=False, headers=headers) as reply:
            if reply.status != 200:
                return reply.status, None
            parts: list[bytes] = []
            size = 0
            async for part in reply.content.iter_any():
                size += len(part)
                if size > bytes_max:
                    reply.close()
                    return reply.status, None
                parts.append(part)
            return reply.status, b"".join(parts)

    async def _ask(self, path: str) -> tuple[EngineState | None, str]:
        timeout = aiohttp.ClientTimeout(total=self._config.timeout_seconds)
        url = self._engine.config.url.rstrip("/") + path
        async with self._session.get(url, timeout=timeout, allow_redirects=False) as reply:
            if reply.status == 200:
                return EngineState.READY, "ready"
            if reply.status == 404:
                return None, "no readiness route"
            return EngineState.NOT_READY, _reason(reply.status, await reply.content.read(4096))


def _cut(name: str) -> str:
    return name if len(name) <= NAME_CHARS_MAX else name[:NAME_CHARS_MAX] + "..."


def _reason(status: int, body: bytes) -> str:
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        document = None
    reason = document.get("reason") if isinstance(document, dict) else None
    return f"not ready: {reason[:200]}" if isinstance(reason, str) else f"answers status {status}"


def _why(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        cause = error.os_error.strerror or str(error.os_error)
        return f"cannot connect ({cause})"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "closed the connection"
    if isinstance(error, OSError) and not isinstance(error, aiohttp.ClientError):
        return f"cannot connect ({error.strerror or error})"
    return f"cannot be asked ({error.__class__.__name__})"
