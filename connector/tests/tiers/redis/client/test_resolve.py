from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

import pytest
from stack_driver.deadlines import eventually

from spillway_connector.errors import TierTimeout, TierUnreachable, UnreachableReason
from spillway_connector.testing.clock import SteppedClock
from spillway_connector.testing.tier_contract import NAMESPACE, PAYLOAD_BYTES, error_of, key_of, soon
from spillway_connector.tiers.redis.client.endpoint import Address, RedisEndpoint
from spillway_connector.tiers.redis.client.resolve import NAMES_MAX, Resolver, SocketAddress
from spillway_connector.tiers.redis.tier import RedisTier

NAME = Address("kv.example", 6379)


def found(last: int) -> list[SocketAddress]:
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, (f"10.0.0.{last}", 6379))]


class NameServer:
    """Answers each question with the next of ``answers``; where that is an event, only once it is set."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)
        self.asked = threading.Semaphore(0)
        self.count = 0

    def __call__(self, host: str, port: int) -> list[SocketAddress]:
        answer = self.answers[min(self.count, len(self.answers) - 1)]
        self.count += 1
        self.asked.release()
        if isinstance(answer, threading.Event):
            assert answer.wait(30)
            return found(99)
        if isinstance(answer, Exception):
            raise answer
        return found(int(str(answer)))


def settled(resolver: Resolver) -> None:
    """Wait until no question is on its way."""
    for thread in threading.enumerate():
        if thread.name == "spillway-resolve":
            thread.join(120)
    assert not resolver._asking


def test_a_service_that_moved_is_found() -> None:
    resolver = Resolver(NameServer(1, 2))
    assert resolver.resolve(NAME, time.monotonic, soon()) == found(1)
    settled(resolver)
    clock = SteppedClock()
    # The fresh answer counts as soon as it is there.
    eventually("the second answer is used", lambda: resolver.resolve(NAME, clock, clock() + 30) == found(2))


def test_silence_ends_at_the_deadline_and_a_late_answer_serves_the_next() -> None:
    go_on = threading.Event()
    resolver = Resolver(NameServer(go_on))
    clock = SteppedClock()
    with pytest.raises(TimeoutError, match=r"kv\.example"):
        resolver.resolve(NAME, clock, clock())  # no time at all
    go_on.set()
    settled(resolver)
    silent = threading.Event()
    resolver._lookup = NameServer(silent)  # from now on there is no answer
    assert resolver.resolve(NAME, clock, clock()) == found(99)
    silent.set()
    settled(resolver)


def test_however_many_wait_one_asks() -> None:
    go_on = threading.Event()
    server = NameServer(go_on)
    resolver = Resolver(server)
    answers: list[object] = []
    threads = [
        threading.Thread(target=lambda: answers.append(resolver.resolve(NAME, time.monotonic, soon())))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    assert server.asked.acquire(timeout=120)
    clock = SteppedClock()
    for _ in range(20):
        with pytest.raises(TimeoutError):
            resolver.resolve(NAME, clock, clock())
    assert server.count == 1
    go_on.set()
    for thread in threads:
        thread.join(120)
    # Those that came before the answer share it; a thread that came late asked again, and got the same.
    assert answers == [found(99)] * 8


@pytest.mark.parametrize("silent", [False, True])
def test_the_last_addresses_are_used_while_the_name_servers_are_away(silent: bool) -> None:
    failure = threading.Event() if silent else socket.gaierror(-3, "try again")
    resolver = Resolver(NameServer(7, failure))
    assert resolver.resolve(NAME, time.monotonic, soon()) == found(7)
    settled(resolver)
    clock = SteppedClock()
    for _ in range(3):
        assert resolver.resolve(NAME, clock, clock() + 30) == found(7)
    if isinstance(failure, threading.Event):
        failure.set()
    settled(resolver)


def test_an_unknown_name_is_an_error() -> None:
    resolver = Resolver(NameServer(socket.gaierror(-2, "Name or service not known")))
    with pytest.raises(OSError, match="not known"):
        resolver.resolve(NAME, time.monotonic, soon())


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_an_address_needs_no_name_server(host: str) -> None:
    server = NameServer(threading.Event())
    [(_, _, _, address)] = Resolver(server).resolve(Address(host, 7000), time.monotonic, soon())
    assert address[:2] == (host, 7000)
    assert server.count == 0


@pytest.mark.parametrize("host", ["a..b", "x" * 70 + ".example", ""])
def test_an_invalid_name_is_an_error_and_ends_no_thread(host: str) -> None:
    resolver = Resolver()
    try:
        assert resolver.resolve(Address(host, 7000), time.monotonic, soon())
    except OSError as error:
        assert not isinstance(error, TimeoutError)
    settled(resolver)


def test_no_more_names_are_kept_than_a_cluster_has() -> None:
    resolver = Resolver(NameServer(1))
    for number in range(NAMES_MAX + 10):
        resolver.resolve(Address(f"node-{number}.example", 7000), time.monotonic, soon())
    settled(resolver)
    assert len(resolver._good) == NAMES_MAX


def test_with_a_hanging_name_server_each_operation_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    real = socket.getaddrinfo

    def hang(host: str, port: int, *rest: int, **options: int) -> object:
        if options.get("flags"):
            return real(host, port, *rest, **options)
        go_on.wait(60)
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    tier = RedisTier(NAMESPACE, PAYLOAD_BYTES, RedisEndpoint("dead-name-server.example"))
    calls: list[Callable[[float], object]] = [
        lambda deadline: tier.contains([key_of(1)], deadline),
        lambda deadline: tier.load(key_of(1), memoryview(bytearray(PAYLOAD_BYTES)), deadline),
        lambda deadline: tier.store(key_of(1), memoryview(bytes(PAYLOAD_BYTES)), deadline),
    ]
    for call in calls:
        assert isinstance(error_of(lambda call=call: call(time.monotonic() + 0.1)), TierTimeout)  # type: ignore[misc]
    asking = [thread for thread in threading.enumerate() if thread.name == "spillway-resolve"]
    assert len(asking) == 1
    go_on.set()
    asking[0].join(30)
    error = error_of(lambda: tier.contains([key_of(1)], soon()))
    assert isinstance(error, TierUnreachable)
    assert error.reason == UnreachableReason.CONNECT
    tier.close()
