"""Estimates of when sessions come back, from what requests say of their session and from its earlier pauses.

A session is expected after the seconds that its client announces, or else after its own usual pause once it has come
back. If such pauses are chance, the tenant's pauses say how long an idle session stays away (plan/pauses.py), and the
longer it has been idle, the likelier it has ended. A session has ended if its client says so, or if it is late by
several mean deviations of its pauses. It has probably ended if most of its tenant's sessions ended after as many
requests: agents stop at a number of steps, and many questions are asked once.

Pure: no clock, no lock; the time is an argument, in seconds. Everything here belongs to one thread, the scheduler's.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import xxhash

from spillway_connector.plan.pauses import OwnPauses, PauseLengths

SESSIONS_MAX = 1024  # followed at a time; an eviction from the CPU tier looks at each, in up to a millisecond
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
_PAUSES_MAX = 4.0  # usual ones of the tenant, as which one pause counts at most among its habits
_SESSIONS_COUNTED = 128  # of a tenant; then older ones count half
# Sessions of a tenant rarely go on after a number of requests if fewer than this share of them did. Until some have
# ended there, two that went on are assumed.
_RARE_SHARE = 1 / 3
# The mean difference between a pause and its session's usual one, as a share of the longer. Up to the first value the
# pauses are regular. From the second on their lengths are chance: when a session comes back does not depend on how long
# it has been idle. Two exponential pauses differ by 2 - 2 ln 2 = 0.61.
_REGULAR_DIFFERENCE, _CHANCE_DIFFERENCE = 0.2, 0.5
_DIFFERENCES_COUNTED = 64  # of a tenant; the mean follows the last ones
_ASSUMED_REGULAR = 4  # pauses, before any was seen
_IDLE_PAUSES_MAX = 40.0  # usual ones; a session that has been idle for longer is gone anyway
_ASSUMED_RETURNS = 2
_IDLE_COUNTED = 128  # sessions of a tenant that are waited for at a time; of the others only those that go on count
_REQUESTS_COUNTED = 64  # of a session; those that follow count as the last of these


def expected_at(due_at: float, late_at: float, now: float) -> float:
    """Return when an idle session is expected back, as known now; infinity if it has ended.

    The longer a session is overdue, the later it is expected: it may have ended without saying so, whatever its client
    announced before.

    Args:
        due_at: when it was expected as its last request ended.
        late_at: when it has ended without saying so.
    """
    if now > late_at:
        return math.inf
    return due_at if now <= due_at else now + _OVERDUE_FACTOR * (now - due_at)


class SessionHint(NamedTuple):
    """A request's hint about its session. session: unique within the tenant. ended: this is its last request.
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
    pauses: int = 0  # of as many sessions as are counted
    chance: float = 0.0  # how much of a pause is chance; 0: nothing, the pauses of a session are alike; 1: all
    lengths: PauseLengths = field(default_factory=PauseLengths)
    _differences: int = _ASSUMED_REGULAR
    _difference: float = 0.0  # the mean of a pause from the session's usual one, as a share of the longer
    # Number of requests that a session has had in one go -> how many sessions went on after them, and how many were
    # gone.
    _went_on: Counter[int] = field(default_factory=Counter)
    _gone: Counter[int] = field(default_factory=Counter)
    _idle: deque[tuple[SessionTimes, int]] = field(default_factory=deque)

    def begun(self) -> None:
        self.sessions += 1
        if self.sessions >= _SESSIONS_COUNTED:
            self.sessions //= 2
            self.came_back //= 2
            self.pauses //= 2

    def differed(self, pause: float, usual: float) -> None:
        """Count how far a session's pause was from its usual one."""
        if (longer := max(pause, usual)) > 0:
            self._differences = min(self._differences + 1, _DIFFERENCES_COUNTED)
            self._difference += (abs(pause - usual) / longer - self._difference) / self._differences
            share = (self._difference - _REGULAR_DIFFERENCE) / (_CHANCE_DIFFERENCE - _REGULAR_DIFFERENCE)
            self.chance = min(1.0, max(0.0, share))

    def return_seconds(self, own: OwnPauses, usual_pause: float, idle_seconds: float) -> float:
        """Return the time for which a session whose pauses are chance stays away, for each one that comes back."""
        ended = self.sessions / max(1, self.pauses)  # for each that came back, at the end of a request
        if not self.lengths.is_exponential:
            return self.lengths.return_seconds(own, idle_seconds, ended)
        pause = usual_pause if self.pause is None else self.pause
        # A session's own last pauses say little, unless it is of another kind than the others.
        pause = min(max(pause, usual_pause / _PAUSES_MAX), _PAUSES_MAX * usual_pause)
        if pause <= 0:
            return 0.0
        return pause * (1.0 + ended * math.exp(min(idle_seconds / pause, _IDLE_PAUSES_MAX)))

    def paused(self, seconds: float, *, first: bool) -> None:
        self.came_back += first
        self.pauses += 1
        if self.pause is None:
            self.pause = seconds
        else:  # one that lasts a day would have all others waited for, long after they are gone
            self.pause += _NEWEST_HABIT_SHARE * (
                min(seconds, max(_GONE_SECONDS_MIN, _PAUSES_MAX * self.pause)) - self.pause
            )

    def went_on(self, session: SessionTimes) -> None:
        """The session begins another request."""
        if session.counted_gone:
            session.counted_gone = False
            self._gone[session.requests] = max(0, self._gone[session.requests] - 1)
        self._count(self._went_on, session.requests)

    def gone(self, session: SessionTimes) -> None:
        """The session has had no other request for so long that it is gone."""
        if not session.counted_gone:
            session.counted_gone = True
            self._count(self._gone, session.requests)

    def idle(self, session: SessionTimes, now: float) -> None:
        """A request of the session has ended, and no other of it runs."""
        while self._idle and self._idle[0][0].is_settled(self._idle[0][1], now):
            other, after = self._idle.popleft()
            if other.requests == after and not other.running:
                self.gone(other)
        if len(self._idle) < _IDLE_COUNTED and session.announced is None:
            self._idle.append((session, session.requests))

    def _count(self, sessions: Counter[int], after: int) -> None:
        sessions[after] += 1
        if self._gone[after] + self._went_on[after] >= _SESSIONS_COUNTED:
            self._gone[after] //= 2
            self._went_on[after] //= 2

    def rarely_go_on(self, requests: int) -> bool:
        """Whether few of the sessions that had so many requests had another."""
        went_on = self._went_on[requests] + _ASSUMED_RETURNS
        return went_on < _RARE_SHARE * (went_on + self._gone[requests])

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
    requests: int = 0  # that have begun since it was last taken for one that has ended, up to a bound
    counted_gone: bool = False  # among the tenant's habits, after the newest of these requests
    begun_at: float = -math.inf
    used_at: float = -math.inf
    usual_pause: float | None = None
    usual_deviation: float = 0.0  # of a pause from the usual one
    usual_duration: float = 0.0  # of a request
    announced: float | None = None
    own_pauses: OwnPauses = field(default_factory=OwnPauses)
    served: bool = False  # a request of it has ended
    waits: bool = False  # its newest request has begun, and used nothing yet
    due_at: float | None = None  # when its next request is expected; None: unknown
    late_at: float = math.inf  # when it has ended without saying so

    def begin_request(self, return_seconds: float | None, now: float) -> None:
        if self.served and not self.running:
            had_ended = now > self.late_at
            self._paused(now - self.used_at)
            if had_ended:  # it begins again: a client may use a name again, or ask all of its questions once more
                self.habits.gone(self)
                self.requests, self.counted_gone = 0, False
            else:
                self.habits.went_on(self)
        self.running += 1
        self.requests = min(self.requests + 1, _REQUESTS_COUNTED)
        self.begun_at = now
        self.announced = None if return_seconds is None or not return_seconds >= 0 else return_seconds
        self.used(now)
        self.waits = True

    def _paused(self, pause: float) -> None:
        usual = self.usual_pause
        self.habits.lengths.add(self.own_pauses, pause)
        self.habits.paused(pause, first=usual is None)
        if usual is None:
            self.usual_pause = pause
            self.usual_deviation = max(pause, _FIRST_DEVIATION_SECONDS_MIN)
        else:
            self.habits.differed(pause, usual)
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
        if not self.running:
            self.habits.idle(self, now)

    def goes_on_as_another(self) -> None:
        """Record that a request of another session begins with everything that this one has used: the session went on
        under another name."""
        if not self.running and self.requests:
            self.habits.went_on(self)
            self.requests = 0

    @property
    def is_over(self) -> bool:
        """Whether the session has probably ended, since few of its tenant's go on after as many requests. False if its
        client has announced another."""
        return not self.running and self.announced is None and self.habits.rarely_go_on(self.requests)

    def is_settled(self, requests: int, now: float) -> bool:
        """Whether it is known that the session went on, or did not, after so many requests."""
        if self.requests != requests or self.running:
            return True
        return self.is_gone(now) if self.due_at is not None else now > self.used_at + LATE_SECONDS_MIN

    def due_from(self, now: float) -> float | None:
        """Return when the session's chunks are used next, as known now; None if that is unknown, infinity if they
        never are. A session whose request waits needs them at once; one whose request runs needs them when the request
        has ended and the pause is over."""
        if self.due_at is None:
            return now if self.waits else None
        if now <= self.due_at and not self.running and not self.habits.chance:
            return self.due_at  # most sessions, and an eviction asks for up to SESSIONS_MAX of them
        if self.waits:
            return now
        pause = self.expected_pause if self.running or self.habits.chance else None
        if self.running and pause is not None:
            due, begins_at, idle = max(self.due_at, now + pause), max(self.due_at - pause, now), 0.0
        else:
            due, begins_at, idle = expected_at(self.due_at, self.late_at, now), now, now - self.used_at
        chance = self.habits.chance
        if not chance or pause is None or self.announced is not None or due == math.inf:
            return due
        by_chance = begins_at + self.habits.return_seconds(self.own_pauses, pause, idle)
        return due + chance * (by_chance - due)

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
