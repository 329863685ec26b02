"""The state that a policy sees and the events that it gets. Engines are positions 0..n-1."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import xxhash

from spillway_simulator.model.events import KvEvent


@dataclass(slots=True)
class RoutedRequest:
    """A prompt as routers see it; keys of any block size are made once."""

    id: str
    tokens: array[int]
    session: str = ""  # the conversation that it belongs to
    _keys: dict[int, list[int]] = field(default_factory=dict)

    def keys(self, block_tokens: int) -> list[int]:
        """Chained hashes of the full blocks."""
        known = self._keys.get(block_tokens)
        if known is None:
            data, size, key = self.tokens.tobytes(), block_tokens * 4, 0
            known = self._keys[block_tokens] = []
            for start in range(0, len(data) - size + 1, size):
                key = xxhash.xxh3_64_intdigest(data[start : start + size], key)
                known.append(key)
        return known


@dataclass(frozen=True, slots=True)
class Scrape:
    """An engine's /metrics as last read."""

    waiting: int
    running: int
    kv_usage: float
    kv_capacity_tokens: int
    prefill_tokens_per_second: float | None
    shared_load_tokens_per_second: float
    below_load_tokens_per_second: float | None = None
    declined_tiers: frozenset[str] = frozenset()


class Fleet(Protocol):
    """in_flight: unfinished requests of this router, by engine."""

    @property
    def in_flight(self) -> Sequence[int]: ...
    def scrape(self, engine: int) -> Scrape: ...  # of the last common round
    def scrape_now(self, engine: int) -> Scrape: ...
    @property
    def now(self) -> float: ...


class Policy(ABC):
    """One router. Methods that a policy does not need do nothing."""

    name = ""
    note = ""

    @abstractmethod
    def start(self, fleet: Fleet, engines: int, seed: int) -> None:
        """Called once, before the first request."""

    @abstractmethod
    def choose(self, request: RoutedRequest) -> int:
        """The engine, 0 to engines - 1, for a request that is sent there at once."""

    def held_back(self, request: RoutedRequest, again: Callable[[], None]) -> float | None:
        """Return until when a request may have to wait before choose(), in the fleet's seconds; None if it need not.
        again: to be called when it is to be asked about again."""
        return None

    def first_token(self, request_id: str) -> None:  # noqa: B027  nothing to do for most
        """The first byte of the answer passed the router."""

    def finished(self, request_id: str) -> None:  # noqa: B027
        """The answer is complete."""

    def events(self, engine: int, events: list[KvEvent]) -> None:  # noqa: B027
        """KV events of an engine arrived."""

    def engine_down(self, engine: int) -> None:  # noqa: B027
        """The engine's process has died, with all that it held."""

    def engine_up(self, engine: int) -> None:  # noqa: B027
        """An empty engine answers in place of the one that died."""
