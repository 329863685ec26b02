"""Keeps the answers of lookups, and tells how long they stay valid.

Three mechanisms, from the shared tier to the waiting request:

    PresenceIndex   per chunk: what the shared tier answered, valid for a fixed time.
    ChangeLog       which chunks (or requests) an answer may have changed for, in order; a reader keeps a position.
    PrefixMemo      per prefix: the last answer, valid until a time, and while no change concerns its chunks or its
                    request. A version stamp tells in one comparison that nothing has changed since the last check.

Pure: no I/O, no lock, no clock; the time is an argument. Everything here belongs to one thread, the scheduler's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, repeat
from operator import contains, not_, setitem
from typing import Generic, NamedTuple, TypeVar

LOG_KEYS_MAX = 32_768
PRESENT_SECONDS = 30.0  # another engine may evict; a wrong "present" costs one failed load
ABSENT_SECONDS = 5.0  # another engine may store; a wrong "absent" costs one recomputation
PRESENCE_KEYS_MAX = 200_000  # about 30 MB with 36-byte keys
_SHARDS = 128  # a power of two; each grows in 0.1 ms at most, and not all of them at the same time
_NEVER_CURRENT = -1  # as a stamp: always check

_Key = TypeVar("_Key", bound=Hashable)
_Condition = TypeVar("_Condition")


class ChangeLog(Generic[_Key]):
    """The latest changed keys in order. Readers keep a position and ask what came after it.

    position: of the next change.
    """

    def __init__(self, keys_max: int = LOG_KEYS_MAX) -> None:
        self._keys_max = keys_max
        self._keys: list[_Key] = []
        self._begin = 0  # the position of the first key still in the log
        self.position = 0

    def add(self, keys: Iterable[_Key]) -> None:
        """Append keys whose answer may have changed; drops the older half of a full log."""
        self._keys.extend(keys)
        self.position = self._begin + len(self._keys)
        if len(self._keys) > self._keys_max:
            dropped = len(self._keys) - self._keys_max // 2
            del self._keys[:dropped]
            self._begin += dropped

    def add_all(self) -> None:
        """Every answer may have changed."""
        self.position = self._begin = self.position + 1
        self._keys.clear()

    def since(self, position: int) -> list[_Key] | None:
        """The keys added since `position`; None when the log no longer reaches back so far: perhaps all."""
        return None if position < self._begin else self._keys[position - self._begin :]


class PresenceIndex:
    """A shared tier's answers about single chunks, each valid for a fixed time; the oldest key is evicted.

    The keys are spread over many small dicts. Growing one dict of 200,000 keys takes 10 ms, and finding its oldest key
    means passing over all keys that were deleted before it.
    """

    def __init__(
        self,
        *,
        keys_max: int = PRESENCE_KEYS_MAX,
        present_seconds: float = PRESENT_SECONDS,
        absent_seconds: float = ABSENT_SECONDS,
    ) -> None:
        self._keys_max = keys_max
        self._present_seconds = present_seconds
        self._absent_seconds = absent_seconds
        # When an answer expires; negative for "absent".
        self._shards: tuple[dict[bytes, float], ...]
        self._order: deque[bytes]  # every key once
        self.clear()

    def __len__(self) -> int:
        return len(self._order)

    def get(self, key: bytes, now: float) -> bool | None:
        """Return whether the key is present, or None if there is no valid answer at ``now``."""
        expiry = self._shards[hash(key) % _SHARDS].get(key)
        return None if expiry is None or now >= abs(expiry) else expiry > 0

    def get_many(self, keys: Iterable[bytes]) -> list[float | None]:
        """Return for each key when its answer expires, negative if the answer is "absent", or None; the caller
        compares it with the time."""
        keys = list(keys)
        return list(map(dict.get, self._shards_of(keys), keys))

    def _shards_of(self, keys: Iterable[bytes]) -> Iterator[dict[bytes, float]]:
        """Iterate over the dicts that the keys are in, without a loop of Python's."""
        return map(self._shards.__getitem__, map((_SHARDS - 1).__and__, map(hash, keys)))

    def present_of(self, keys: Collection[bytes], now: float) -> set[bytes]:
        """Return those of ``keys`` whose valid answer at ``now`` is "present"."""
        expiries = self.get_many(keys)
        return {key for key, expiry in zip(keys, expiries, strict=True) if expiry is not None and expiry > now}

    def absent_until(self, key: bytes) -> float:
        """Return when the answer "absent" for the key expires. Raises KeyError if the key has no answer."""
        return -self._shards[hash(key) % _SHARDS][key]

    def put(self, key: bytes, present: bool, now: float) -> None:
        """Record the answer for one key, as of ``now``."""
        self.put_many((key,), present, now)

    def put_many(self, keys: Collection[bytes], present: bool, now: float) -> None:
        """Record the same answer for all of ``keys``, as of ``now``."""
        order = self._order
        expiry = now + self._present_seconds if present else -(now + self._absent_seconds)
        unique = dict.fromkeys(keys)
        shards = list(self._shards_of(unique))
        order.extend(compress(unique, map(not_, map(contains, shards, unique))))
        deque(map(setitem, shards, unique, repeat(expiry)), maxlen=0)
        while len(order) > self._keys_max:
            oldest = order.popleft()
            del self._shards[hash(oldest) % _SHARDS][oldest]

    def clear(self) -> None:
        self._shards = tuple({} for _ in range(_SHARDS))
        self._order = deque()


