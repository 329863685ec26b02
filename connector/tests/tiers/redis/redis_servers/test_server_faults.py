"""A real server that is stopped, killed or loading while it is used."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spillway_connector.errors import (
    CorruptReason,
    RefusedReason,
    TierCorrupt,
    TierMiss,
    TierRefused,
    TierTimeout,
    TierUnreachable,
)
from spillway_connector.testing.tier_contract import error_of, key_of, load, payload_of, soon
from spillway_connector.tiers.redis.client.endpoint import RedisEndpoint
from spillway_connector.tiers.redis.tier import RedisTier

MakeTier = Callable[..., RedisTier]
BYTES = 40 << 20  # larger than all socket buffers together
PIECE_BYTES = 1 << 16


@pytest.fixture
def server(tmp_path: Path, start_process) -> Iterator:
    process = start_process(tmp_path / "server")
    try:
        yield process
    finally:
        if process.process.poll() is None:
            process.process.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("operation", ["lookup", "load", "store"])
def test_a_stopped_server_costs_one_deadline_and_is_used_again(server, tier_on: MakeTier, operation: str) -> None:
    tier = tier_on(RedisEndpoint(port=server.port), BYTES, connections=2)
    tier.store(key_of(1), payload_of(1, BYTES), soon())
    target = memoryview(bytearray(BYTES))
    source = payload_of(2, BYTES)
    calls = {
        "lookup": lambda deadline: tier.contains([key_of(1)], deadline),
        "load": lambda deadline: tier.load(key_of(1), target, deadline),
        "store": lambda deadline: tier.store(key_of(2), source, deadline),
    }
    server.process.send_signal(signal.SIGSTOP)
    for _ in range(2):  # on a connection that is open, then at connecting
        assert isinstance(error_of(lambda: calls[operation](time.monotonic() + 0.2)), TierTimeout)
    server.process.send_signal(signal.SIGCONT)
    calls[operation](soon())
    tier.load(key_of(1), target, soon())
    assert target == payload_of(1, BYTES)


@pytest.mark.parametrize("payload_connections", [1, 2])
def test_a_server_stopped_within_a_load_or_store(server, tier_on: MakeTier, payload_connections: int) -> None:
    options = {"connections": 4, "payload_connections": payload_connections}
    tier = tier_on(RedisEndpoint(port=server.port), BYTES, **options)
    tier.store(key_of(1), payload_of(1, BYTES), soon())
    target = memoryview(bytearray(BYTES))
    source = payload_of(2, BYTES)

    def load_again(deadline: float) -> None:
        tier.load(key_of(1), target, deadline)

    def store_again(deadline: float) -> None:
        tier.discard(key_of(2), deadline)
        tier.store(key_of(2), source, deadline)

    for work in (load_again, store_again):
        ended: list[BaseException] = []
        stopped = threading.Event()

        def repeat(
            work: Callable[[float], None] = work,
            ended: list[BaseException] = ended,
            stopped: threading.Event = stopped,
        ) -> None:
            while not ended:
                try:
                    work(time.monotonic() + 2.0)
                except Exception as error:
                    if stopped.is_set() or not isinstance(error, TierTimeout):  # else the machine is slow
                        ended.append(error)

        thread = threading.Thread(target=repeat)
        before = server.client.info("stats")["total_commands_processed"]
        thread.start()
        server.until(lambda before=before: server.client.info("stats")["total_commands_processed"] > before + 20)
        server.process.send_signal(signal.SIGSTOP)
        stopped.set()
        thread.join(60)
        assert not thread.is_alive()
        assert isinstance(ended[0], TierTimeout)
        server.process.send_signal(signal.SIGCONT)
    load_again(soon())
    assert target == payload_of(1, BYTES)


def test_killing_and_restarting_under_loads_and_stores_serves_no_wrong_byte(
    tmp_path: Path, start_process, tier_on: MakeTier
) -> None:
    size = 5 * PIECE_BYTES
    server = start_process(tmp_path / "server")
    port = server.port
    tier = tier_on(RedisEndpoint(port=port), size, stripe_bytes_max=PIECE_BYTES, payload_connections=2, connections=8)
    done = threading.Event()
    wrong: list[object] = []
    served = [0, 0, 0]
    failed = [0, 0, 0]

    def work(seed: int) -> None:
        while not done.is_set():
            try:
                tier.store(key_of(seed), payload_of(seed, size), soon())
                if load(tier, key_of(seed)) != payload_of(seed, size):
                    wrong.append(seed)
                served[seed] += 1
                tier.discard(key_of(seed), soon())
            except (TierUnreachable, TierMiss):
                failed[seed] += 1
            except TierCorrupt as corrupt:
                if corrupt.reason != CorruptReason.SHORT:
                    wrong.append(corrupt)
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for restart in range(4):
        before = list(served)
        server.until(lambda before=before: all(now > then for now, then in zip(served, before)))
        server.kill()
        server = start_process(tmp_path / str(restart), port=port)
    done.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert sum(failed) > 0
    tier.store(key_of(9), payload_of(9, size), soon())
    assert load(tier, key_of(9)) == payload_of(9, size)


def test_a_server_that_reads_its_data_set_is_refused_until_it_has(
    tmp_path: Path, start_process, tier_on: MakeTier
) -> None:
    server = start_process(tmp_path / "server", save="3600 1")
    for seed in range(300):
        server.client.set(f"filler{seed}", bytes(2048))
    tier_on(RedisEndpoint(port=server.port)).store(key_of(1), payload_of(1), soon())
    server.client.save()
    server.kill()
    slow = {"key_load_delay": "10000", "loading_process_events_interval_bytes": "1024", "rdbcompression": "no"}
    loading = start_process(tmp_path / "server", port=server.port, ready=False, save="3600 1", **slow)
    tier = tier_on(RedisEndpoint(port=loading.port))
    loading.until(lambda: loading.client.info("persistence")["loading"] == 1)
    error = error_of(lambda: tier.prepare(soon()))
    assert isinstance(error, TierRefused)
    assert error.reason == RefusedReason.LOADING
    loading.client.config_set("key-load-delay", "0")
    loading.until(lambda: loading.client.info("persistence")["loading"] == 0)
    assert load(tier, key_of(1)) == payload_of(1)


def test_failures_leave_no_open_socket_behind(tmp_path: Path, start_process, tier_on: MakeTier) -> None:
    server = start_process(tmp_path / "server")
    large = memoryview(bytearray(BYTES))
    with_login = RedisEndpoint(port=server.port, username="nobody", password="x")
    plain, stranger = tier_on(RedisEndpoint(port=server.port), BYTES), tier_on(with_login, BYTES)
    plain.store(key_of(1), large, soon())

    def sockets() -> int:
        links = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
        return sum("socket:" in link for link in links)

    def fail(calls: list[Callable[[], object]]) -> None:
        for call in calls * 20:
            error_of(call)

    fail([lambda: plain.load(key_of(1), large, time.monotonic() + 0.001), lambda: stranger.prepare(soon())])
    before = sockets()
    fail([lambda: plain.load(key_of(1), large, time.monotonic() + 0.001), lambda: stranger.prepare(soon())])
    assert sockets() <= before + 1
    server.kill()
    fail([lambda: plain.load(key_of(1), large, soon()), lambda: stranger.prepare(soon())])
    assert sockets() <= before
