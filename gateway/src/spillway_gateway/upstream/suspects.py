"""Requests that may have ended the engines that served them.

A request can end an engine's process. Sent to the next engine, it ends that one too, and so does the client's own
retry. So a request whose engine ended is sent to one more at most, and to none if that engine had nothing else to
serve. It is then a suspect: for a time the same request of the same tenant is refused. That time is short after one
engine, which something else may have ended, and long after a second one.

An engine that lives and broke a connection alone makes no suspect, nor does one whose end was known to come: it
drained, or its pod was deleted. If the engine's host cannot be reached either, the machine or the network failed rather
than the process; the request is sent to one more engine even if it was alone.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from enum import Enum
from hashlib import blake2b
from math import ceil
from typing import NamedTuple

from spillway_gateway.errors import (
    EngineConnectTimeout,
    EngineDisconnected,
    EngineFailed,
    EngineRefused,
    GatewayError,
    RequestSuspected,
    UpstreamError,
)
from spillway_gateway.fleet.engine import Engine
from spillway_gateway.turns import Turns
from spillway_gateway.upstream.forward import request_head
from spillway_gateway.upstream.outbound import OutboundRequest, UpstreamServices
from spillway_gateway.upstream.pool import ConnectionPool
from spillway_gateway.upstream.router import Place

logger = logging.getLogger(__name__)

ENTRIES_MAX = 4096
FIRST_SHARE = 0.1  # of limits.suspectSeconds, after one engine
HASHED_BYTES_PER_STEP = 1024 * 1024  # under a millisecond of the event loop
GOING_ON_PER_ITERATION = 32  # requests that one look was for: each is sent again, or fails
LOOK_SECONDS_MAX = 2.0  # for an answer to the question whether an engine lives
LOOK_AGAIN_SECONDS = 0.25  # an engine's connections may break before its port closes
_HEALTH = b"/health"
_MAY_HAVE_ENDED = (EngineDisconnected, EngineFailed)
_NO_WAY_TO_HOST = frozenset({errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT})


class Fingerprint(NamedTuple):
    """A request's content. body_bytes: tells most others apart without a digest."""

    digest: bytes
    body_bytes: int


async def fingerprint_of(request: OutboundRequest) -> Fingerprint:
    """Digest of tenant, route and body as an engine gets them, so that tenants share no suspects."""
    body = request.body
    hashed = blake2b(request.tenant.encode() + b"\0" + request.path + b"\0", digest_size=16)
    for at in range(0, len(body), HASHED_BYTES_PER_STEP):
        if at:
            await asyncio.sleep(0)
        hashed.update(body[at : at + HASHED_BYTES_PER_STEP])
    return Fingerprint(hashed.digest(), len(body))


