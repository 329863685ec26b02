"""Attacks that only `make bench-attack` runs: on a gateway whose index is full, whose engine's pages are huge, or whose
clients do not read. They take minutes; unit tests prove the same functions."""

from __future__ import annotations

import json
import random
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from attack.large_engine import ADAPTERS
from attack.paced_stream import SECONDS_MAX
from attack.target import ITERATION_UNITS_MAX, MIB, MODEL, Target
from stack_driver.deadlines import eventually

from spillway_gateway.testing.kv_publisher import KvPublisher

LARGE = "large"
INDEX_MIB = 32
BLOCK = 16
FILLING_EVENTS = 4_000
FILLING_BLOCKS = 64
STREAMS, PLAIN = 1_000, 700  # clients that do not read
BATCHES = "spillway_gateway_event_batches_total"
POD_BYTES = 2 << 30  # gateway.resources.limits.memory of the chart


@pytest.fixture(scope="module")
def publisher() -> Iterator[KvPublisher]:
    made = KvPublisher(buffer_steps=100)
    yield made
    made.close()


@pytest.fixture(scope="module")
def large_engine() -> Iterator[str]:
    folder = str(Path(__file__).resolve().parents[1])
    command = [sys.executable, "-m", "attack.large_engine", LARGE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={"PYTHONPATH": folder}) as process:
        assert process.stdout is not None
        yield process.stdout.readline().decode().split()[-1]
        process.kill()


@pytest.fixture(scope="module")
def target_settings(publisher: KvPublisher, large_engine: str) -> dict[str, Any]:
    return {
        "settings": {"index": {"bytesMax": INDEX_MIB * MIB}},
        "engine": {"kvEvents": publisher.events_url, "kvReplay": publisher.replay_url},
        "more_models": [
            {"name": LARGE, "engines": [{"name": "large-0", "url": large_engine}], "loadableAdapters": ["*"]}
        ],
        "descriptors": 16_384,
        "model_length": 1_000_000,  # so that the gateway's own bound on a prompt's blocks is what bounds it
    }


def series(target: Target, name: str) -> float:
    page = httpx.get(target.ops_url + "/metrics", timeout=SECONDS_MAX).text
    return sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name) and '"fake-0"' in line)


@pytest.fixture(scope="module")
def full(target: Target, publisher: KvPublisher) -> Target:
    """A gateway to whose index more was sent than it may hold."""
    eventually("events are followed", lambda: series(target, "spillway_gateway_event_replays_total"), SECONDS_MAX)
    done = series(target, BATCHES) + FILLING_EVENTS
    for number in range(FILLING_EVENTS):
        publisher.stored(*_chain(number), BLOCK)
    eventually("the index is full", lambda: series(target, BATCHES) >= done, SECONDS_MAX)
    return target


def _chain(number: int) -> tuple[list[int], None, list[int]]:
    tokens = [(number * 1_000_003 + at * 2_654_435_761) % (1 << 31) for at in range(FILLING_BLOCKS * BLOCK)]
    return [(number << 32) + at for at in range(FILLING_BLOCKS)], None, tokens


def _ask(target: Target, body: bytes) -> None:
    reply = httpx.post(target.url + "/v1/completions", content=body, timeout=SECONDS_MAX)
    assert reply.status_code in (200, 400), reply.text


def _ids(count: int) -> Callable[[], bytes]:
    chosen = random.Random(5)
    return lambda: json.dumps({"model": MODEL, "prompt": [chosen.randrange(100_000) for _ in range(count)]}).encode()


@pytest.mark.parametrize("tokens", [600_000, 131_072])  # 4.2 MB; a new prompt of a usual length
def test_new_prompts_find_a_full_index(full: Target, tokens: int) -> None:
    make = _ids(tokens)
    full.suffer(lambda: _ask(full, make())).assert_bearable(grown_mib_max=128)


def test_a_block_of_very_many_tokens(full: Target, publisher: KvPublisher) -> None:
    def attack() -> None:
        done = series(full, BATCHES) + 1
        publisher.stored([1 << 50], None, list(range(100_000)), 100_000)
        eventually("it is taken in", lambda: series(full, BATCHES) >= done, SECONDS_MAX)

    full.suffer(attack).assert_bearable(grown_mib_max=64)


def test_lists_of_very_many_adapters(target: Target) -> None:
    def attack() -> None:
        listed = httpx.get(target.url + "/v1/models", timeout=SECONDS_MAX).json()["data"]
        assert len(listed) >= ADAPTERS

    eventually("the adapters are known", lambda: _lists_adapters(target), SECONDS_MAX)
    target.suffer(attack).assert_bearable(grown_mib_max=192)


def _lists_adapters(target: Target) -> bool:
    return len(httpx.get(target.url + "/v1/models", timeout=SECONDS_MAX).content) > ADAPTERS


def test_a_page_of_very_many_metrics(target: Target) -> None:
    """Read in each round of polls, each second."""

    def attack() -> None:
        subprocess.run(["sleep", "3"], check=True)

    target.suffer(attack).assert_bearable(grown_mib_max=192)


def test_clients_that_do_not_read(target: Target) -> None:
    answered = 0

    def attack() -> None:
        nonlocal answered
        clients = [_client(target, number < STREAMS) for number in range(STREAMS + PLAIN)]
        eventually("each has the beginning of a reply, or was closed", lambda: _readable(clients), SECONDS_MAX)
        eventually("no more comes", lambda: _settled(target), SECONDS_MAX)
        answered = sum(map(_has_answer, clients))
        for client in clients:
            client.close()

    harm = target.suffer(attack, rounds=2)
    assert answered > (STREAMS + PLAIN) // 2, "the others may have been closed for room"
    assert harm.iteration_units <= ITERATION_UNITS_MAX
    assert target.memory() + harm.grown_bytes <= POD_BYTES, f"{harm.grown_bytes / MIB:.0f} MiB more"


def _client(target: Target, streams: bool) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", target.port), SECONDS_MAX)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    body = json.dumps({"model": LARGE, "prompt": "hi", "stream": streams}).encode()
    client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
    return client


def _readable(clients: list[socket.socket]) -> bool:
    ready = select.poll()
    for client in clients:
        ready.register(client, select.POLLIN)
    return len(ready.poll(0)) == len(clients)


def _has_answer(client: socket.socket) -> bool:
    try:
        return client.recv(12, socket.MSG_PEEK) == b"HTTP/1.1 200"
    except ConnectionError:
        return False


def _settled(target: Target) -> bool:
    before = target.memory()
    subprocess.run(["sleep", "2"], check=True)
    return abs(target.memory() - before) < MIB
