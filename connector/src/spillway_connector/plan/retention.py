"""Choice of the chunk that leaves a tier if sessions say when they come back: the one whose session comes back last.

A session's chunks are idle between its requests and are then all read at once. LRU evicts the session that has waited
longest, which is often the next to come back; if the sessions need more than the tier has, it evicts each just
before its return. Here LRU still decides whose turn it is to give up a chunk, and a session with a known return only
changes which chunk that is:

- Chunks that a session which has ended used alone go first. A session has ended if its client says so, or probably if
  few of its tenant's sessions went on after as many requests.
- Where the chunk that LRU would evict belongs to a session that is expected back, another chunk of the same tenant
  leaves in its place: the last one of the session that comes back last. The spared chunk counts as used.
- That holds if the tenant has several sessions, or one of them announces its return. Of two or three that take turns,
  what is spared for one is what the next one lacks.
- So a tenant gives up as many chunks as with LRU, and its sessions take nothing from others, whatever they announce.
- "Last" is in the order of the prefix, whatever the order in which the tier got the chunks: the device gives up the end
  of a prompt before its beginning, and without its beginning a prefix is of no use.
- A chunk that several sessions use, or have used, leaves only in its own turn.

When a session is expected, or has ended, plan/sessions.py says. Without any of this, the order is LRU's.

After Belady's MIN, "A study of replacement algorithms for a virtual-storage computer", 1966: evict what is used again
last; here with announced times in place of known ones.

Pure: no clock, no lock; the time is an argument, in seconds. Everything here belongs to one thread, the scheduler's.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Iterator, KeysView, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop
from itertools import chain, compress, filterfalse, groupby, islice, repeat
from operator import is_
from typing import Generic, Protocol, TypeVar

from spillway_connector.plan.sessions import SESSIONS_MAX, SessionHint, SessionTable, SessionTimes

# A tenant with fewer sessions that are not gone, of which none announces its return, gives up chunks in LRU's order. A
# session counts if the tier has some of it, or if it is expected back.
_SESSIONS_MIN = 4
# Chunks that are not in the tier and keep their places, of all sessions; half of this at least, one and a half times at
# most. The device alone may hold 100,000 chunks, which are stored later. Each place takes about 100 bytes.
_ABSENT_MAX = 1 << 18
EVICTION_LOOKAHEAD = 32  # chunks looked at beyond those wanted, for those among them that may not leave

_Key = TypeVar("_Key", bound=Hashable)


class Leavable(Protocol[_Key]):
    """Tells which of some chunks may leave a tier now."""

    def __call__(self, keys: Iterable[_Key], /, *, of_session: bool = False) -> Iterator[Sequence[_Key]]:
        """Yield those that may leave, in their order, some at a time.

        Args:
            of_session: They are one session's, from its end. Soon after one that is needed now (a request waits for
                it, or it is being read or written) the rest is not looked at, since whoever needs the end of a prefix
                needs its beginning, too.
        """
        ...


@dataclass(slots=True, eq=False)
class _Session(SessionTimes, Generic[_Key]):
    keys: dict[_Key, None] = field(default_factory=dict)  # in the tier
    # In the order of the prefix: those, and others that have left or are stored later.
    places: dict[_Key, None] = field(default_factory=dict)
    in_order: bool = True  # whether `keys` are in the order of the prefix, too
    last: _Key | None = None  # of those that it used; it may have left the tier

    def ordered(self) -> dict[_Key, None]:
        """Return `keys` in the order of the prefix."""
        if not self.in_order:
            self.keys, self.in_order = dict.fromkeys(filter(self.keys.__contains__, self.places)), True
        return self.keys

    def absent(self) -> int:
        """Count the chunks that have a place and are not in the tier."""
        return len(self.places) - len(self.keys)


class Retention(Generic[_Key]):
    """The sessions of a tier and their chunks; at the bound the tenant with the most loses its least recently used.

    The tier reports every chunk that a session's request uses or stores, and every chunk that leaves.
    """

    def __init__(self, sessions_max: int = SESSIONS_MAX) -> None:
        self._sessions: SessionTable[_Session[_Key]] = SessionTable(_Session, sessions_max)
        # Chunk -> its session, or its sessions if it has had several, the last user last.
        self._users: dict[_Key, _Session[_Key] | dict[_Session[_Key], None]] = {}
        # First to leave, in this order, and the session that used it, unless that has been dropped.
        self._ended: dict[_Key, _Session[_Key] | None] = {}
        self._placed = 0  # chunks, since the absent ones were last counted
        self.sessions_ended = 0

    @property
    def retained_chunks(self) -> int:
        """Chunks of sessions that have not ended."""
        return len(self._users)

    @property
    def left_over(self) -> KeysView[_Key]:
        """Chunks of sessions that have ended, the first to leave first."""
        return self._ended.keys()

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to look at, so that the order is LRU's."""
        return not self._users and not self._ended

    def begin_request(self, tenant: bytes, hint: SessionHint, now: float) -> None:
        self._use(tenant, hint, now).begin_request(hint.return_seconds, now)

    def use(self, tenant: bytes, hint: SessionHint, keys: Collection[_Key], now: float) -> None:
        """A request of the session uses or stores these chunks, which are in the tier; in the order of the prefix.

        Chunks that are stored after the session's request has ended, when the device gives them up, do not delay the
        session's expected return.
        """
        session = self._sessions.get((tenant, hint.session))
        if session is None:  # its last request has ended, and its last chunks are stored only now
            if hint.ended:
                return self._leave_over(keys, None)
            session = self._use(tenant, hint, now)
        if session.running:
            session.used(now)
        elif session.is_over:
            return self._leave_over(keys, session)
        placed, owned = self._place(session, keys), len(session.keys)
        self._own(session, keys)
        if len(session.keys) - owned != placed:  # some had their places already
            session.in_order = False

    def _own(self, session: _Session[_Key], keys: Collection[_Key]) -> None:
        """The session is the last user of these chunks."""
        own, users_of = session.keys, self._users
        if all(map(is_, map(users_of.get, keys), repeat(session))):  # used again
            session.last = next(reversed(own), None)
            return
        if users_of.keys().isdisjoint(keys) and self._ended.keys().isdisjoint(keys):  # stored just now: without a loop
            own.update(dict.fromkeys(keys))
            users_of.update(dict.fromkeys(keys, session))
            session.last = next(reversed(own), None)
            return
        for key in keys:
            users = users_of.get(key)
            if users is session:
                continue
            own[key] = None
            if isinstance(users, dict):
                users.pop(session, None)
                users[session] = None
                continue
            before = self._ended.pop(key, session) if users is None else users
            if before is session:
                users_of[key] = session
            else:
                users_of[key] = {session: None} if users is None else {users: None, session: None}
                if before is not None and before.last == key:
                    before.goes_on_as_another()
        session.last = next(reversed(own), None)

    def will_store(self, tenant: bytes, hint: SessionHint, keys: Collection[_Key]) -> None:
        """A request of the session stores these chunks later, perhaps the end of the prefix first. keys: in its order,
        behind what the session has used before."""
        session = self._sessions.get((tenant, hint.session))
        if session is not None:
            self._place(session, keys)

    def _place(self, session: _Session[_Key], keys: Collection[_Key]) -> int:
        """Note the order of a session's chunks: those that have no place yet are behind all others. Returns how many
        these are. keys: in the order of the prefix."""
        self._placed += len(keys)
        if self._placed > _ABSENT_MAX:
            self._forget_absent()
        before = len(session.places)
        session.places.update(dict.fromkeys(keys))
        return len(session.places) - before

    def _forget_absent(self) -> None:
        """Let too many chunks that are not in the tier lose their places, those of the sessions used longest ago
        first."""
        self._placed = 0
        absent = sum(session.absent() for session in self._sessions.values())
        for session in self._sessions.values():
            if absent <= _ABSENT_MAX // 2:
                break
            absent -= session.absent()
            session.places = dict(session.ordered())

    def _leave_over(self, keys: Iterable[_Key], session: _Session[_Key] | None) -> None:
        unused = [key for key in keys if key not in self._users]
        self._ended.update(dict.fromkeys(reversed(unused), session))

    def use_without_session(self, keys: Iterable[_Key]) -> None:
        """Record that requests without a session use these chunks, so no session that ended has left them over."""
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
        elif session.is_over:
            self._ended.update(dict.fromkeys(reversed(self._release(session)), session))

    def forget(self, keys: Collection[_Key]) -> None:
        """Forget these chunks, which have left the tier."""
        if self._ended:
            deque(map(self._ended.pop, keys, repeat(None)), maxlen=0)
        for users, left in _runs(list(keys), map(self._users.pop, keys, repeat(None))):
            if users is not None:
                for session in users if isinstance(users, dict) else (users,):
                    deque(map(session.keys.__delitem__, left), maxlen=0)

    def clear(self) -> None:
        """The tier is empty."""
        for session in self._sessions.values():
            session.keys.clear()
            session.places.clear()
        self._users.clear()
        self._ended.clear()

    def gone(self, count: int, oldest_first: Iterable[_Key], leavable: Leavable[_Key], now: float) -> list[_Key]:
        """Find up to `count` chunks of sessions that have ended or are gone; the search ends at the oldest that is
        not.

        oldest_first, leavable: as of `plan_eviction`.
        """
        if self.is_idle:
            return []
        found = self._first_to_leave(count, leavable)
        for key in chain.from_iterable(leavable(islice(oldest_first, count + EVICTION_LOOKAHEAD))):
            if len(found) == count:
                break
            users = self._users.get(key)
            if users is None:
                continue
            if not all(session.is_gone(now) for session in (users if isinstance(users, dict) else (users,))):
                break
            found[key] = None
        return list(found)

    def plan_eviction(
        self,
        count: int,
        oldest_first: Iterable[_Key],
        leavable: Leavable[_Key],
        now: float,
        asking: tuple[bytes, bytes] | None = None,
    ) -> tuple[list[_Key], list[_Key]] | None:
        """(the `count` chunks to evict, the chunks that stay in place of some of them and count as used); None if
        fewer may leave.

        oldest_first: the tier's chunks in LRU's order. leavable: which of some chunks may leave now, in their order.
        asking: tenant and session that the room is for. That session gives up none of its own chunks in place of
        others', because it would lose the chunks before those that it stores.
        """
        leaving = self._first_to_leave(count, leavable)
        spared: list[_Key] = []
        asking_session = None if asking is None else self._sessions.get(asking)
        last_of: dict[bytes, Iterator[_Key]] = {}  # by tenant
        batches = leavable(oldest_first) if len(leaving) < count else ()
        for users, neighbours in chain.from_iterable(_runs(batch, map(self._users.get, batch)) for batch in batches):
            session = next(reversed(users)) if isinstance(users, dict) else users
            run = list(filterfalse(leaving.__contains__, neighbours))
            if session is None or session.due_from(now) in (None, math.inf):
                leaving.update(dict.fromkeys(run[: count - len(leaving)]))
            else:
                in_place = last_of.get(session.tenant)  # chunks that leave in place of those of its sessions
                if in_place is None:
                    last_first = self._last_first(session.tenant, asking_session, leavable, now)
                    in_place = filterfalse(leaving.__contains__, last_first)
                turn = run[: count - len(leaving)]
                others = list(islice(in_place, len(turn)))
                if len(others) == len(turn) and frozenset(run).isdisjoint(others):
                    leaving.update(dict.fromkeys(others))
                    spared += turn
                else:  # some of the run are themselves the ones that come back last
                    in_place = chain(others, in_place)
                    for key in run:
                        if key not in leaving:
                            other = next(in_place, key)
                            leaving[other] = None
                            if other != key:
                                spared.append(key)
                            if len(leaving) == count:
                                break
                last_of[session.tenant] = in_place
            if len(leaving) == count:
                break
        for key in spared:  # after every chunk had its turn, those that were spared leave too
            if len(leaving) == count:
                break
            leaving[key] = None
        if len(leaving) < count:
            return None
        return list(leaving), list(filterfalse(leaving.__contains__, spared))

    def _first_to_leave(self, count: int, leavable: Leavable[_Key]) -> dict[_Key, None]:
        """Choose up to `count` chunks of sessions that have ended. If such a session has a request after all, it has
        not ended, and its chunks leave in their own turn again."""
        if not self._ended:
            return {}
        not_over: list[_Key] = []

        def over() -> Iterator[_Key]:
            for key, session in self._ended.items():
                if session is not None and session.running:
                    not_over.append(key)
                else:
                    yield key

        found = dict.fromkeys(islice(chain.from_iterable(leavable(over())), count))
        self.use_without_session(not_over)
        return found

    def _last_first(
        self, tenant: bytes, asking: _Session[_Key] | None, leavable: Leavable[_Key], now: float
    ) -> Iterator[_Key]:
        """Chunks that one session uses and that may leave, from its end; the session that comes back last is first."""
        latest: list[tuple[float, float, int, _Session[_Key]]] = []
        living, are_several = 0, False
        for number, session in enumerate(self._sessions.values()):
            if session.tenant != tenant:
                continue
            if session.keys:
                if session is not asking and (due := session.due_from(now)) is not None:
                    latest.append((-due, -session.begun_at, number, session))
            elif session.due_at is None:
                continue
            if not are_several:
                living += not session.is_gone(now)
                are_several = living >= _SESSIONS_MIN or session.announced is not None
        if not are_several:
            return iter(())
        heapify(latest)
        return chain.from_iterable(
            batch
            for _ in range(len(latest))
            for batch in leavable(self._own_last_first(heappop(latest)[-1]), of_session=True)
        )

    def _own_last_first(self, session: _Session[_Key]) -> Iterator[_Key]:
        """The chunks that this session alone uses, from its end."""
        keys = session.ordered()
        users = map(self._users.__getitem__, reversed(keys))
        return compress(reversed(keys), map(is_, users, repeat(session)))

    def _use(self, tenant: bytes, hint: SessionHint, now: float) -> _Session[_Key]:
        """The session, as the most recently used one."""
        name = tenant, hint.session
        crowded = self._sessions.crowded_out_by(name)
        if crowded is not None:
            self._drop(crowded)
        return self._sessions.use(name, now)

    def _drop(self, name: tuple[bytes, bytes]) -> list[_Key]:
        """Stop following a session. Returns the chunks that it alone used, the first of the prefix first."""
        return self._release(self._sessions.drop(name))

    def _release(self, session: _Session[_Key]) -> list[_Key]:
        """Take a session's chunks from it. Returns those that it alone used, the first of the prefix first."""
        alone: list[_Key] = []
        for key in session.ordered():
            users = self._users[key]
            if isinstance(users, dict):
                del users[session]
                if not users:
                    del self._users[key]
            else:
                del self._users[key]
                alone.append(key)
        session.keys.clear()
        session.places.clear()
        return alone

    def _end(self, name: tuple[bytes, bytes]) -> None:
        self._ended.update(dict.fromkeys(reversed(self._drop(name))))
        self.sessions_ended += 1


def _runs(
    keys: Sequence[_Key], users_of: Iterable[_Session[_Key] | dict[_Session[_Key], None] | None]
) -> Iterator[tuple[_Session[_Key] | dict[_Session[_Key], None] | None, Sequence[_Key]]]:
    """Yield the chunks in runs of neighbours with the same users, behind those users.

    Args:
        keys: The chunks.
        users_of: What `Retention._users` has of each.
    """
    users, begin = list(users_of), 0
    for _, same in groupby(map(id, users)):
        end = begin + len(list(same))
        yield users[begin], keys[begin:end]
        begin = end
