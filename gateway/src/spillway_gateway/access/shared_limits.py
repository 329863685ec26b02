"""Limits that all replicas count together: one round trip to Redis per request, and no request fails with Redis.

The round trip of a request has a deadline and also reports the requests that ended since the last one; a background
task reports the rest. After some failures in a row each replica decides by itself, by the buckets that it has kept all
the time, until the background task reaches Redis again.
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
from spillway_gateway.access.limits import NOTHING_OWED, Settlement, SharedLimitsUnavailable, TenantUsage
from spillway_gateway.access.shared_script import SCRIPT, Refusal, arguments, key_of, refusal_of
from spillway_gateway.config.shared_limits import Login, SharedLimitsConfig, login

logger = logging.getLogger(__name__)

FIRST_RETRY_SECONDS = 0.1
REPORTS_AT_A_TIME = 16
BACKGROUND_SECONDS = 1.0  # deadline of a round trip that no request waits for


@dataclass
class _Account:
    """The counts that this replica has to report for one tenant."""

    tenant: Tenant
    key: str
    usage: TenantUsage
    number: int = 0  # of the last report; grows
    owed: Settlement = NOTHING_OWED  # of ended requests, not reported yet
    due: bool = False
    reported_at: float = 0.0


class SharedLimits:
    """The shared limits of one replica. On the event loop.

    secret: equal on all replicas; the names of the Redis keys are derived from it. clock: monotonic seconds. Raises
    ConfigError when a variable of the login is not set.
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
        self._pauses = 0  # between attempts to reach Redis again
        self._late: set[asyncio.Future[Any]] = set()  # round trips past their deadline
        self._work = asyncio.Event()
        self.connected = True
        self.decided_total = 0
        self.decided_alone_total = 0

    async def admit(self, tenant: Tenant, usage: TenantUsage, prompt_tokens: int) -> Refusal | None:
        """Admit a request; None: admitted. usage: this replica's, with it counted. Raises SharedLimitsUnavailable."""
        account = self._account(tenant, usage)
        if not self.connected:
            self.decided_alone_total += 1
            raise SharedLimitsUnavailable
        try:
            reply = await self._round_trip(account, self._config.timeout_seconds, prompt_tokens=prompt_tokens)
        except SharedLimitsUnavailable:
            self.decided_alone_total += 1
            raise
        self.decided_total += 1
        return reply

    def ended(self, tenant: Tenant, usage: TenantUsage, settlement: Settlement) -> None:
        """A request has ended. usage: of this replica, without it."""
        account = self._account(tenant, usage)
        account.due = True
        if self.connected:  # otherwise the tokens of a whole outage would be taken from the shared buckets when it ends
            account.owed += settlement
            self._work.set()

    async def run(self) -> None:
        """Report ended requests, renew leases, and detect when Redis answers again. Runs until it is cancelled."""
        config = self._config
        if self.connected and not await self._answers():
            self._disconnect("no answer at the start")
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
        """Report every tenant with unreported ends, or with a lease that is due for renewal."""
        stale = self._clock() - self._config.lease_seconds / 4
        due = [
            account
            for account in self._accounts.values()
            if account.due or (account.usage.running_requests and account.reported_at <= stale)
        ]

        async def report_some() -> None:
            while due and self.connected:
                try:
                    await self._round_trip(due.pop(), self._patience_seconds)
                except SharedLimitsUnavailable:
                    pass

        await asyncio.gather(*(report_some() for _ in range(min(REPORTS_AT_A_TIME, len(due)))))

    async def close(self) -> None:
        """Report ended requests and close the connections, within BACKGROUND_SECONDS."""
        try:
            async with asyncio.timeout(BACKGROUND_SECONDS):
                if self.connected:
                    await self.report()
                for round_trip in self._late:
                    round_trip.cancel()
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

    async def _round_trip(
        self, account: _Account, seconds: float, *, prompt_tokens: int | None = None
    ) -> Refusal | None:
        """Report, and ask for admission of a request with `prompt_tokens` unless that is None. Ended requests are
        reported at most once, because a round trip without a reply may have been counted."""
        account.number += 1
        owed, account.owed = account.owed, NOTHING_OWED
        account.due, account.reported_at = False, self._clock()
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
            refusal = await self._eval(account.key, values, seconds)
        except (RedisError, OSError, TimeoutError, ValueError) as error:
            account.due = True
            self._work.set()
            self._failures += 1
            if self.connected and self._failures >= self._config.failures:
                self._disconnect(str(error) or error.__class__.__name__)
            raise SharedLimitsUnavailable from error
        self._failures = 0
        return refusal

    async def _eval(self, key: str, values: list[str | int], seconds: float) -> Refusal | None:
        """Run the script. After the deadline the call continues up to BACKGROUND_SECONDS: it may be opening a
        connection, which would never complete if every request cancelled it.

        EVAL sends the whole script: EVALSHA needs a second round trip whenever a server does not have the script, as
        after a restart or a failover.
        """
        call = asyncio.ensure_future(self._client.eval(SCRIPT, 1, key, *values))
        try:
            async with asyncio.timeout(seconds):
                return refusal_of(await asyncio.shield(call))
        finally:
            if not call.done():
                self._late.add(call)
                call.add_done_callback(self._late_call_ended)

    def _late_call_ended(self, call: asyncio.Future[Any]) -> None:
        self._late.discard(call)
        if not call.cancelled():
            call.exception()  # retrieved, so that asyncio does not log it as never retrieved

    def _disconnect(self, why: str) -> None:
        """Let this replica decide by itself from now on."""
        self.connected = False
        if self._clock() - self._back_at > self._config.retry_seconds_max:
            self._pauses = 0  # Redis had answered for a while: this is another outage
        for account in self._accounts.values():
            account.owed = NOTHING_OWED
        logger.warning(
            "auth.sharedLimits: Redis does not answer (%s); tenants' limits are counted per replica until it does", why
        )
        self._work.set()  # the background task starts to check whether Redis answers

    async def _answers(self) -> bool:
        """Connect if needed, then run the script within a request's deadline, for the tenant NOBODY."""
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
            await self._eval(key, values, self._patience_seconds)
            await self._eval(key, values, self._config.timeout_seconds)
        except (RedisError, OSError, TimeoutError, ValueError):
            return False
        return True

    async def _wait_until_back(self) -> None:
        """One pause, exponentially longer each time, and one attempt."""
        seconds = min(self._config.retry_seconds_max, FIRST_RETRY_SECONDS * 2.0 ** min(self._pauses, 30))
        self._pauses += 1
        await asyncio.sleep(seconds * (1.0 - 0.5 * random.random()))  # noqa: S311 - spreads load, no secret
        if not await self._answers():
            return
        self._failures = 0
        self._back_at = self._clock()
        self.connected = True
        logger.info("auth.sharedLimits: Redis answers again; tenants' limits are counted for all replicas")
        for account in self._accounts.values():
            account.due = account.due or account.usage.running_requests > 0
        await self.report()


def make_client(config: SharedLimitsConfig, given: Login) -> Any:
    """A redis-py client with a bounded pool, without retries. Deadlines in seconds from the configuration."""
    parts = urlsplit(config.url)
    patience = max(BACKGROUND_SECONDS, config.timeout_seconds)
    common: dict[str, Any] = {
        "username": given.username,
        "password": given.password,
        "socket_connect_timeout": patience,
        "socket_timeout": patience,  # a request has a shorter deadline, timeout_seconds
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
