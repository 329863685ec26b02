"""Which chunk leaves a tier if sessions say when they come back: the one whose session comes back last.

A session's chunks are idle between its requests and are then all read at once. LRU evicts the session that has waited
longest, which is often the next to come back; if the sessions need more than the tier has, it evicts each just
before its return. Here LRU still decides whose turn it is to give up a chunk, and a session with a known return only
changes which chunk that is:

- Chunks that only ended sessions used go first.
- Where the chunk that LRU would evict belongs to a session that is expected back, another chunk of the same tenant
  leaves in its place: the last one of the session that comes back last. The spared chunk counts as used.
- So a tenant gives up as many chunks as with LRU, and its sessions take nothing from others, whatever they announce.
- A chunk that several sessions use leaves only in its own turn.

When a session is expected, or has ended, plan/sessions.py says. Without any of this, the order is LRU's.

After Belady's MIN, "A study of replacement algorithms for a virtual-storage computer", 1966: evict what is used again
last; here with announced times in place of known ones.

Pure: no clock, no lock; the time is an argument, in seconds. Everything here belongs to one thread, the scheduler's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, TypeVar

from spillway_connector.plan.sessions import SESSIONS_MAX, SessionHint, SessionTable, SessionTimes

EVICTION_LOOKAHEAD = 32  # chunks looked at beyond those wanted, for those among them that may not leave

_Key = TypeVar("_Key", bound=Hashable)


@dataclass(slots=True, eq=False)
class _Session(SessionTimes, Generic[_Key]):
    keys: dict[_Key, None] = field(default_factory=dict)  # in the tier, in the order of the prefix


class Retention(Generic[_Key]):
    """The sessions of a tier and their chunks; at the bound the tenant with the most loses its least recently used.

    The tier reports every chunk that a session's request uses or stores, and every chunk that leaves.
    """

    def __init__(self, sessions_max: int = SESSIONS_MAX) -> None:
        self._sessions: SessionTable[_Session[_Key]] = SessionTable(_Session, sessions_max)
        # By chunk: its session, or its sessions if it has several, the last user last.
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
        self._use(tenant, hint, now).begin_request(hint.return_seconds, now)

    def use(self, tenant: bytes, hint: SessionHint, keys: Iterable[_Key], now: float) -> None:
        """A request of the session uses or stores these chunks, which are in the tier; in the order of the prefix.

        What is stored after the session's request has ended, as the device gives it up, does not make it come back
        later.
        """
        session = self._sessions.get((tenant, hint.session))
        if session is None:  # its last request has ended, and its last chunks are stored only now
            if hint.ended:
                self._ended.update(dict.fromkeys(key for key in reversed(list(keys)) if key not in self._users))
                return
            session = self._use(tenant, hint, now)
        if session.running:
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
        session.end_request(now)
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

    def gone(
        self, count: int, oldest_first: Iterable[_Key], may_leave: Callable[[_Key], bool], now: float
    ) -> list[_Key]:
        """Up to `count` chunks of sessions that have ended or are gone; the search ends at the oldest that is not.

        oldest_first, may_leave: as of `plan_eviction`.
        """
        if self.is_idle:
            return []
        found = dict.fromkeys(islice(filter(may_leave, self._ended), count))
        for key in islice(oldest_first, count + EVICTION_LOOKAHEAD):
            if len(found) == count:
                break
            users = self._users.get(key)
            if users is None or not may_leave(key):
                continue
            if not all(session.is_gone(now) for session in (users if isinstance(users, dict) else (users,))):
                break
            found[key] = None
        return list(found)

    def plan_eviction(
        self,
        count: int,
        oldest_first: Iterable[_Key],
        may_leave: Callable[[_Key], bool],
        now: float,
        asking: tuple[bytes, bytes] | None = None,
    ) -> tuple[list[_Key], list[_Key]] | None:
        """(the `count` chunks to evict, the chunks that stay in place of some of them and count as used); None if
        fewer may leave.

        oldest_first: the tier's chunks in LRU's order. may_leave: whether a chunk may leave, now. asking: tenant and
        session that the room is for. It gives up none of its own chunks in place of others', or it would lose the
        chunks before those that it stores.
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
            if session is None or session.due_from(now) in (None, math.inf):
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
            last, last_due = None, (-math.inf, -math.inf)
            for session in self._sessions.values():
                due = session.due_from(now)
                if due is None or session.tenant != tenant or not session.keys or session in given:
                    continue
                if session is not asking and (due, session.begun_at) > last_due:
                    last, last_due = session, (due, session.begun_at)
            if last is None:
                return
            given.add(last)
            for key in reversed(last.keys):
                if self._users[key] is last:
                    yield key

    def _use(self, tenant: bytes, hint: SessionHint, now: float) -> _Session[_Key]:
        """The session, as the most recently used one."""
        name = tenant, hint.session
        crowded = self._sessions.crowded_out_by(name)
        if crowded is not None:
            self._drop(crowded)
        return self._sessions.use(name, now)

    def _drop(self, name: tuple[bytes, bytes]) -> list[_Key]:
        """Follow a session no longer; the chunks that it alone used, the first of the prefix first."""
        session = self._sessions.drop(name)
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
