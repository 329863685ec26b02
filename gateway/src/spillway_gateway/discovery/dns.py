"""Resolves a model's engines periodically; a failed resolution keeps those of the last one."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Sequence
from typing import Any

import dns.asyncresolver
import dns.exception
import dns.nameserver
import dns.rdatatype
import dns.resolver

from spillway_gateway.config.discovery import DnsDiscovery, nameserver
from spillway_gateway.config.settings import EngineConfig
from spillway_gateway.discovery.found import FoundEngine, Publish, SourceFailed, SourceStatus

logger = logging.getLogger(__name__)

TARGETS_MAX = 1_024  # of one SRV answer
RESOLUTIONS_AT_A_TIME = 16


class DnsSource:
    """period_seconds between two resolutions. An empty answer counts when it has come several times in a row."""

    def __init__(self, config: DnsDiscovery, status: SourceStatus, publish: Publish) -> None:
        self._config = config
        self._status = status
        self._publish = publish
        self._resolver: dns.asyncresolver.Resolver | None = None
        self._published: tuple[FoundEngine, ...] | None = None
        self._empty_answers = 0

    async def run(self) -> None:
        """Resolve the names until cancelled."""
        task = asyncio.current_task()
        assert task is not None
        while True:
            await self.ask_once()
            if task.cancelling():  # the resolver waits with asyncio.wait_for, which on 3.11 can lose a cancellation
                raise asyncio.CancelledError
            await asyncio.sleep(self._config.period_seconds)

    async def ask_once(self) -> None:
        """One resolution; never raises but on cancellation."""
        try:
            async with asyncio.timeout(self._config.timeout_seconds):
                engines = await self._resolve()
        except (TimeoutError, SourceFailed) as error:
            self._resolver = None  # /etc/resolv.conf may have changed
            failed = (
                error
                if isinstance(error, SourceFailed)
                else SourceFailed("timeout", f"no answer within {self._config.timeout_seconds:g} s")
            )
            if self._status.failed(failed):
                logger.warning("%s: %s; the engines known before stay", self._status.description, failed)
            return
        self._status.heard()
        self._empty_answers = 0 if engines else self._empty_answers + 1
        if not engines and self._published and self._empty_answers < self._config.empty_answers_before_removal:
            return
        if engines != self._published:
            if not engines:
                logger.warning("%s: the name has no address", self._status.description)
            self._published = engines
            self._status.updates_total += 1
            self._publish(engines)

    async def _resolve(self) -> tuple[FoundEngine, ...]:
        config = self._config
        if config.port is not None:
            addresses = await self._addresses(config.name)
            return addressed_engines(config, addresses)
        targets = sorted({(str(row.target), row.port) for row in await self._records(config.name, "SRV")})[:TARGETS_MAX]
        gate = asyncio.Semaphore(RESOLUTIONS_AT_A_TIME)

        async def addresses_of(target: str) -> list[str]:
            async with gate:
                return await self._addresses(target)

        found = await asyncio.gather(*(addresses_of(target) for target, _ in targets), return_exceptions=True)
        answered = []
        for (target, port), result in zip(targets, found, strict=True):
            if isinstance(result, BaseException):
                raise result  # a part of the engines must not look like all of them
            answered.append((target, port, result))
        return srv_engines(config, answered)

    async def _addresses(self, name: str) -> list[str]:
        """IPv4, or IPv6 if there is none: a dual-stack engine must not be listed twice."""
        rows = await self._records(name, "A") or await self._records(name, "AAAA")
        return [row.address for row in rows]

    async def _records(self, name: str, kind: str) -> Sequence[Any]:
        """Empty when the name or the kind of record does not exist. Raises SourceFailed."""
        try:
            if self._resolver is None:
                self._resolver = _resolver(self._config)
            # Absolute names are asked for as they are, others with the search list, as everywhere in a pod.
            answer = await self._resolver.resolve(
                name, kind, search=True, raise_on_no_answer=False, lifetime=self._config.timeout_seconds
            )
        except dns.resolver.NXDOMAIN:
            return ()
        except dns.resolver.LifetimeTimeout as error:
            raise SourceFailed("timeout", f"no name server answered for {name}") from error
        except (dns.exception.DNSException, OSError, ValueError) as error:
            raise SourceFailed("refused", f"{name} cannot be resolved ({error.__class__.__name__}: {error})") from error
        return tuple(answer.rrset or ())


def addressed_engines(config: DnsDiscovery, addresses: Sequence[str]) -> tuple[FoundEngine, ...]:
    """One engine per address, named by it. Pure."""
    assert config.port is not None
    unique = sorted(set(addresses), key=lambda address: ipaddress.ip_address(address).packed)
    return tuple(_engine(config, _host_port(address, config.port), address, config.port) for address in unique)


def srv_engines(config: DnsDiscovery, targets: Sequence[tuple[str, int, Sequence[str]]]) -> tuple[FoundEngine, ...]:
    """One engine per target and port, named by the target's first label if that is enough. Pure.

    targets: name, port, addresses. Priority and weight are not looked at: routing chooses better.
    """
    labels = [target.split(".", 1)[0] for target, _, addresses in targets if addresses]
    engines = []
    for target, port, addresses in sorted((target, port, min(found)) for target, port, found in targets if found):
        label = target.split(".", 1)[0]
        name = label if labels.count(label) == 1 else f"{target.removesuffix('.')}:{port}"
        engines.append(_engine(config, name, addresses, port))
    return tuple(engines)


def _engine(config: DnsDiscovery, name: str, address: str, port: int) -> FoundEngine:
    events, replay = config.kv_events_port, config.kv_replay_port
    engine = EngineConfig(
        name,
        f"{config.scheme}://{_host_port(address, port)}",
        f"tcp://{_host_port(address, events)}" if events is not None else None,
        f"tcp://{_host_port(address, replay)}" if replay is not None else None,
        config.data_parallel_ranks,
    )
    return FoundEngine(engine, address)


def _host_port(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _resolver(config: DnsDiscovery) -> dns.asyncresolver.Resolver:
    resolver = dns.asyncresolver.Resolver(configure=not config.nameservers)
    if config.nameservers:
        resolver.nameservers = [dns.nameserver.Do53Nameserver(*nameserver(server)) for server in config.nameservers]
    resolver.timeout = max(0.1, config.timeout_seconds / 2)  # of one server, so that a second one is asked in time
    resolver.cache = None
    return resolver
