"""Whose turn it is among the sessions of one tenant: the one that was served least lately.

Least attained service (L. Kleinrock, Queueing Systems, volume 2, 1976) with a half-life: tokens that a session got a
half-life ago count half. So a burst of one agent waits behind a user who asks now and then, however many calls it has,
and has all of the room that others leave. Requests that name no session count as one session together: who names none
gains nothing by it.

Every fourth turn belongs to the tenant's oldest request, whatever its session got. So no session starves, not even if
ever new ones come that have got nothing.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence

OLDEST_EVERY = 4
REQUEST_TOKENS = 256  # that a request counts besides what is computed of its prompt: its answer
SESSIONS_MAX = 1024  # remembered of one tenant; the least recently served is forgotten, and counts as not served
ALL_SESSIONS_MAX = 65_536  # of all tenants; beyond, the oldest one of the tenant that was served least recently

Session = int | None  # the hash of its name; None: all requests of the tenant that name none


class SessionTurns:
    """What the sessions of one model's tenants got, and whose turn it is. On the event loop.

    Args:
        half_life_seconds: 0: sessions have no turns.
        clock: monotonic seconds.
    """

    def __init__(self, half_life_seconds: float, clock: Callable[[], float]) -> None:
        self._half_life_seconds = half_life_seconds
        self._clock = clock
        # tenant -> session -> (tokens, when that was true), both the least recently served first
        self._served: OrderedDict[str, OrderedDict[Session, tuple[float, float]]] = OrderedDict()
        self._sessions = 0
        self._turns: dict[str, int] = {}  # of each tenant, while several of its sessions wait

    def charge(self, tenant: str, session: Session, tokens: int) -> None:
        """The session gets this number of tokens computed."""
        if not self._half_life_seconds:
            return
        served = self._served.setdefault(tenant, OrderedDict())
        self._served.move_to_end(tenant)
        self._sessions += session not in served
        served[session] = self.tokens_of(tenant, session) + tokens, self._clock()
        served.move_to_end(session)
        if len(served) > SESSIONS_MAX:
            self._forget_one(tenant)
        elif self._sessions > ALL_SESSIONS_MAX:
            self._forget_one(next(iter(self._served)))

    def _forget_one(self, tenant: str) -> None:
        served = self._served[tenant]
        served.popitem(last=False)
        self._sessions -= 1
        if not served:
            del self._served[tenant]
            self._turns.pop(tenant, None)

    def tokens_of(self, tenant: str, session: Session) -> float:
        """What the session got, as it counts now."""
        served = self._served.get(tenant)
        if served is None or session not in served:
            return 0.0
        tokens, at = served[session]
        return tokens * math.exp2((at - self._clock()) / self._half_life_seconds)

    def next_of(self, tenant: str, waiting: Sequence[Session]) -> Sequence[int]:
        """The positions of the requests of which one is next. The first position alone: it has to be that one.

        Args:
            tenant: whose requests wait.
            waiting: their sessions, the oldest request first.
        """
        if not self._half_life_seconds or waiting.count(waiting[0]) == len(waiting):
            return range(len(waiting))
        turn = self._turns[tenant] = self._turns.get(tenant, 0) % OLDEST_EVERY + 1
        if turn == OLDEST_EVERY:
            return (0,)
        # Among sessions that got the same, the one with the older request comes first: the dict keeps the queue's
        # order.
        chosen = min(dict.fromkeys(waiting), key=lambda session: self.tokens_of(tenant, session))
        return [at for at, session in enumerate(waiting) if session == chosen]
