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
from typing import Generic, NamedTuple, TypeVar

SESSIONS_MAX = 1024  # followed at a time; an eviction looks at each, in about 0.1 ms
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
    due_at: float | None = None  # when its next request is expected; None: unknown
    late_at: float = math.inf  # when it has ended without saying so

    def used(self, now: float) -> None:
        self.used_at = now
        pause = self.usual_pause if self.announced is None else self.announced
        if pause is None:
            self.due_at, self.late_at = None, math.inf
        else:
            self.due_at = now + pause
            late = max(LATE_SECONDS_MIN, LATE_PAUSES_MAX * pause)
            self.late_at = math.inf if self.running else self.due_at + late


class Retention(Generic[_Key]):
    """The sessions of a tier and their chunks; at the bound the tenant with the most loses its least recently used.

    The tier reports every chunk that a session's request uses or stores, and every chunk that leaves.
    """

    def __init__(self, sessions_max: int = SESSIONS_MAX) -> None:
        self._sessions_max = sessions_max
        self._sessions: dict[tuple[bytes, bytes], _Session[_Key]] = {}  # the least recently used first
        self._tenant_sessions: Counter[bytes] = Counter()
        # By chunk: its session, or its sessions where it has several, the last user last.
        self._users: dict[_Key, _Session[_Key] | dict[_Session[_Key], None]] = {}
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
        session.announced = _bounded(hint.return_seconds)
        session.used(now)

    def use(self, tenant: bytes, hint: SessionHint, keys: Iterable[_Key], now: float) -> None:
        """A request of the session uses or stores these chunks, which are in the tier; in the order of the prefix."""
        session = self._sessions.get((tenant, hint.session))
        if session is None:  # its last request has ended, and its last chunks are stored only now
            if hint.ended:
                self._ended.update(dict.fromkeys(key for key in reversed(list(keys)) if key not in self._users))
                return
            session = self._use(tenant, hint, now)
        session.used(now)
        own, users_of = session.keys, self._users
        for key in keys:
            users = users_of.get(key)
            if users is session:
                continue
            own[key] = None
            if users is None:
                users_of[key] = session
                self._ended.pop(key, None)
            elif isinstance(users, dict):
                users.pop(session, None)
                users[session] = None
            else:
                users_of[key] = {users: None, session: None}

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
        session.served = True
        session.used(now)
        if hint.ended and not session.running:
            self._end((tenant, hint.session))

    def forget(self, keys: Iterable[_Key]) -> None:
        """These chunks have left the tier."""
        for key in keys:
            self._ended.pop(key, None)
            users = self._users.pop(key, None)
            for session in () if users is None else users if isinstance(users, dict) else (users,):
                del session.keys[key]

    def clear(self) -> None:
        """The tier is empty."""
        for session in self._sessions.values():
            session.keys.clear()
        self._users.clear()
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
            users = self._users.get(key)
            session = next(reversed(users)) if isinstance(users, dict) else users
            if session is None or session.due_at is None or now > session.late_at:
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
        given: set[_Session[_Key]] = set()
        while True:
            last, last_due = None, -math.inf
            for session in self._sessions.values():
                due = session.due_at
                if due is None or session.tenant != tenant or not session.keys or session in given:
                    continue
                if now > session.late_at:
                    due = math.inf  # it does not come back
                if session is not asking and due > last_due:
                    last, last_due = session, due
            if last is None:
                return
            given.add(last)
            for key in reversed(last.keys):
                if self._users[key] is last:
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
            users = self._users[key]
            if isinstance(users, dict):
                del users[session]
                if len(users) == 1:
                    self._users[key] = next(iter(users))
            else:
                del self._users[key]
                alone.append(key)
        session.keys.clear()
        return alone

    def _end(self, name: tuple[bytes, bytes]) -> None:
        self._ended.update(dict.fromkeys(reversed(self._drop(name))))
        self.sessions_ended += 1


def _bounded(seconds: float | None) -> float | None:
    return None if seconds is None or not seconds >= 0 else seconds
