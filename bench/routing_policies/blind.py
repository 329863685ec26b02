"""Policies that do not look at prompts."""

from __future__ import annotations

import random

from routing_policies.policy import Fleet, Policy, RoutedRequest


class RoundRobin(Policy):
    name = "round_robin"

    def start(self, fleet: Fleet, engines: int, seed: int) -> None:
        self._engines = engines
        self._next = -1

    def choose(self, request: RoutedRequest) -> int:
        self._next = (self._next + 1) % self._engines
        return self._next


class Random(Policy):
    name = "random"

    def start(self, fleet: Fleet, engines: int, seed: int) -> None:
        self._engines = engines
        self._rng = random.Random(seed)

    def choose(self, request: RoutedRequest) -> int:
        return self._rng.randrange(self._engines)


class LeastLoaded(Policy):
    name = "least_loaded"

    def start(self, fleet: Fleet, engines: int, seed: int) -> None:
        self._fleet = fleet
        self._rng = random.Random(seed)

    def choose(self, request: RoutedRequest) -> int:
        loads = self._fleet.in_flight
        least = min(loads)
        return self._rng.choice([engine for engine, load in enumerate(loads) if load == least])
