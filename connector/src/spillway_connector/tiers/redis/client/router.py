"""Sends commands to the server that has the key, and to where a redirection or a failover leads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from spillway_connector.errors import TierError, TierRefused, TierUnreachable, without_frames
from spillway_connector.tiers.redis.client.connection import RedisConnection
from spillway_connector.tiers.redis.client.endpoint import Address, RedisEndpoint, Topology
from spillway_connector.tiers.redis.client.errors import Reply, accepted
from spillway_connector.tiers.redis.client.topology import Route, server_map
from spillway_connector.tiers.tier import Clock

REDIRECTS_MAX = 3  # a stale map, then a migrating slot, then one more that moved meanwhile
BATCH_COMMANDS = 1024  # per pipeline: replies must fit in socket buffers while we still send

_Result = TypeVar("_Result")


class RedisRouter:
    """One pool of at most ``connections`` per server. Everything sent through it is idempotent.

    Batches and commands to a given server are brief: one more connection exists for them (see RedisPool).
    greeting: see RedisConnection.
    """

    def __init__(
        self, endpoint: RedisEndpoint, connections: int, clock: Clock, *, greeting: tuple[bytes, ...] = ()
    ) -> None:
        self._endpoint = endpoint
        self._clock = clock
        self._map = server_map(endpoint, clock, connections=connections, greeting=greeting)

    def run(self, name: bytes, operation: Callable[[RedisConnection, float], _Result], deadline: float) -> _Result:
        """Run ``operation`` on a connection to the server that has the key ``name``; follows three redirections."""
        route = self._map.locate(name, deadline)
        redirects = 0
        while True:
            try:
                return self._run_at(route, operation, deadline)
            except (TierRefused, TierUnreachable) as error:
                onward = self._map.reroute(name, route, error, deadline)
                redirects += 1
                if onward is None or redirects > REDIRECTS_MAX:
                    raise
                route = onward

    def batch(self, commands: Sequence[tuple[bytes, ...]], deadline: float) -> list[Reply]:
        """Send small commands, each with its key as second word, and return their replies in order.

        One pipeline per server. Raises the first error reply, TierUnreachable, TierTimeout.
        """
        return [accepted(outcome) for outcome in self.attempt(commands, deadline)]

    def attempt(self, commands: Sequence[tuple[bytes, ...]], deadline: float) -> list[Reply | TierError]:
        """Send commands as :meth:`batch` does, but return error replies in place. Raises only what routing raises."""
        outcomes: list[Reply | TierError] = [None] * len(commands)
        routes = {index: self._map.locate(words[1], deadline) for index, words in enumerate(commands)}
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
                    onward = self._map.reroute(commands[index][1], route, error, deadline)
                    if onward is not None:
                        routes[index] = onward
            if not routes:
                break
        return outcomes

    def servers(self, deadline: float) -> list[Address]:
        """Every server that holds keys."""
        return self._map.servers(deadline)

    def run_at(
        self, server: Address, operation: Callable[[RedisConnection, float], _Result], deadline: float
    ) -> _Result:
        """Run ``operation`` on a connection to ``server``; follows no redirection."""
        return self._run_at(Route(server), operation, deadline, brief=True)

    def each_server(self, operation: Callable[[RedisConnection, float], _Result], deadline: float) -> list[_Result]:
        """Run ``operation`` once on every server that holds keys."""
        return [self.run_at(server, operation, deadline) for server in self.servers(deadline)]

    def close(self) -> None:
        """Close, which ends the waits of other threads at once. Twice is harmless."""
        self._map.close()

    def _pipeline(self, route: Route, commands: list[tuple[bytes, ...]], deadline: float) -> list[Reply | TierError]:
        """Return each command's reply, or the error that stands for it."""
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
        return answers[1::2] if route.ask else answers

    def _run_at(
        self,
        route: Route,
        operation: Callable[[RedisConnection, float], _Result],
        deadline: float,
        *,
        brief: bool = False,
    ) -> _Result:
        def ask_first(connection: RedisConnection, deadline: float) -> _Result:
            connection.command(b"ASKING", deadline=deadline)
            return operation(connection, deadline)

        connect_deadline = None
        if self._endpoint.topology is not Topology.SERVER:
            # A host that is gone does not refuse, it is silent. Half of the time is left for its successor.
            now = self._clock()
            connect_deadline = now + (deadline - now) / 2
        return self._map.pool(route.address).run(
            ask_first if route.ask else operation, deadline, connect_deadline=connect_deadline, brief=brief
        )


def _by_route(routes: dict[int, Route]) -> dict[Route, list[int]]:
    first = next(iter(routes.values()), None)
    if first is not None and all(route is first for route in routes.values()):
        return {first: list(routes)}  # always so with one server; spares a hash per command
    groups: dict[Route, list[int]] = {}
    for index, route in routes.items():
        groups.setdefault(route, []).append(index)
    return groups
