"""Faults of a Valkey server and of the values it holds, and how to end them."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import redis
from stack_driver.deadlines import eventually
from stack_driver.running_stack import RunningStack
from stack_driver.shared_stores import ValkeyStore

from soak.damage import DAMAGES, pairs
from soak.schedule import Fault

DAMAGED_SHARE = 0.3
RESTART_SECONDS = 60.0  # the supervisor waits up to 30 s after repeated failures
ALIVE_SECONDS = 30.0


class ValkeyFaults:
    """max_bytes: the server's limit in quiet times, set again after every restart."""

    def __init__(self, stack: RunningStack, max_bytes: int) -> None:
        store = stack.store
        assert isinstance(store, ValkeyStore)
        self._stack, self._store, self._max_bytes = stack, store, max_bytes
        self._server = store.server
        self._set_limit()

    @contextmanager
    def strike(self, fault: Fault) -> Iterator[None]:
        """The fault lasts as long as the block; whatever it needs to be over is done at its end."""
        chance = random.Random(fault.seed)
        _, what = fault.kind.split("_", 1)
        if fault.kind.startswith("values_"):
            self._damage(what, chance)
            yield
            return
        heal = {
            "silent": self._silence,
            "killed": self._kill,
            "emptied": self._empty,
            "full": self._fill,
            "read_only": self._make_replica,
            "connections_cut": self._cut_connections,
        }[what]()
        try:
            yield
        finally:
            heal()

    def _silence(self) -> Callable[[], None]:
        process = self._stack.process("valkey")
        process.signal(signal.SIGSTOP)
        return lambda: process.signal(signal.SIGCONT)

    def _kill(self) -> Callable[[], None]:
        before = self._stack.process("valkey")
        before.signal(signal.SIGKILL)

        def heal() -> None:
            eventually("Valkey runs again", lambda: self._stack.process("valkey") != before, RESTART_SECONDS)
            self._set_limit()

        return heal

    def _empty(self) -> Callable[[], None]:
        self._server.flushall()
        return lambda: None

    def _fill(self) -> Callable[[], None]:
        self._server.config_set("maxmemory-policy", "noeviction")
        self._server.config_set("maxmemory", max(1 << 20, self._server.info("memory")["used_memory"] - (1 << 20)))
        return self._set_limit

    def _make_replica(self) -> Callable[[], None]:
        """A failover made this server a replica whose master is away: reads go on, writes get READONLY."""
        self._server.replicaof("127.0.0.1", 1)

        def heal() -> None:
            self._server.replicaof("NO", "ONE")

        return heal

    def _cut_connections(self) -> Callable[[], None]:
        self._server.client_kill_filter(_type="normal", skipme=True)
        return lambda: None

    def _damage(self, what: str, chance: random.Random) -> None:
        keys = [key.decode() for key in self._stored_keys()]
        chosen = chance.sample(keys, max(1, int(len(keys) * DAMAGED_SHARE))) if keys else []
        if what == "swapped":
            for one, other in pairs(chosen, chance):
                first, second = self._get(one), self._get(other)
                if first is not None and second is not None:
                    self._put(one, second)
                    self._put(other, first)
            return
        for key in chosen:
            value = self._get(key)
            if value:
                self._put(key, DAMAGES[what](value, chance))

    def _stored_keys(self) -> list[bytes]:
        return self._store.keys()

    def _get(self, key: str) -> bytes | None:
        try:
            value = self._server.get(key)
        except redis.ResponseError:
            return None  # no frame
        return value if isinstance(value, bytes) else None

    def _put(self, key: str, value: bytes) -> None:
        self._server.set(key, value, xx=True, keepttl=True)

    def _set_limit(self) -> None:
        def set_it() -> bool:
            try:
                self._server.config_set("maxmemory-policy", "allkeys-lfu")
                return bool(self._server.config_set("maxmemory", self._max_bytes))
            except redis.ConnectionError:
                return False

        eventually("Valkey takes its settings", set_it, ALIVE_SECONDS)
