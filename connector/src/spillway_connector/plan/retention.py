"""Which chunk leaves a tier where sessions say when they come back: the one whose session comes back last.

A session's chunks are idle between its requests and are then all read at once. LRU evicts the session that has waited
longest, which is often the next to come back; where the sessions need more than the tier has, it evicts each just
before its return. Here LRU still decides whose turn it is to give up a chunk, and a session with a known return only
changes which chunk that is:

- Chunks that only ended sessions used go first.
- Where the chunk that LRU would evict belongs to a session that is expected back, another chunk of the same tenant
  leaves in its place: the last one of the session that comes back last. The spared chunk counts as used.
- So a tenant gives up as many chunks as with LRU, and its sessions take nothing from others, whatever they announce.
- A chunk that several sessions use leaves only in its own turn.

A session is expected after the seconds that its client announces, or else after its own usual pause once it has come
back. One that is late by several times that has ended. Without any of this, the order is LRU's.

After Belady's MIN, "A study of replacement algorithms for a virtual-storage computer", 1966: evict what is used again
last; here with announced times in place of known ones.

Pure: no clock, no lock; the time is an argument, in seconds. Everything here belongs to one thread, the scheduler's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop
from typing import Generic, NamedTuple, TypeVar

SESSIONS_MAX = 1024  # followed at a time; an eviction looks at each of a tenant's once, in about 50 us
# A session that is late by this many of its pauses has ended: 99 % of exponential pauses end before.
LATE_PAUSES_MAX = 4
LATE_SECONDS_MIN = 60.0  # a person is not late before this
_NEWEST_SHARE = 0.5  # of the last pause in the usual one

_Key = TypeVar("_Key", bound=Hashable)


class SessionHint(NamedTuple):
    """What a request says of its session. session: unique within the tenant. ended: this is its last request.
    return_seconds: from the end of this request to the next; None: unknown."""

    session: bytes
    ended: bool = False
    return_seconds: float | None = None


@dataclass(slots=True, eq=False)
class _Session(Generic[_Key]):
    tenant: bytes
    keys: dict[_Key, None] = field(default_factory=dict)  # in the tier, in the order of the prefix
    running: int = 0  # requests
    used_at: float = -math.inf
    usual_pause: float | None = None
    announced: float | None = None
    served: bool = False  # a request of it has ended

    @property
    def pause(self) -> float | None:
        return self.usual_pause if self.announced is None else self.announced

    @property
    def due_at(self) -> float:
        """When its next request is expected."""
        pause = self.pause
        return -math.inf if pause is None else self.used_at + pause

    def has_ended(self, now: float) -> bool:
        pause = self.pause
        return (
            pause is not None
            and not self.running
            and now > self.used_at + pause + max(LATE_SECONDS_MIN, LATE_PAUSES_MAX * pause)
        )


class Retention(Generic[_Key]):
    """The sessions of a tier and their chunks; at the bound the tenant with the most loses its least recently used.

    The tier reports every chunk that a session's request uses or stores, and every chunk that leaves.
    """

    def __init__(self, sessions_max: int = SESSIONS_MAX) -> None:
        self._sessions_max = sessions_max
        self._sessions: dict[tuple[bytes, bytes], _Session[_Key]] = {}  # the least recently used first
        self._tenant_sessions: Counter[bytes] = Counter()
        self._users: dict[_Key, int] = {}  # how many sessions a chunk has
        self._last_user: dict[_Key, _Session[_Key]] = {}
        self._ended: dict[_Key, None] = {}  # first to leave, in this order
        self.sessions_ended = 0

    @property
    def retained_chunks(self) -> int:
        """Chunks of sessions that have not ended."""
        return len(self._users)

    @property
    def is_idle(self) -> bool:
        """Whether the order is LRU's, with nothing to look at."""
        return not self._users and not self._ended

    def begin_request(self, tenant: bytes, hint: SessionHint, now: float) -> None:
        session = self._use(tenant, hint, now)
        if session.served and not session.running:
            pause = now - session.used_at
            usual = session.usual_pause
            session.usual_pause = pause if usual is None else usual + _NEWEST_SHARE * (pause - usual)
        session.running += 1
        session.used_at = now
        session.announced = _bounded(hint.return_seconds)

    def use(self, tenant: bytes, hint: SessionHint, keys: Iterable[_Key], now: float) -> None:
        """A request of the session uses or stores these chunks, which are in the tier; in the order of the prefix."""
        session = self._sessions.get((tenant, hint.session))
        if session is None:  # its last request has ended, and its last chunks are stored only now
            if hint.ended:
                self._ended.update(dict.fromkeys(key for key in reversed(list(keys)) if key not in self._users))
                return
            session = self._use(tenant, hint, now)
        session.used_at = now
        own = session.keys
        for key in keys:
            if key not in own:
                own[key] = None
                self._users[key] = self._users.get(key, 0) + 1
                self._ended.pop(key, None)
            self._last_user[key] = session

    def use_without_session(self, keys: Iterable[_Key]) -> None:
        """A request that names no session uses these chunks: they are not left over from one that ended."""
        if self._ended:
            for key in keys:
                self._ended.pop(key, None)

    def end_request(self, tenant: bytes, hint: SessionHint, now: float) -> None:
        session = self._sessions.get((tenant, hint.session))
        if session is None:
            return
        session.running = max(0, session.running - 1)
        session.used_at, session.served = now, True
        if hint.ended and not session.running:
            self._end((tenant, hint.session))

    def forget(self, keys: Iterable[_Key]) -> None:
        """These chunks have left the tier."""
        for key in keys:
            self._ended.pop(key, None)
            users = self._users.pop(key, 0)
            if not users:
                continue
            last = self._last_user.pop(key)
            if users == 1 and key in last.keys:
                del last.keys[key]
            else:
                for session in self._sessions.values():
                    session.keys.pop(key, None)

    def clear(self) -> None:
        """The tier is empty."""
        for session in self._sessions.values():
            session.keys.clear()
        self._users.clear()
        self._last_user.clear()
        self._ended.clear()

    def plan_eviction(
        self,
        count: int,
        oldest_first: Iterable[_Key],
        may_leave: Callable[[_Key], bool],
        now: float,
        asking: tuple[bytes, bytes] | None = None,
    ) -> tuple[list[_Key], list[_Key]] | None:
        """(the `count` chunks to evict, the chunks that stay in place of some of them and count as used); None where
        fewer may leave.

        oldest_first: the tier's chunks in LRU's order. may_leave: whether a chunk may leave, now. asking: tenant and
        session that the room is for: it gives up none of its own in place of others, or it would lose the chunks in
        front of those that it stores.
        """
        leaving: dict[_Key, None] = {}
        for key in self._ended:
            if len(leaving) == count:
                break
            if may_leave(key):
                leaving[key] = None
        spared: list[_Key] = []
        asking_session = None if asking is None else self._sessions.get(asking)
        last_of: dict[bytes, Iterator[_Key]] = {}  # by tenant
        for key in oldest_first:
            if len(leaving) == count:
                break
            if key in leaving or not may_leave(key):
                continue
            session = self._last_user.get(key)
            if session is None or session.pause is None or session.has_ended(now):
                leaving[key] = None
                continue
            candidates = last_of.get(session.tenant)
            if candidates is None:
                candidates = last_of[session.tenant] = self._last_first(session.tenant, asking_session, now)
            other = next((one for one in candidates if one not in leaving and may_leave(one)), key)
            leaving[other] = None
            if other != key:
                spared.append(key)
        for key in spared:  # after every chunk had its turn, those that were spared leave too
            if len(leaving) == count:
                break
            leaving[key] = None
        if len(leaving) < count:
            return None
        return list(leaving), [key for key in spared if key not in leaving]

    def _last_first(self, tenant: bytes, asking: _Session[_Key] | None, now: float) -> Iterator[_Key]:
        """Chunks that one session of the tenant uses, from the end of the one that comes back last."""
        # A session that has ended without saying so comes back last of all.
        sessions = [
            (-math.inf if session.has_ended(now) else -session.due_at, number, session)
            for number, session in enumerate(self._sessions.values())
            if session.tenant == tenant and session.pause is not None and session is not asking and session.keys
        ]
        heapify(sessions)
        while sessions:
            for key in reversed(heappop(sessions)[2].keys):
                if self._users[key] == 1:
                    yield key

    def _use(self, tenant: bytes, hint: SessionHint, now: float) -> _Session[_Key]:
        """The session, as the most recently used one."""
        name = tenant, hint.session
        session = self._sessions.pop(name, None)
        if session is None:
            session = _Session(tenant, used_at=now)
            if len(self._sessions) >= self._sessions_max:
                # Of the tenant with the most, or this one: one that names many does not displace another's few.
                counts = self._tenant_sessions
                crowded = max(counts, key=lambda one: (counts[one], one == tenant))
                self._drop(next(other for other in self._sessions if other[0] == crowded))
            self._tenant_sessions[tenant] += 1
        self._sessions[name] = session
        return session

    def _drop(self, name: tuple[bytes, bytes]) -> list[_Key]:
        """Follow a session no longer; the chunks that it alone used, the first of the prefix first."""
        session = self._sessions.pop(name)
        self._tenant_sessions[name[0]] -= 1
        if not self._tenant_sessions[name[0]]:
            del self._tenant_sessions[name[0]]
        alone: list[_Key] = []
        for key in session.keys:
            if self._users[key] == 1:
                del self._users[key], self._last_user[key]
                alone.append(key)
            else:
                self._users[key] -= 1
        session.keys.clear()
        return alone

    def _end(self, name: tuple[bytes, bytes]) -> None:
        self._ended.update(dict.fromkeys(reversed(self._drop(name))))
        self.sessions_ended += 1


def _bounded(seconds: float | None) -> float | None:
    return None if seconds is None or not seconds >= 0 else seconds
