"""Limits that all replicas count together: one question to Redis per request, and none of its troubles for a request.

A request asks once, within a deadline, and that question also tells what ended since the last one; ends that no request
takes along are told in the background. After some failures in a row requests no longer ask: each replica decides alone,
by the sums it has kept all the time, until the background task has got an answer again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import redis.asyncio as redis
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from spillway_gateway.access.keys import NOBODY, Tenant
from spillway_gateway.access.limits import NOTHING_OWED, Settlement, SharedLimitsAway, TenantUsage
from spillway_gateway.access.shared_script import SCRIPT, Refusal, arguments, key_of, refusal_of
from spillway_gateway.config.shared_limits import Login, SharedLimitsConfig, login

logger = logging.getLogger(__name__)

FIRST_RETRY_SECONDS = 0.1
REPORTS_AT_A_TIME = 16
BACKGROUND_SECONDS = 1.0  # of a question that no request waits for, or waits for any more


@dataclass
class _Account:
    """What this replica has to tell of one tenant."""

    tenant: Tenant
    key: str
    usage: TenantUsage
    number: int = 0  # of the last message; they grow
    owed: Settlement = NOTHING_OWED  # of requests that ended; not told yet
    due: bool = False
    told_at: float = 0.0


class SharedLimits:
    """secret: equal on all replicas; the names of the keys come from it. clock: monotonic seconds.

    Raises ConfigError when a variable of the login is not set.
    """

    def __init__(
        self, config: SharedLimitsConfig, secret: bytes, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._patience_seconds = max(BACKGROUND_SECONDS, config.timeout_seconds)
        self._secret = secret
        self._clock = clock
        self._client = make_client(config, login(config))
        self._replica = os.urandom(8).hex()
        self._accounts: dict[str, _Account] = {}
        self._failures = 0
        self._back_at = float("-inf")
        self._pauses = 0  # between tries to get an answer again
        self._late: set[asyncio.Future[Any]] = set()  # questions that nobody waits for any more
        self._work = asyncio.Event()
        self.connected = True
        self.decided_total = 0
        self.left_alone_total = 0

    async def admit(self, tenant: Tenant, usage: TenantUsage, prompt_tokens: int) -> Refusal | None:
        """None: let in. usage: this replica's own, with the request counted in already. Raises SharedLimitsAway."""
        account = self._account(tenant, usage)
        if not self.connected:
            self.left_alone_total += 1
            raise SharedLimitsAway
        try:
            reply = await self._tell(account, self._config.timeout_seconds, prompt_tokens=prompt_tokens)
        except SharedLimitsAway:
            self.left_alone_total += 1
            raise
        self.decided_total += 1
        return reply

    def ended(self, tenant: Tenant, usage: TenantUsage, settlement: Settlement) -> None:
        """A request is over. usage: as it is without it."""
        account = self._account(tenant, usage)
        account.due = True
        if self.connected:  # else the shared sums stand still, and would count an outage's tokens all at once
            account.owed += settlement
            self._work.set()

    async def run(self) -> None:
        """Tell what ended, keep leases alive, and find out when Redis is back. Until cancelled."""
        config = self._config
        if self.connected and not await self._answers():
            self._leave("no answer at the start")
        while True:
            if not self.connected:
                await self._wait_until_back()
                continue
            try:
                async with asyncio.timeout(config.lease_seconds / 4):
                    await self._work.wait()
                await asyncio.sleep(config.report_seconds)
            except TimeoutError:
                pass
            self._work.clear()
            await self.report()

    async def report(self) -> None:
        """Tell of every tenant whose news nobody took along, or whose lease has run for a while."""
        stale = self._clock() - self._config.lease_seconds / 4
        due = [
            account
            for account in self._accounts.values()
            if account.due or (account.usage.running_requests and account.told_at <= stale)
        ]
        gate = asyncio.Semaphore(REPORTS_AT_A_TIME)

        async def tell(account: _Account) -> None:
            async with gate:
                if self.connected:
                    try:
                        await self._tell(account, self._patience_seconds)
                    except SharedLimitsAway:
                        pass

        await asyncio.gather(*(tell(account) for account in due))

    async def close(self) -> None:
        try:
            async with asyncio.timeout(BACKGROUND_SECONDS):
                if self.connected:
                    await self.report()
                for question in self._late:
                    question.cancel()
                await self._client.aclose()
        except (RedisError, OSError, TimeoutError):
            pass

    def _account(self, tenant: Tenant, usage: TenantUsage) -> _Account:
        account = self._accounts.get(tenant.name)
        if account is None:
            key = key_of(self._config.key_prefix, self._secret, tenant.name)
            account = self._accounts[tenant.name] = _Account(tenant, key, usage)
        account.tenant = tenant  # its limits may have changed with the keys file
        return account

    async def _tell(self, account: _Account, seconds: float, *, prompt_tokens: int | None = None) -> Refusal | None:
        """One round trip. prompt_tokens: of the request that asks; None: none does. What it tells is told at most once:
        whether a question without an answer was counted is not known."""
        account.number += 1
        owed, account.owed = account.owed, NOTHING_OWED
        account.due, account.told_at = False, self._clock()
        values = arguments(
            account.tenant,
            replica=self._replica,
            number=account.number,
            running_requests=account.usage.running_requests,
            lease_seconds=self._config.lease_seconds,
            asks=prompt_tokens is not None,
            prompt_tokens=prompt_tokens or 0,
            owed=owed,
        )
        try:
            refusal = await self._ask(account.key, values, seconds)
        except (RedisError, OSError, TimeoutError, ValueError) as error:
            account.due = True
            self._work.set()
            self._failures += 1
            if self.connected and self._failures >= self._config.failures:
                self._leave(str(error) or error.__class__.__name__)
            raise SharedLimitsAway from error
        self._failures = 0
        return refusal

    async def _ask(self, key: str, values: list[str | int], seconds: float) -> Refusal | None:
        """A question that was not answered in time goes on without us, up to BACKGROUND_SECONDS: it may be what opens a
        connection, which would never be finished if each request took its own along when it gives up.

        The whole script goes out each time. Asking for it by its hash is a second round trip whenever a server, after a
        restart or a failover, does not have it.
        """
        question = asyncio.ensure_future(self._client.eval(SCRIPT, 1, key, *values))
        try:
            async with asyncio.timeout(seconds):
                return refusal_of(await asyncio.shield(question))
        finally:
            if not question.done():
                self._late.add(question)
                question.add_done_callback(self._came_late)

    def _came_late(self, question: asyncio.Future[Any]) -> None:
        self._late.discard(question)
        if not question.cancelled():
            question.exception()  # heard, so that the loop does not complain that nobody did

    def _leave(self, why: str) -> None:
        """Requests are decided alone from now on."""
        self.connected = False
        if self._clock() - self._back_at > self._config.retry_seconds_max:
            self._pauses = 0  # it had been back for good, and this is another trouble
        for account in self._accounts.values():
            account.owed = NOTHING_OWED
        logger.warning(
            "auth.sharedLimits: Redis does not answer (%s); tenants' limits hold per replica until it does", why
        )
        self._work.set()  # the background task goes over to asking whether it is back

    async def _answers(self) -> bool:
        """Connects if need be, and then asks as a request does, of nobody's tenant."""
        values = arguments(
            NOBODY,
            replica=self._replica,
            number=0,
            running_requests=0,
            lease_seconds=self._config.lease_seconds,
            asks=False,
            prompt_tokens=0,
            owed=NOTHING_OWED,
        )
        key = key_of(self._config.key_prefix, self._secret, "")
        try:
            await self._ask(key, values, self._patience_seconds)
            await self._ask(key, values, self._config.timeout_seconds)
        except (RedisError, OSError, TimeoutError, ValueError):
            return False
        return True

    async def _wait_until_back(self) -> None:
        """One pause, ever longer, and one try."""
        seconds = min(self._config.retry_seconds_max, FIRST_RETRY_SECONDS * 2.0 ** min(self._pauses, 30))
        self._pauses += 1
        await asyncio.sleep(seconds * (1.0 - 0.5 * random.random()))  # noqa: S311 - spreads load, no secret
        if not await self._answers():
            return
        self._failures = 0
        self._back_at = self._clock()
        self.connected = True
        logger.info("auth.sharedLimits: Redis answers again; replicas count together")
        for account in self._accounts.values():
            account.due = account.due or account.usage.running_requests > 0
        await self.report()


def make_client(config: SharedLimitsConfig, given: Login) -> Any:
    """One client with a bounded pool that neither retries nor waits longer than it has to."""
    parts = urlsplit(config.url)
    patience = max(BACKGROUND_SECONDS, config.timeout_seconds)
    common: dict[str, Any] = {
        "username": given.username,
        "password": given.password,
        "socket_connect_timeout": patience,
        "socket_timeout": patience,  # a request waits less long, see timeout_seconds
        "protocol": 2,
    }
    secure: dict[str, Any] = {"ssl_ca_certs": config.tls_ca_file} if config.tls_ca_file is not None else {}
    retry = Retry(NoBackoff(), 0)
    if parts.scheme.endswith("-cluster"):
        tls: dict[str, Any] = {"ssl": True, **secure} if parts.scheme == "rediss-cluster" else {}
        return RedisCluster(
            host=parts.hostname,
            port=parts.port or 6379,
            max_connections=config.connections,
            retry=retry,
            **common,
            **tls,
        )
    pool = redis.BlockingConnectionPool.from_url(
        config.url,
        max_connections=config.connections,
        timeout=patience,
        retry=retry,
        **common,
        **(secure if parts.scheme == "rediss" else {}),
    )
    return redis.Redis(connection_pool=pool)
