"""When sessions come back: what requests say of their session, and what their pauses tell.

A session is expected after the seconds that its client announces, or else after its own usual pause once it has come
back. One that is late by several times that has ended, and so has one whose client says so.

Pure: no clock, no lock; the time is an argument, in seconds. Everything here belongs to one thread, the scheduler's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import xxhash

SESSIONS_MAX = 1024  # followed at a time; an eviction from the CPU tier looks at each, in about 0.1 ms
# A session that is late by this many mean deviations of its pauses has ended: 99 % of exponential pauses end before.
LATE_DEVIATIONS_MAX = 5
LATE_SECONDS_MIN = 15.0
# The least deviation that is assumed for a session's first pause: a person is not late before a minute. A session whose
# pauses turn out to be regular is late sooner.
_FIRST_DEVIATION_SECONDS_MIN = 12.0
# An overdue session is expected after this multiple of the time for which it has been overdue. Without this, sessions
# that end without a word would be kept before all others until they are late.
_OVERDUE_FACTOR = 2.0
# The order of eviction treats a session as gone if it is overdue by this number of its tenant's usual pauses: one in
# 55 exponential pauses is longer, and its loss costs less than copies of what all others use.
_GONE_PAUSES = 3.0
_GONE_SECONDS_MIN = 1.0
_NEWEST_SHARE = 0.5  # of the last pause in the usual one, and of the last request's duration
_NEWEST_DEVIATION_SHARE = 0.25
_NEWEST_HABIT_SHARE = 0.1
_SESSIONS_COUNTED = 128  # of a tenant; then older ones count half


def expected_at(due_at: float, late_at: float, now: float) -> float:
    """When an idle session comes back, as known now; infinity: it has ended.

    One that is overdue is expected the later the longer it has been: it may have ended without saying so, whatever its
    client announced before.

    Args:
        due_at: when it was expected as its last request ended.
        late_at: when it has ended without saying so.
    """
    if now > late_at:
        return math.inf
    return due_at if now <= due_at else now + _OVERDUE_FACTOR * (now - due_at)


class SessionHint(NamedTuple):
    """What a request says of its session. session: unique within the tenant. ended: this is its last request.
    return_seconds: from the end of this request to the next; None: unknown."""

    session: bytes
    ended: bool = False
    return_seconds: float | None = None


@dataclass(slots=True, eq=False)
class Habits:
    """The expectation for a tenant's sessions before any of them has paused."""

    sessions: int = 0
    came_back: int = 0  # of those
    pause: float | None = None

    def begun(self) -> None:
        self.sessions += 1
        if self.sessions >= _SESSIONS_COUNTED:
            self.sessions //= 2
            self.came_back //= 2

    def paused(self, seconds: float, *, first: bool) -> None:
        self.came_back += first
        self.pause = seconds if self.pause is None else self.pause + _NEWEST_HABIT_SHARE * (seconds - self.pause)

    @property
    def expected_pause(self) -> float | None:
        """The pause of a session that has not paused yet; None unless at least half of the tenant's came back."""
        return self.pause if 2 * self.came_back >= self.sessions else None


@dataclass(slots=True, eq=False)
class SessionTimes:
    """The times of one session: when it was used, and when its next request is expected. habits: of its tenant."""

    tenant: bytes
    habits: Habits
    running: int = 0  # requests
    begun_at: float = -math.inf
    used_at: float = -math.inf
    usual_pause: float | None = None
    usual_deviation: float = 0.0  # of a pause from the usual one
    usual_duration: float = 0.0  # of a request
    announced: float | None = None
    served: bool = False  # a request of it has ended
    waits: bool = False  # its newest request has begun, and used nothing yet
    due_at: float | None = None  # when its next request is expected; None: unknown
    late_at: float = math.inf  # when it has ended without saying so

    def begin_request(self, return_seconds: float | None, now: float) -> None:
        if self.served and not self.running:
            self._paused(now - self.used_at)
        self.running += 1
        self.begun_at = now
        self.announced = None if return_seconds is None or not return_seconds >= 0 else return_seconds
        self.used(now)
        self.waits = True

    def _paused(self, pause: float) -> None:
        usual = self.usual_pause
        self.habits.paused(pause, first=usual is None)
        if usual is None:
            self.usual_pause = pause
            self.usual_deviation = max(pause, _FIRST_DEVIATION_SECONDS_MIN)
        else:
            self.usual_deviation += _NEWEST_DEVIATION_SHARE * (abs(pause - usual) - self.usual_deviation)
            self.usual_pause = usual + _NEWEST_SHARE * (pause - usual)

    @property
    def expected_pause(self) -> float | None:
        """Return the seconds from the end of a request to the next one; None if they are unknown."""
        if self.announced is not None:
            return self.announced
        return self.habits.expected_pause if self.usual_pause is None else self.usual_pause

    def used(self, now: float) -> None:
        self.used_at, self.waits = now, False
        pause = self.expected_pause
        if pause is None:
            self.due_at, self.late_at = None, math.inf
        elif self.running:
            self.due_at, self.late_at = max(now, self.begun_at + self.usual_duration) + pause, math.inf
        else:
            measured = self.announced is None and self.usual_pause is not None
            deviation = self.usual_deviation if measured else max(pause, _FIRST_DEVIATION_SECONDS_MIN)
            self.due_at = now + pause
            self.late_at = self.due_at + max(LATE_SECONDS_MIN, LATE_DEVIATIONS_MAX * deviation)

    def end_request(self, now: float) -> None:
        self.running = max(0, self.running - 1)
        duration = now - self.begun_at
        if self.served:
            duration = self.usual_duration + _NEWEST_SHARE * (duration - self.usual_duration)
        self.usual_duration = duration
        self.served = True
        self.used(now)

    def due_from(self, now: float) -> float | None:
        """When its chunks are used next, as known now. None: unknown, infinity: never. One whose request waits needs
        them at once; one whose request runs, after that has ended and the pause is over."""
        if self.waits:
            return now
        if self.due_at is None:
            return None
        pause = self.expected_pause if self.running else None
        return expected_at(self.due_at, self.late_at, now) if pause is None else max(self.due_at, now + pause)

    def is_gone(self, now: float) -> bool:
        """Whether sessions that are as late as this one come back so rarely that other chunks are worth more."""
        if self.running or self.due_at is None:
            return False
        pause = max(self.expected_pause or 0.0, self.habits.pause or 0.0)
        return now > min(self.late_at, self.due_at + max(_GONE_SECONDS_MIN, _GONE_PAUSES * pause))


