"""Names over a real UDP server, and what its answers add up to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import dns.rcode
import dns.resolver
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.config.discovery import DnsDiscovery
from spillway_gateway.discovery.dns import DnsSource, addressed_engines, srv_engines
from spillway_gateway.discovery.found import FoundEngine, SourceStatus
from spillway_gateway.testing.fake_dns import NameServer
from spillway_gateway.testing.running import until

NAME = "engines.spillway.svc.cluster.local."


@pytest.fixture
async def server() -> AsyncIterator[NameServer]:
    loop = asyncio.get_running_loop()
    transport, made = await loop.create_datagram_endpoint(NameServer, local_addr=("127.0.0.1", 0))
    yield made
    transport.close()


class Asked:
    def __init__(self, server: NameServer, **settings: Any) -> None:
        settings = {"name": NAME, "nameservers": (f"127.0.0.1:{server.port}",), "timeout_seconds": 30.0, **settings}
        self.status = SourceStatus("test")
        self.published: list[tuple[FoundEngine, ...]] = []
        self.source = DnsSource(DnsDiscovery(**settings), self.status, self.published.append)

    async def urls(self) -> list[str]:
        """The URLs of the engines that are known after one more resolution."""
        await self.source.ask_once()
        return [engine.config.url for engine in self.published[-1]]


async def test_every_address_is_an_engine(server: NameServer) -> None:
    asked = Asked(server, port=8100, kv_events_port=8200, kv_replay_port=8300)
    server.records[NAME, "A"] = ["10.0.0.2", "10.0.0.1"]
    server.records[NAME, "AAAA"] = ["fd00::1"]  # the same pods on their other family

    assert await asked.urls() == ["http://10.0.0.1:8100", "http://10.0.0.2:8100"]
    first = asked.published[0][0]
    assert (first.config.name, first.instance) == ("10.0.0.1:8100", "10.0.0.1")
    assert (first.config.kv_events, first.config.kv_replay) == ("tcp://10.0.0.1:8200", "tcp://10.0.0.1:8300")

    server.records[NAME, "A"] = ["10.0.0.1", "10.0.0.2"]
    await asked.urls()
    assert len(asked.published) == 1  # another order is no change
    server.records[NAME, "A"] = ["10.0.0.3"]
    assert await asked.urls() == ["http://10.0.0.3:8100"]


async def test_ipv6_alone(server: NameServer) -> None:
    server.records[NAME, "AAAA"] = ["fd00::1"]

    assert await Asked(server, port=80, scheme="https").urls() == ["https://[fd00::1]:80"]


@pytest.mark.parametrize("fault", ["SERVFAIL", "REFUSED", "silence"])
async def test_a_failed_answer_keeps_the_last_one(server: NameServer, fault: str) -> None:
    asked = Asked(server, port=80)
    server.records[NAME, "A"] = ["10.0.0.1"]
    assert await asked.urls() == ["http://10.0.0.1:80"]
    if fault == "silence":
        asked.source._config = DnsDiscovery(
            NAME, 80, timeout_seconds=0.05, nameservers=asked.source._config.nameservers
        )
        asked.source._resolver = None
        server.silent = True
    else:
        server.code = dns.rcode.from_text(fault)
    for _ in range(5):
        assert await asked.urls() == ["http://10.0.0.1:80"]
    assert sum(asked.status.failures.values()) == 5
    assert asked.status.error is not None


async def test_an_empty_answer_counts_when_it_comes_again(server: NameServer) -> None:
    asked = Asked(server, port=80, empty_answers_before_removal=3)
    server.records[NAME, "A"] = ["10.0.0.1"]
    assert len(await asked.urls()) == 1
    server.records.clear()  # the name does not exist
    assert [len(await asked.urls()) for _ in range(2)] == [1, 1]
    server.records[NAME, "A"] = ["10.0.0.1"]
    assert len(await asked.urls()) == 1
    server.records.clear()
    server.records[NAME, "TXT"] = ["x"]  # the name exists and has no address
    assert [len(await asked.urls()) for _ in range(3)] == [1, 1, 0]
    server.records[NAME, "A"] = ["10.0.0.2"]
    assert len(await asked.urls()) == 1
    assert not asked.status.failures


async def test_srv_records_bring_names_and_ports(server: NameServer) -> None:
    service = "_http._tcp." + NAME
    asked = Asked(server, name=service, kv_events_port=8200)
    server.records[service, "SRV"] = [f"0 5 8100 vllm-{number}.{NAME}" for number in (1, 0)]
    for number in (0, 1):
        server.records[f"vllm-{number}.{NAME}", "A"] = [f"10.0.0.{number}"]

    assert await asked.urls() == ["http://10.0.0.0:8100", "http://10.0.0.1:8100"]
    assert [engine.config.name for engine in asked.published[-1]] == ["vllm-0", "vllm-1"]
    assert asked.published[-1][1].config.kv_events == "tcp://10.0.0.1:8200"

    server.records[f"vllm-1.{NAME}", "A"] = ["10.0.0.9"]  # the pod was replaced under its name
    await asked.urls()
    assert asked.published[-1][1].instance == "10.0.0.9"
    del server.records[f"vllm-1.{NAME}", "A"]  # one that has no address is not there yet
    assert await asked.urls() == ["http://10.0.0.0:8100"]


async def test_it_goes_on_until_it_is_cancelled(server: NameServer) -> None:
    asked = Asked(server, port=80, period_seconds=0.001)
    server.records[NAME, "A"] = ["10.0.0.1"]
    task = asyncio.create_task(asked.source.run())
    await until(lambda: len(server.asked) >= 3 and asked.published)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


addresses = st.ip_addresses(v=4).map(str)


@given(st.lists(addresses))
def test_engines_of_addresses_are_unique_and_in_order(found: list[str]) -> None:
    config = DnsDiscovery(NAME, 8100)
    engines = addressed_engines(config, found)

    assert {engine.instance for engine in engines} == set(found)
    assert engines == addressed_engines(config, found[::-1])
    assert len({engine.config.name for engine in engines}) == len(engines)


labels = st.sampled_from(["a", "b"])
targets = st.tuples(st.tuples(labels, labels).map(".".join), st.integers(1, 3), st.lists(addresses, max_size=2))


@given(st.lists(targets, max_size=8, unique_by=lambda target: target[:2]))
def test_names_of_srv_targets_are_unique(found: list[tuple[str, int, list[str]]]) -> None:
    engines = srv_engines(DnsDiscovery(NAME), found)

    assert len(engines) == sum(bool(addresses) for _, _, addresses in found)
    assert len({engine.config.name for engine in engines}) == len(engines)
    assert engines == srv_engines(DnsDiscovery(NAME), found[::-1])


async def test_a_cancellation_that_the_resolver_loses_still_ends_it(server: NameServer) -> None:
    """asyncio.wait_for of Python 3.11 loses a cancellation when an answer comes in the same moment."""

    class Resolver:
        asked = asyncio.Event()

        async def resolve(self, *arguments: object, **settings: object) -> object:
            if not self.asked.is_set():
                self.asked.set()
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    pass
            raise dns.resolver.NXDOMAIN

    asked = Asked(server, port=80)
    asked.source._resolver = Resolver()  # type: ignore[assignment]
    task = asyncio.create_task(asked.source.run())
    await Resolver.asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
