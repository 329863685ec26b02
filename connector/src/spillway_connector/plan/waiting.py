"""Chunks that leave a tier last: those that waiting requests are about to use.

A chunk that was used long ago is the next that LRU evicts, and in a closed loop its session's next request is already
in the queue. So the chunks of requests that wait are kept while others can leave:

- Requests keep chunks in the order of their turns, each from its first chunk on, until `chunks_max` are kept: if
  they do not fit for all, the ones whose turn comes first keep theirs. Chunks that several use count once.
- A tenant whose requests want more keeps an equal share of `chunks_max` at least, whoever came first.
- A request keeps nothing once the caller says that it has ended, or SECONDS_MAX after it began to wait.

A kept chunk is not pinned: if nothing else can leave, the chunk whose request comes last in the queue does.

Which chunks a request keeps is found out when that matters: when a chunk is about to leave, or LOOK_SECONDS after the
request began to wait. A request that ends before costs nothing.

Pure: no clock, no lock; the time is an argument, in seconds. Everything here belongs to one thread, the scheduler's.
The cost of a request is that of its chunks, once when it begins to keep them and once when it ends.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterator, KeysView, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import compress
from typing import Generic, NamedTuple, TypeVar

KEPT_SHARE_MAX = 0.5  # of the tier: the rest is there for what runs, and for other tenants' idle sessions
SECONDS_MAX = 60.0  # as long as the gateway lets a request wait by default
LOOK_SECONDS = 0.1  # how far `kept_count` may be behind; it bounds, too, how many requests one look is at

_Key = TypeVar("_Key", bound=Hashable)


class Turn(NamedTuple):
    """A request's place in the order of turns; the least comes first. number: differs between requests of one
    priority."""

    priority: float
    number: int


class _New(NamedTuple, Generic[_Key]):
    """A request that has begun to wait, and whose chunks were not looked at."""

    tenant: bytes
    turn: Turn
    keys: Sequence[_Key]
    began_at: float


@dataclass(slots=True, eq=False)
class _Waiting(Generic[_Key]):
    """held: positions of the keys that it keeps. position: the index of the first key that it has not looked at."""

    tenant: _Tenant[_Key]
    turn: Turn
    keys: Sequence[_Key]
    ends_at: float
    held: list[int] = field(default_factory=list)
    position: int = 0

    @property
    def is_short(self) -> bool:
        return self.position < len(self.keys)


@dataclass(slots=True, eq=False)
class _Tenant(Generic[_Key]):
    """holding: its requests that keep something. short: its requests that would keep more. Both in order of their
    turns."""

    name: bytes
    requests: int = 0
    chunks: int = 0  # kept
    holding: list[_Waiting[_Key]] = field(default_factory=list)
    short: list[_Waiting[_Key]] = field(default_factory=list)


class WaitingChunks(Generic[_Key]):
    """The requests that wait for what one tier holds.

    chunks_max: how many chunks may be kept. here: a view of the chunks that are in the tier. due_at: before this time,
    `pass_time` has nothing to do. more: begins others that wait; called once, when it matters what is kept.
    """

    def __init__(self, chunks_max: int, here: AbstractSet[_Key]) -> None:
        self._chunks_max = chunks_max
        self._here = here
        self._users: dict[_Key, int] = {}  # by kept chunk: the requests that keep it
        self._waiting: dict[str, _Waiting[_Key]] = {}  # the one that has waited longest first
        self._new: dict[str, _New[_Key]] = {}  # the same, of those that began to wait after them
        self._tenants: dict[bytes, _Tenant[_Key]] = {}
        self.due_at = math.inf
        self.more: Callable[[], None] | None = None

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._waiting) + len(self._new)

    def __contains__(self, request: str) -> bool:
        return request in self._waiting or request in self._new

    @property
    def kept(self) -> KeysView[_Key]:
        """The chunks that leave last."""
        self._look()
        return self._users.keys()

    @property
    def kept_count(self) -> int:
        """Number of chunks that are kept, of the requests that were looked at: a figure to report in each step."""
        return len(self._users)

    def begin(self, request: str, tenant: bytes, turn: Turn, keys: Sequence[_Key], now: float) -> None:
        """A request waits that will use these chunks, in the order of its prefix; those not in the tier are ignored.

        A request that waits already starts over.
        """
        self.end(request)
        self._new[request] = _New(tenant, turn, keys, now)
        self.due_at = min(self.due_at, now + LOOK_SECONDS)

    def expect(self, more: Callable[[], None], now: float) -> None:
        """Requests wait that have not begun; at a look, at the latest in LOOK_SECONDS, `more` begins them."""
        self.more = more
        self.due_at = min(self.due_at, now + LOOK_SECONDS)

    def end(self, request: str) -> None:
        """The request has been admitted, has ended or has moved; nothing happens if it does not wait."""
        if self._new.pop(request, None) is not None:
            return
        waiting = self._waiting.pop(request, None)
        if waiting is None:
            return
        self._release(waiting)
        waiting.tenant.requests -= 1
        if not waiting.tenant.requests:
            del self._tenants[waiting.tenant.name]
        self._fill()

    def pass_time(self, now: float) -> None:
        """End those that have waited for SECONDS_MAX; look at all if one has waited for LOOK_SECONDS without a look."""
        if self.more or (self._new and now >= next(iter(self._new.values())).began_at + LOOK_SECONDS):
            self._look()
        while self._waiting:
            request, waiting = next(iter(self._waiting.items()))
            if now < waiting.ends_at:
                break
            self.end(request)
        self.due_at = next((waiting.ends_at for waiting in self._waiting.values()), math.inf)
        if self._new:
            self.due_at = min(self.due_at, next(iter(self._new.values())).began_at + LOOK_SECONDS)

    def last_first(self) -> Iterator[_Key]:
        """The kept chunks, some of them repeatedly, in the order in which they leave if nothing else can."""
        self._look()
        holding = [waiting for tenant in self._tenants.values() for waiting in tenant.holding]
        holding.sort(key=_turn_of, reverse=True)
        for waiting in holding:
            for position in reversed(waiting.held):
                yield waiting.keys[position]

    def clear(self) -> None:
        """The tier is empty: no request keeps anything."""
        self._users.clear()
        self._new.clear()
        self._waiting.clear()
        self._tenants.clear()

    def _look(self) -> None:
        """Have the requests that began to wait since the last look keep what there is of their chunks."""
        if (more := self.more) is not None:
            self.more = None
            more()
        if not self._new:
            return
        for request, new in self._new.items():
            owner = self._tenants.get(new.tenant)
            if owner is None:
                owner = self._tenants[new.tenant] = _Tenant(new.tenant)
            owner.requests += 1
            waiting = _Waiting(owner, new.turn, tuple(dict.fromkeys(new.keys)), new.began_at + SECONDS_MAX)
            self._waiting[request] = waiting
            self._keep(waiting)
        self._new.clear()

    def _keep(self, waiting: _Waiting[_Key]) -> None:
        """Keep as many chunks as there is room for; the request then stands in its tenant's lists."""
        if self._keep_all(waiting):
            return
        keys, users, held, tenant = waiting.keys, self._users, waiting.held, waiting.tenant
        held_before = bool(held)
        position = waiting.position
        while position < len(keys):
            key = keys[position]
            count = users.get(key, 0)
            if not count:
                if key not in self._here:
                    position += 1
                    continue
                if len(users) >= self._chunks_max and not self._make_room(waiting):
                    break
                tenant.chunks += 1
            users[key] = count + 1
            held.append(position)
            position += 1
        waiting.position = position
        if held and not held_before:
            insort(tenant.holding, waiting, key=_turn_of)
        if waiting.is_short:
            _insert(tenant.short, waiting)
        else:
            _remove(tenant.short, waiting)

    def _keep_all(self, waiting: _Waiting[_Key]) -> bool:
        """The usual requests, without a loop: no other request needs its chunks that are here, and they fit.

        False, and nothing has changed, for others.
        """
        keys = waiting.keys
        if waiting.position:
            return False
        are_here = list(map(self._here.__contains__, keys))
        new = dict.fromkeys(compress(keys, are_here), 1)
        if len(self._users) + len(new) > self._chunks_max or not self._users.keys().isdisjoint(new):
            return False
        if new:
            self._users.update(new)
            waiting.tenant.chunks += len(new)
            waiting.held.extend(compress(range(len(keys)), are_here))
            insort(waiting.tenant.holding, waiting, key=_turn_of)
        waiting.position = len(keys)
        _remove(waiting.tenant.short, waiting)
        return True

    def _make_room(self, asking: _Waiting[_Key]) -> bool:
        """Make room for a chunk that this request has a right to, at another request's expense. Returns False if there
        is none."""
        tenant = asking.tenant
        share = self._chunks_max // len(self._tenants)
        while len(self._users) >= self._chunks_max:
            giving = tenant
            if not (tenant.holding and tenant.holding[-1].turn > asking.turn):
                if tenant.chunks >= share:
                    return False
                giving = max(self._tenants.values(), key=_chunks_of)
                if giving.chunks <= share:
                    return False
            self._take_last(giving.holding[-1])
        return True

    def _take_last(self, waiting: _Waiting[_Key]) -> None:
        """Take the last of the chunks that a request keeps."""
        waiting.position = waiting.held.pop()
        self._leave(waiting, waiting.keys[waiting.position])
        if not waiting.held:
            _remove(waiting.tenant.holding, waiting)
        _insert(waiting.tenant.short, waiting)

    def _release(self, waiting: _Waiting[_Key]) -> None:
        keys = list(map(waiting.keys.__getitem__, waiting.held))
        users = list(map(self._users.pop, keys))
        if max(users, default=0) > 1:  # other requests keep some of them
            self._users.update((key, count - 1) for key, count in zip(keys, users, strict=True) if count > 1)
        waiting.tenant.chunks -= users.count(1)
        waiting.held.clear()
        _remove(waiting.tenant.holding, waiting)
        _remove(waiting.tenant.short, waiting)

    def _leave(self, waiting: _Waiting[_Key], key: _Key) -> None:
        left = self._users[key] - 1
        if left:
            self._users[key] = left
        else:
            del self._users[key]
            waiting.tenant.chunks -= 1

    def _fill(self) -> None:
        """Give the free share of the tier to the requests that want more, in the order of their turns."""
        wanting = sorted((tenant.short[0].turn, tenant.name) for tenant in self._tenants.values() if tenant.short)
        for _, name in wanting:
            short = self._tenants[name].short
            while short:
                waiting = short[0]
                self._keep(waiting)
                if waiting.is_short:
                    break


def _turn_of(waiting: _Waiting[_Key]) -> Turn:
    return waiting.turn


def _chunks_of(tenant: _Tenant[_Key]) -> int:
    return tenant.chunks


def _insert(ordered: list[_Waiting[_Key]], waiting: _Waiting[_Key]) -> None:
    at = bisect_left(ordered, waiting.turn, key=_turn_of)
    if at == len(ordered) or ordered[at] is not waiting:
        ordered.insert(at, waiting)


def _remove(ordered: list[_Waiting[_Key]], waiting: _Waiting[_Key]) -> None:
    at = bisect_left(ordered, waiting.turn, key=_turn_of)
    if at < len(ordered) and ordered[at] is waiting:
        del ordered[at]


def leading_count(count: int, is_held: Callable[[int], bool]) -> int:
    """Count the chunks of a prefix that are held, of `count` and from the first on, by a few questions.

    The end of a prefix leaves every tier before its beginning. If one has holes, the answer is a guess.
    """
    low, high = 0, count
    if not count or is_held(count - 1):
        return count
    high -= 1
    while low < high:
        middle = (low + high) // 2
        if is_held(middle):
            low = middle + 1
        else:
            high = middle
    return low
