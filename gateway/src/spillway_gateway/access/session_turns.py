"""Decides whose turn it is among the sessions of one tenant: the session that was served least lately.

Least attained service (L. Kleinrock, Queueing Systems, volume 2, 1976) with a half-life: tokens that a session got a
half-life ago count half. So a burst of one agent waits behind a user who asks now and then, however many calls it has,
and has all of the room that others leave. Requests that name no session count as one session together: who names none
gains nothing by it. Older tokens do not lose weight, newer ones gain it (forward decay; G. Cormode and others, ICDE
2009), so a sum changes only when its session is served, and sums compare as they are.

Every fourth turn belongs to the tenant's oldest request, whatever its session got. So no session starves, even if new
sessions keep coming.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence

OLDEST_EVERY = 4
REQUEST_TOKENS = 256  # that a request counts besides what is computed of its prompt: its answer
SESSIONS_MAX = 1024  # remembered of one tenant; the least recently served is forgotten, and counts as not served
ALL_SESSIONS_MAX = 65_536  # of all tenants; beyond, the oldest one of the tenant that was served least recently

HALF_LIVES_MAX = 512  # until all sums are scaled down, far below what a float holds

Session = int | None  # the hash of its name; None: all requests of the tenant that name none


class SessionTurns:
    """The tokens that the sessions of one model's tenants got, and whose turn it is. On the event loop.

    Args:
        half_life_seconds: 0: sessions have no turns.
        clock: monotonic seconds.
    """

    def __init__(self, half_life_seconds: float, clock: Callable[[], float]) -> None:
        self._half_life_seconds = half_life_seconds
        self._clock = clock
        # tenant -> session -> tokens, weighted by when it got them; both the least recently served first
        self._served: OrderedDict[str, OrderedDict[Session, float]] = OrderedDict()
        self._weighs_one_at = clock()  # seconds
        self._sessions = 0
        self._turns: dict[str, int] = {}  # of each tenant, while several of its sessions wait

    def charge(self, tenant: str, session: Session, tokens: int) -> None:
        """The session gets this number of tokens computed."""
        if not self._half_life_seconds:
            return
        half_lives = (self._clock() - self._weighs_one_at) / self._half_life_seconds
        if half_lives > HALF_LIVES_MAX:
            self._scale_down(half_lives)
            half_lives = 0.0
        weighted = tokens * math.exp2(half_lives)
        served = self._served.get(tenant)
        if served is None:
            served = self._served[tenant] = OrderedDict()
        else:
            self._served.move_to_end(tenant)
        before = served.get(session)
        if before is not None:
            served[session] = before + weighted
            served.move_to_end(session)
            return
        served[session] = weighted
        self._sessions += 1
        if len(served) > SESSIONS_MAX:
            self._forget_one(tenant)
        elif self._sessions > ALL_SESSIONS_MAX:
            self._forget_one(next(iter(self._served)))

    def _scale_down(self, half_lives: float) -> None:
        """Tokens that a session gets now weigh one again."""
        self._weighs_one_at = self._clock()
        part = math.exp2(-half_lives)
        for served in self._served.values():
            for session, weighted in served.items():
                served[session] = weighted * part

    def _forget_one(self, tenant: str) -> None:
        served = self._served[tenant]
        served.popitem(last=False)
        self._sessions -= 1
        if not served:
            del self._served[tenant]
            self._turns.pop(tenant, None)

    def tokens_of(self, tenant: str, session: Session) -> float:
        """Return the tokens that the session got, as they count now."""
        served = self._served.get(tenant)
        weighted = 0.0 if served is None else served.get(session, 0.0)
        if not weighted:
            return 0.0
        return weighted * math.exp2((self._weighs_one_at - self._clock()) / self._half_life_seconds)

    def next_of(self, tenant: str, waiting: Sequence[Session]) -> Sequence[int]:
        """Return the positions of the requests of which one is next; the first position alone if it has to be that
        request.

        Args:
            tenant: the tenant whose requests wait.
            waiting: their sessions, the oldest request first.
        """
        if not self._half_life_seconds or waiting.count(waiting[0]) == len(waiting):
            return range(len(waiting))
        turn = self._turns[tenant] = self._turns.get(tenant, 0) % OLDEST_EVERY + 1
        if turn == OLDEST_EVERY:
            return (0,)
        # Among sessions that got the same, the one with the older request comes first: the dict keeps the queue's
        # order.
        served = self._served.get(tenant, OrderedDict())
        chosen = min(dict.fromkeys(waiting), key=lambda session: served.get(session, 0.0))
        return [at for at, session in enumerate(waiting) if session == chosen]