class Suspects:
    """The suspects of all processes of a gateway. Runs on the event loop.

    seconds: reads for how long a suspect is refused at most, limits.suspectSeconds.
    """

    def __init__(self, seconds: Callable[[], float], clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._heard: Callable[[Fingerprint, float], None] = lambda fingerprint, until: None
        self._clock = clock
        self._until: OrderedDict[Fingerprint, float] = OrderedDict()
        self._lengths: Counter[int] = Counter()
        self._begun: OrderedDict[Fingerprint, float] = OrderedDict()  # whose engine ended within their replies
        self._found: OrderedDict[Fingerprint, float] = OrderedDict()  # suspects, for so long after they were refused

    def __len__(self) -> int:
        return len(self._until)

    def announce(self, heard: Callable[[Fingerprint, float], None]) -> None:
        """Call this for each new one, with the monotonic time until which it is refused."""
        self._heard = heard

    def judge(self, fingerprint: Fingerprint, *, alone: bool, again: bool, begun: bool) -> bool:
        """A request's engine has ended. Whether another engine may get it.

        alone: the engine had no other request. again: the request has already ended as many engines as one may. begun:
        the client has a part of the reply, so the engine did not end when it took the request; if this happens a second
        time, the request is a suspect.
        """
        begun_before = begun and self._unexpired(self._begun, fingerprint)
        if again or (alone and (not begun or begun_before)):
            self._add(fingerprint, several=again or begun_before)
            return False
        if alone:
            self._put(self._begun, fingerprint, self._clock() + self._seconds())
        return True

    def _add(self, fingerprint: Fingerprint, *, several: bool) -> None:
        """several: whether it has ended more than one engine already."""
        several = several or self._unexpired(self._found, fingerprint)
        seconds = self._seconds()
        until = self._clock() + seconds * (1.0 if several else FIRST_SHARE)
        self._put(self._found, fingerprint, until + seconds)
        self.put(fingerprint, until)
        self._heard(fingerprint, until)

    def put(self, fingerprint: Fingerprint, until: float) -> None:
        """Add a suspect that another process found."""
        if fingerprint not in self._until:
            self._lengths[fingerprint.body_bytes] += 1
        for oldest in self._put(self._until, fingerprint, until):
            self._forget_length(oldest)

    async def refused_seconds(self, request: OutboundRequest) -> float:
        """Return for how many seconds the request is still refused; 0 if it is no suspect now."""
        if len(request.body) not in self._lengths:  # nearly always
            return 0.0
        fingerprint = await fingerprint_of(request)
        until = self._until.get(fingerprint)
        if until is None:
            return 0.0
        if not self._unexpired(self._until, fingerprint):
            self._forget_length(fingerprint)
            return 0.0
        return until - self._clock()

    def all(self) -> list[tuple[Fingerprint, float]]:
        """Return the suspects with the times until which they are refused."""
        return list(self._until.items())

    def _unexpired(self, times: OrderedDict[Fingerprint, float], fingerprint: Fingerprint) -> bool:
        until = times.get(fingerprint)
        if until is None:
            return False
        if self._clock() < until:
            return True
        del times[fingerprint]
        return False

    @staticmethod
    def _put(times: OrderedDict[Fingerprint, float], fingerprint: Fingerprint, until: float) -> list[Fingerprint]:
        """Returns what had to make room."""
        times[fingerprint] = until
        times.move_to_end(fingerprint)
        return [times.popitem(last=False)[0] for _ in range(len(times) - ENTRIES_MAX)]

    def _forget_length(self, fingerprint: Fingerprint) -> None:
        self._lengths[fingerprint.body_bytes] -= 1
        if not self._lengths[fingerprint.body_bytes]:
            del self._lengths[fingerprint.body_bytes]


class Look(Enum):
    """The state of an engine that broke a reply off, as a look at it found it."""

    LIVES = "it answers"
    ENDED = "it refuses connections, or reports that its core is dead"
    UNREACHABLE = "its host takes no connection: nothing is known of the process"


class EngineLooks:
    """Asks engines that broke replies off whether they live. One look at a time for each, shared by all requests that
    wait for it, of which a few go on in each iteration of the event loop. On the event loop."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._looks: dict[Engine, asyncio.Task[Look]] = {}
        self._turns = Turns(GOING_ON_PER_ITERATION)

    async def at(self, engine: Engine) -> Look:
        look = self._looks.get(engine)
        if look is None:
            look = self._looks[engine] = asyncio.create_task(self._look(engine))
            look.add_done_callback(lambda done: self._looks.pop(engine, None))
        found = await asyncio.shield(look)
        await self._turns.wait()
        return found

    async def _look(self, engine: Engine) -> Look:
        found = await self._look_once(engine)
        if found is not Look.LIVES:
            return found
        await asyncio.sleep(LOOK_AGAIN_SECONDS)
        return await self._look_once(engine)

    async def _look_once(self, engine: Engine) -> Look:
        head = request_head(engine.base_path.encode() + _HEALTH, engine.host_header, [], 0, b"-", method=b"GET")
        connected = False
        try:
            async with asyncio.timeout(LOOK_SECONDS_MAX):
                connection = await self._pool.open(engine)
                connected = True
                try:
                    connection.send((head,))
                    await connection.head()
                    return Look.LIVES if connection.status < 500 else Look.ENDED
                finally:
                    connection.abort()
                    self._pool.release(engine, connection)
        except EngineConnectTimeout:
            return Look.UNREACHABLE
        except EngineRefused as refused:
            cause = refused.__cause__
            return Look.UNREACHABLE if getattr(cause, "errno", None) in _NO_WAY_TO_HOST else Look.ENDED
        except TimeoutError:
            return Look.ENDED if connected else Look.UNREACHABLE
        except UpstreamError:
            return Look.ENDED
        except GatewayError:  # no connection is free: nothing is known against it
            return Look.LIVES


class EndedEngines:
    """Counts the engines that ended while they had one request."""

    __slots__ = ("_count", "_model", "_request", "_services")

    def __init__(self, request: OutboundRequest, model: str, services: UpstreamServices) -> None:
        self._request = request
        self._model = model
        self._services = services
        self._count = 0

    async def require_unsuspected(self) -> None:
        """Raises RequestSuspected."""
        services = self._services
        if seconds := await services.suspects.refused_seconds(self._request):
            services.metrics.suspect(self._model, "refused").inc()
            raise RequestSuspected(
                f"An engine ended while it served this request, so it is refused for {ceil(seconds)} s more, by the "
                "gateway's limits.suspectSeconds; send it again then, change it, or tell the operator"
            )

    async def first_leg_failed(self, failure: UpstreamError, engine: Engine) -> None:
        """The engine that computed the prompt alone has failed; the request is not lost with it, and goes to another
        engine. If it ends that one too, it is a suspect."""
        if type(failure) in _MAY_HAVE_ENDED and await self._services.looks.at(engine) is not Look.LIVES:
            self._count += 1

    async def allow_another(self, failure: UpstreamError, place: Place, engine: Engine, *, begun: bool) -> bool:
        """An attempt has failed. False if its engine has ended, and no other one may get the request."""
        services = self._services
        if type(failure) not in _MAY_HAVE_ENDED or (look := await services.looks.at(engine)) is Look.LIVES:
            return True
        self._count += 1
        again = self._count >= services.live.limits.ended_engines_max
        if look is Look.UNREACHABLE and not again:
            return True
        if await place.ended(await fingerprint_of(self._request), again=again, begun=begun):
            # Another process, or another request with the same content, may have found out meanwhile.
            return begun or not await services.suspects.refused_seconds(self._request)
        services.metrics.suspect(self._model, "found").inc()
        logger.error(
            "request %s: engine %s ended while it served it; it is not sent again, and refused for a time",
            self._request.shown_id,
            engine.name,
        )
        return False