_Times = TypeVar("_Times", bound=SessionTimes)
SessionName = tuple[bytes, bytes]
"""(tenant, session)"""


class SessionTable(Generic[_Times]):
    """A bounded number of sessions by name; at the bound the tenant with the most loses its least recently used.

    make: a new session of a tenant with these habits.
    """

    def __init__(self, make: Callable[[bytes, Habits], _Times], sessions_max: int) -> None:
        self._make = make
        self._sessions_max = sessions_max
        self._sessions: dict[SessionName, _Times] = {}  # the least recently used first
        self._tenant_sessions: Counter[bytes] = Counter()
        self._habits: dict[bytes, Habits] = {}  # of the tenants that have a session

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, name: SessionName) -> _Times | None:
        return self._sessions.get(name)

    def values(self) -> Iterable[_Times]:
        return self._sessions.values()

    def crowded_out_by(self, name: SessionName) -> SessionName | None:
        """The session that makes room for this one, which the caller then drops; None if there is room."""
        if name in self._sessions or len(self._sessions) < self._sessions_max:
            return None
        # A session of the tenant that has most leaves, or of this one: a tenant's many sessions do not displace
        # another's few.
        counts = self._tenant_sessions
        crowded = max(counts, key=lambda one: (counts[one], one == name[0]))
        return next(other for other in self._sessions if other[0] == crowded)

    def use(self, name: SessionName, now: float) -> _Times:
        """The session, as the most recently used one."""
        session = self._sessions.pop(name, None)
        if session is None:
            habits = self._habits.setdefault(name[0], Habits())
            habits.begun()
            session = self._make(name[0], habits)
            session.used_at = now
            self._tenant_sessions[name[0]] += 1
        self._sessions[name] = session
        return session

    def drop(self, name: SessionName) -> _Times:
        session = self._sessions.pop(name)
        self._tenant_sessions[name[0]] -= 1
        if not self._tenant_sessions[name[0]]:
            del self._tenant_sessions[name[0]]
            del self._habits[name[0]]
        return session


class SessionUse(NamedTuple):
    """A use of chunks by a request of a session, in the order of the prefix, and when the session uses them again.

    Attributes:
        session: the hash of its name, eight bytes; unique within the tenant.
        ended: the session does not use them again.
        due_seconds: from now until it does; None: unknown.
        late_seconds: from now until it is late; None: its request has not ended yet.
    """

    tenant: bytes
    session: bytes
    keys: Sequence[bytes]
    ended: bool
    due_seconds: float | None
    late_seconds: float | None


class SessionFollower:
    """The sessions whose requests one process serves, for a tier that several processes share."""

    def __init__(self, sessions_max: int = SESSIONS_MAX) -> None:
        self._sessions: SessionTable[SessionTimes] = SessionTable(SessionTimes, sessions_max)

    def begin_request(self, tenant: bytes, hint: SessionHint, now: float) -> None:
        self._use(tenant, hint, now).begin_request(hint.return_seconds, now)

    def use(self, tenant: bytes, hint: SessionHint, keys: Sequence[bytes], now: float) -> SessionUse:
        """A request of the session, under way, uses these chunks."""
        session = self._use(tenant, hint, now)
        session.used(now)
        return _use_of(session, hint, tuple(keys), now, ended=False)  # a list may grow before it is taken in

    def end_request(self, tenant: bytes, hint: SessionHint, now: float) -> SessionUse:
        session = self._use(tenant, hint, now)
        session.end_request(now)
        ended = hint.ended and not session.running
        if ended:
            self._sessions.drop((tenant, hint.session))
        return _use_of(session, hint, (), now, ended=ended)

    def is_expected(self, tenant: bytes, hint: SessionHint) -> bool:
        """Whether the session is expected back after the request that says this."""
        session = self._sessions.get((tenant, hint.session))
        return session is not None and session.due_at is not None and not hint.ended

    def _use(self, tenant: bytes, hint: SessionHint, now: float) -> SessionTimes:
        name = tenant, hint.session
        crowded = self._sessions.crowded_out_by(name)
        if crowded is not None:
            self._sessions.drop(crowded)
        return self._sessions.use(name, now)


def session_tag(hint: SessionHint) -> bytes:
    """Eight bytes that stand for the session's name within its tenant."""
    return xxhash.xxh3_64_digest(hint.session)


def _use_of(session: SessionTimes, hint: SessionHint, keys: Sequence[bytes], now: float, *, ended: bool) -> SessionUse:
    due = None if session.due_at is None else session.due_at - now
    late = None if math.isinf(session.late_at) else session.late_at - now
    return SessionUse(session.tenant, session_tag(hint), keys, ended, due, late)
