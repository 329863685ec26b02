"""Discovery of servers through any of several: rate limited, by one thread at a time, within deadlines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from spillway_connector.errors import TierError, TierTimeout
from spillway_connector.tiers.redis.client.endpoint import Address
from spillway_connector.tiers.tier import Clock

RENEWAL_SECONDS = 1.0  # the least time between two discoveries, whatever the servers answer meanwhile

_Found = TypeVar("_Found")


class Discovery(Generic[_Found]):
    """The last result, discovered again once suspected: by one thread at a time, at most once per RENEWAL_SECONDS."""

    def __init__(self, ask: Callable[[float], _Found], clock: Clock) -> None:
        self._ask = ask
        self._clock = clock
        self._lock = threading.Lock()
        self._found: _Found | None = None
        self._suspected = False
        self._asked_at = float("-inf")

    def suspect(self) -> None:
        self._suspected = True

    def get(self, deadline: float) -> _Found:
        """The result. Raises TierError only if there is none from before."""
        found = self._found
        if found is not None and (not self._suspected or self._clock() - self._asked_at < RENEWAL_SECONDS):
            return found
        if not self._lock.acquire(timeout=max(0.0, deadline - self._clock())):
            raise TierTimeout("the deadline passed while another thread discovered the server")
        try:
            if self._found is not None and self._clock() - self._asked_at < RENEWAL_SECONDS:
                return self._found  # from another thread, just now
            self._asked_at = self._clock()
            try:
                self._found = self._ask(deadline)
                self._suspected = False
            except TierError:
                if self._found is None:
                    raise
            return self._found
        finally:
            self._lock.release()


def first_answer(
    addresses: Sequence[Address], ask: Callable[[Address, float], _Found], clock: Clock, deadline: float
) -> _Found:
    """Ask one after the other; each gets its share of the time left, so that a silent one cannot use it all."""
    failure: TierError | None = None
    for position, address in enumerate(addresses):
        now = clock()
        if now >= deadline:
            break
        try:
            return ask(address, now + (deadline - now) / (len(addresses) - position))
        except TierError as error:
            failure = error
    try:
        raise failure or TierTimeout("the deadline passed before the discovery of a server")
    finally:
        del failure  # whose traceback holds this frame
