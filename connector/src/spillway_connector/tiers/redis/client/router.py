"""Sends commands to the server that has the key, and after it where a redirection or a failover leads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from spillway_connector.errors import RefusedReason, TierError, TierRefused, TierUnreachable, without_frames
from spillway_connector.tiers.redis.client.connection import RedisConnection, refusal
from spillway_connector.tiers.redis.client.endpoint import Address, RedisEndpoint, Topology
from spillway_connector.tiers.redis.client.pool import RedisPool
from spillway_connector.tiers.redis.client.resp import ErrorReply, Reply
from spillway_connector.tiers.redis.client.topology import Route, guide_to
from spillway_connector.tiers.tier import Clock

REDIRECTS_MAX = 3  # a stale map, then a slot on its way, then one more that moved meanwhile
BATCH_COMMANDS = 1024  # per pipeline: replies must fit in socket buffers while we still send

_Result = TypeVar("_Result")


class RedisRouter:
    """One pool of at most ``connections`` per server. Everything sent through it may be repeated safely.

    Batches, and what is asked of a server as such, are brief: one more connection is there for them (see RedisPool).
    """

    def __init__(self, endpoint: RedisEndpoint, connections: int, clock: Clock) -> None:
        self._endpoint = endpoint
        self._connections = connections
        self._clock = clock
        self._guide = guide_to(endpoint, clock)
        self._lock = threading.Lock()
        self._pools: dict[Address, RedisPool] = {}
        self._discoveries = 0
        self._closed = False

    def run(self, name: bytes, operation: Callable[[RedisConnection, float], _Result], deadline: float) -> _Result:
        """Run ``operation`` on a connection to the server that has the key ``name``; follow it at most three times."""
        route = self._guide.locate(name, deadline)
        redirects = 0
        while True:
            try:
                return self._run_at(route, operation, deadline)
            except (TierRefused, TierUnreachable) as error:
                onward = self._onward(name, route, error, deadline)
                redirects += 1
                if onward is None or redirects > REDIRECTS_MAX:
                    raise
                route = onward

    def batch(self, commands: Sequence[tuple[bytes, ...]], deadline: float) -> list[Reply]:
        """Send small commands, each with its key as second word, and return their replies in order.

        One pipeline per server. Raises the first error reply, TierUnreachable, TierTimeout.
        """
        replies: list[Reply] = []
        for outcome in self.attempt(commands, deadline):
            if isinstance(outcome, TierError):
                raise outcome
            replies.append(outcome)
        return replies

    def attempt(self, commands: Sequence[tuple[bytes, ...]], deadline: float) -> list[Reply | TierError]:
        """The same, but an error stands in the place of the reply that it is about. Raises only what routing raises."""
        outcomes: list[Reply | TierError] = [None] * len(commands)
        routes = {index: self._guide.locate(words[1], deadline) for index, words in enumerate(commands)}
        for _ in range(REDIRECTS_MAX + 1):
            asked, routes = routes, {}
            for route, indices in _by_route(asked).items():
                for start in range(0, len(indices), BATCH_COMMANDS):
                    chunk = indices[start : start + BATCH_COMMANDS]
                    answers = self._pipeline(route, [commands[index] for index in chunk], deadline)
                    for index, answer in zip(chunk, answers, strict=True):
                        outcomes[index] = answer
            for index, route in asked.items():
                error = outcomes[index]
                if isinstance(error, TierError):
                    onward = self._onward(commands[index][1], route, error, deadline)
                    if onward is not None:
                        routes[index] = onward
            if not routes:
                break
        return outcomes

    def servers(self, deadline: float) -> list[Address]:
        """Every server that holds keys."""
        return self._guide.servers(deadline)

    def run_at(
        self, server: Address, operation: Callable[[RedisConnection, float], _Result], deadline: float
    ) -> _Result:
        """Run ``operation`` on a connection to ``server``, wherever its answer may point."""
        return self._run_at(Route(server), operation, deadline, brief=True)

    def each_server(self, operation: Callable[[RedisConnection, float], _Result], deadline: float) -> list[_Result]:
        """Run ``operation`` once on every server that holds keys."""
        return [self.run_at(server, operation, deadline) for server in self.servers(deadline)]

    def close(self) -> None:
        """Also ends the waits of other threads at once. Twice is harmless."""
        with self._lock:
            self._closed = True
            pools = list(self._pools.values())
        for pool in pools:
            pool.close()

    def _pipeline(self, route: Route, commands: list[tuple[bytes, ...]], deadline: float) -> list[Reply | TierError]:
        """Each command's reply, or why there is none."""
        words = [word for command in commands for word in ((b"ASKING",), command)] if route.ask else commands
        try:
            answers = self._run_at(
                Route(route.address),
                lambda connection, deadline: connection.pipeline(words, deadline),
                deadline,
                brief=True,
            )
        except (TierRefused, TierUnreachable) as error:
            return [without_frames(error)] * len(commands)
        server = self._endpoint.at(route.address)
        return [
            refusal(server, answer) if isinstance(answer, ErrorReply) else answer
            for answer in (answers[1::2] if route.ask else answers)
        ]

    def _run_at(
        self,
        route: Route,
        operation: Callable[[RedisConnection, float], _Result],
        deadline: float,
        *,
        brief: bool = False,
    ) -> _Result:
        def ask_first(connection: RedisConnection, deadline: float) -> _Result:
            reply = connection.command(b"ASKING", deadline=deadline)
            if isinstance(reply, ErrorReply):
                raise refusal(connection.endpoint, reply)
            return operation(connection, deadline)

        connect_deadline = None
        if self._endpoint.topology is not Topology.SERVER:
            # A host that is gone does not refuse, it is silent: leave half of the time for its successor.
            now = self._clock()
            connect_deadline = now + (deadline - now) / 2
        return self._pool(route.address).run(
            ask_first if route.ask else operation, deadline, connect_deadline=connect_deadline, brief=brief
        )

    def _onward(self, name: bytes, route: Route, error: TierError, deadline: float) -> Route | None:
        if self._closed:
            return None
        onward = self._guide.reconsider(name, route, error, deadline)
        if self._guide.discoveries != self._discoveries:
            self._discoveries = self._guide.discoveries
            self._retire_all_but(set(self._guide.servers(deadline)))
        return onward

    def _pool(self, address: Address) -> RedisPool:
        with self._lock:
            if self._closed:
                raise TierRefused(RefusedReason.CLOSED, f"{self._endpoint}: the tier is closed")
            pool = self._pools.get(address)
            if pool is None:
                single = self._endpoint.topology is Topology.SERVER
                server = self._endpoint if single else self._endpoint.at(address)
                pool = self._pools[address] = RedisPool(server, self._connections, self._clock)
            return pool

    def _retire_all_but(self, servers: set[Address]) -> None:
        with self._lock:
            gone = [self._pools.pop(address) for address in list(self._pools) if address not in servers]
        for pool in gone:
            pool.retire()


def _by_route(routes: dict[int, Route]) -> dict[Route, list[int]]:
    first = next(iter(routes.values()), None)
    if first is not None and all(route is first for route in routes.values()):
        return {first: list(routes)}  # always so with one server; spares a hash per command
    groups: dict[Route, list[int]] = {}
    for index, route in routes.items():
        groups.setdefault(route, []).append(index)
    return groups