@dataclass(slots=True)
class PrefixAnswer(Generic[_Key, _Condition]):
    """The last answer about one prefix of one request, what it rests on, and what was derived from it."""

    keys: Sequence[_Key]
    chunks: int | None  # ready from the first on; None while more are on their way
    valid_until: float
    condition: _Condition | None  # None: the answer rests on none
    positions: tuple[int, int]  # in the logs of chunks and of requests
    stamp: int  # of the memo when the answer was last found current
    ready: int = 0  # leading chunks in the CPU tier
    expected: int = 0  # leading chunks that are there or being promoted; 0 while some are still looked up
    members: frozenset[_Key] | None = None  # of `keys`, once needed
    # Kept for the scheduler half: the request's tokens when it asked, and what vLLM was answered. It is dropped when
    # it follows from anything but this answer, and with it.
    computed_tokens: int = -1
    total_tokens: int = -1
    matched: tuple[int | None, bool] | None = None


class Step(NamedTuple, Generic[_Condition]):
    """The facts that all answers of one scheduler step share. :meth:`PrefixMemo.begin_step` makes it."""

    now: float
    condition: _Condition  # of requests in general


class _Changed(NamedTuple, Generic[_Key]):
    chunks: frozenset[_Key]
    requests: frozenset[str]


class PrefixMemo(Generic[_Key, _Condition]):
    """Tells whether an answer about a prefix is still current, in most cases by comparing two integers.

    Attributes:
        stamp: The version of everything but the clock. An answer with this stamp is current until its `valid_until`.
    """

    def __init__(
        self,
        chunk_log: ChangeLog[_Key],
        request_log: ChangeLog[str],
        condition_of: Callable[[str, Step[_Condition]], _Condition],
    ) -> None:
        """
        Args:
            chunk_log: The chunks whose state in the CPU tier has changed.
            request_log: The requests for which the shared tier has an answer.
            condition_of: Returns the condition of one request in a step: the general one, or one of its own, which
                may change as time passes.
        """
        self._chunk_log = chunk_log
        self._request_log = request_log
        self._condition_of = condition_of
        self.stamp = 0
        self._condition: _Condition | None = None  # of requests in general
        self._positions = chunk_log.position, request_log.position
        # Keys are earlier positions; requests that have waited since the same step share one entry. None: perhaps all
        # have changed.
        self._changed_since: dict[tuple[int, int], _Changed[_Key] | None] = {}

    def begin_step(self, now: float, condition: _Condition) -> Step[_Condition]:
        """Return a step with this time and general condition, and read what has changed since the last one.

        Equal conditions of consecutive steps are one object.
        """
        if condition is not self._condition:
            if self._condition is None or condition != self._condition:
                self._condition = condition
                self.stamp += 1
            else:
                condition = self._condition
        self._read_positions()
        return Step(now, condition)

    def record(
        self,
        keys: Sequence[_Key],
        chunks: int | None,
        valid_until: float,
        condition: _Condition | None,
        step: Step[_Condition],
        *,
        ready: int = 0,
        expected: int = 0,
    ) -> PrefixAnswer[_Key, _Condition]:
        """Return a PrefixAnswer that rests on the present state, which includes what the lookup itself has changed."""
        self._read_positions()
        stamp = self.stamp if condition is None or condition is step.condition else _NEVER_CURRENT
        return PrefixAnswer(keys, chunks, valid_until, condition, self._positions, stamp, ready, expected)

    def is_current(self, answer: PrefixAnswer[_Key, _Condition], request_id: str, step: Step[_Condition]) -> bool:
        """Whether a lookup in this step would return `answer` again.

        Callers that ask often may first compare ``answer.stamp == memo.stamp and step.now < answer.valid_until``.
        """
        if step.now >= answer.valid_until:
            return False
        if answer.stamp == self.stamp:
            return True
        if answer.positions != self._positions and not self._untouched(answer, request_id):
            return False
        if answer.condition is not None and answer.condition is not step.condition:
            condition = self._condition_of(request_id, step)
            if answer.condition != condition:
                return False
            if condition is not step.condition:
                return True  # the request's own condition: checked at every step
            answer.condition = condition
        answer.stamp = self.stamp
        return True

    def _read_positions(self) -> None:
        positions = self._chunk_log.position, self._request_log.position
        if positions != self._positions:
            self._positions = positions
            self.stamp += 1
            self._changed_since.clear()

    def _untouched(self, answer: PrefixAnswer[_Key, _Condition], request_id: str) -> bool:
        """Whether no change since the answer's positions concerns it. If so, move it to the present positions."""
        since = answer.positions
        if since in self._changed_since:
            changed = self._changed_since[since]
        else:
            chunks, requests = self._chunk_log.since(since[0]), self._request_log.since(since[1])
            changed = None
            if chunks is not None and requests is not None:
                changed = _Changed(frozenset(chunks), frozenset(requests))
            self._changed_since[since] = changed
        if changed is None or request_id in changed.requests:
            return False
        if changed.chunks:
            if answer.members is None:
                answer.members = frozenset(answer.keys)
            if not answer.members.isdisjoint(changed.chunks):
                return False
        answer.positions = self._positions
        return True
