"""Announcements of an engine to routers about a tier that others share: which engines can load from it, and which
chunks it holds.

A chunk is announced once, by the engine that stores it, when the store begins: an engine without requests takes no step
and could not announce its end. A store that fails is taken back. Chunks of a request that another engine goes on with
are announced when their stores have ended, for which the engine steps on (engine/scheduler/half.py): a load that comes
too early would find none of them. Removals are seen lazily, whoever made them (another engine's eviction, a quota, a
server's maxmemory, a purge): a lookup or load that misses announces the first chunk that is gone, where a prefix ends.
The engine whose lookup finds a chunk announces it, at most once in REPEAT_SECONDS. So a gateway that has just started,
or has missed events, learns which chunks are in use.

All of it belongs to the scheduler thread, is bounded, and costs a step without news two comparisons.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from spillway_connector.tiers.tier import Clock

REPEAT_SECONDS = 300.0  # between two announcements of one chunk that is found, or of one that is missed
CONTRADICTED_SECONDS = 10.0  # after which what this engine has said has reached everyone
JOIN_SECONDS = 60.0  # without an announcement, after which this engine's use of the store is announced again
PENDING_KEYS_MAX = 65_536  # not taken yet; the oldest is dropped
KNOWN_KEYS_MAX = 65_536  # of either kind, to announce nothing twice; some 10 MB
TAKEN_KEYS_MAX = 1024  # per step


class Announcement(NamedTuple):
    """``keys`` are in the store, or no longer. Without keys: this engine loads from the store, or no longer does."""

    store_id: bytes
    removed: bool
    keys: tuple[bytes, ...]


class _Recent:
    """Times at which keys were announced last, for a bounded number of them."""

    def __init__(self) -> None:
        self._at: dict[bytes, float] = {}

    def add(self, key: bytes, now: float) -> None:
        self._at.pop(key, None)
        self._at[key] = now
        if len(self._at) > KNOWN_KEYS_MAX:
            del self._at[next(iter(self._at))]

    def holds(self, key: bytes, now: float, seconds: float = REPEAT_SECONDS) -> bool:
        return now - self._at.get(key, float("-inf")) < seconds

    def drop(self, key: bytes) -> bool:
        return self._at.pop(key, None) is not None

    def clear(self) -> None:
        self._at.clear()


class Announcements:
    """The announcements of one engine about one tier. dropped: chunks that were never announced for want of room."""

    def __init__(self, clock: Clock) -> None:
        self.dropped = 0
        self._clock = clock
        self._present = _Recent()
        self._absent = _Recent()
        self._pending: dict[bytes, bool] = {}  # whether it is gone; in the order of the last change
        self._by_others: dict[bytes, tuple[bool, float]] = {}  # what others have changed lately: whether it is gone
        self._joined: bytes | None = None  # the store that was announced as this engine's
        self._left: bytes | None = None  # the store of another object, to be announced as left
        self._last_store: bytes | None = None
        self._said_at = float("-inf")

    def successor(self) -> Announcements:
        """Make the object that announces another store in place of this one, which this engine leaves."""
        successor = Announcements(self._clock)
        successor._left, self._joined = self._joined or self._left, None
        return successor

    def storing(self, keys: Iterable[bytes]) -> None:
        """Note that this process has begun to store these keys, or has stored them."""
        now = self._clock()
        for key in keys:
            self._say_present(key, now)

    def found(self, keys: Iterable[bytes]) -> None:
        """The tier has answered that it holds them."""
        now = self._clock()
        for key in keys:
            if not self._present.holds(key, now):
                self._say_present(key, now)

    def missed(self, key: bytes) -> None:
        """The tier has answered that it does not hold it."""
        now = self._clock()
        known = self._present.drop(key)
        if known or not self._absent.holds(key, now):
            self._absent.add(key, now)
            self._say(key, gone=True)

    def failed(self, keys: Iterable[bytes]) -> None:
        """Stores that were begun and did not succeed."""
        for key in keys:
            if self._present.drop(key):
                self._say(key, gone=True)

    def removed(self, keys: Iterable[bytes]) -> None:
        """Note that this process has removed these keys."""
        now = self._clock()
        for key in keys:
            self._present.drop(key)
            self._absent.add(key, now)
            self._say(key, gone=True)

    def lost(self, keys: Iterable[bytes]) -> None:
        """Note that another process has removed these chunks."""
        self._changed(keys, gone=True)

    def gained(self, keys: Iterable[bytes]) -> None:
        """Note that another process has stored these chunks."""
        self._changed(keys, gone=False)

    def _changed(self, keys: Iterable[bytes], *, gone: bool) -> None:
        """Note what another process has changed and announces. Its events and this engine's come by two ways:
        if this engine has said the opposite a short time ago, it says last what is true."""
        now = self._clock()
        said = self._present if gone else self._absent
        contradicted: list[bytes] = []
        for key in keys:
            self._by_others.pop(key, None)
            self._by_others[key] = gone, now
            if said.holds(key, now, CONTRADICTED_SECONDS):
                contradicted.append(key)
        (self.removed if gone else self.storing)(contradicted)
        while self._by_others:
            key = next(iter(self._by_others))  # the oldest
            if now - self._by_others[key][1] < CONTRADICTED_SECONDS and len(self._by_others) <= KNOWN_KEYS_MAX:
                break
            del self._by_others[key]

    def others_ended(self) -> None:
        """One of the others was killed, perhaps before it could say what it had changed last."""
        by_others, self._by_others = self._by_others, {}
        now = self._clock()
        for key, (gone, at) in by_others.items():
            if now - at < CONTRADICTED_SECONDS:
                (self.removed if gone else self.storing)((key,))

    @property
    def introduced(self) -> bool:
        """Whether it was announced from which store this engine loads."""
        return self._joined is not None

    def take(self, store_id: bytes | None, usable: bool) -> list[Announcement]:
        """Return the announcements that are due now, in order; called once per step.

        store_id: None while unknown. usable: whether this engine loads from the store at present. While it does not,
        what is known of the store's contents waits.
        """
        wanted = store_id if usable else None
        has_news = self._left is not None or wanted != self._joined or bool(self._pending)
        if not has_news and (wanted is None or not self._silent()):
            return []
        taken: list[Announcement] = []
        if self._left is not None:
            taken.append(Announcement(self._left, True, ()))
            self._left = None
        if self._joined is not None and self._joined != wanted:
            taken.append(Announcement(self._joined, True, ()))
        if wanted is not None:
            if self._last_store not in (None, wanted):  # another directory under the same path, for instance
                self._pending.clear()
                self._present.clear()
                self._absent.clear()
            self._last_store = wanted
            if self._joined != wanted or self._silent():
                taken.append(Announcement(wanted, False, ()))
            taken += self._take_pending(wanted)
            if taken:
                self._said_at = self._clock()
        self._joined = wanted
        return taken

    def _silent(self) -> bool:
        return self._clock() - self._said_at >= JOIN_SECONDS

    def _take_pending(self, store_id: bytes) -> list[Announcement]:
        """Return the announcements in order. Each run of stored or removed chunks is one announcement."""
        runs: list[tuple[bool, list[bytes]]] = []
        for key, gone in islice(self._pending.items(), TAKEN_KEYS_MAX):
            if not runs or runs[-1][0] is not gone:
                runs.append((gone, []))
            runs[-1][1].append(key)
        for _, keys in runs:
            for key in keys:
                del self._pending[key]
        return [Announcement(store_id, gone, tuple(keys)) for gone, keys in runs]

    def _say_present(self, key: bytes, now: float) -> None:
        self._absent.drop(key)
        self._present.add(key, now)
        self._say(key, gone=False)

    def _say(self, key: bytes, *, gone: bool) -> None:
        self._pending.pop(key, None)
        self._pending[key] = gone
        if len(self._pending) > PENDING_KEYS_MAX:
            oldest = next(iter(self._pending))
            del self._pending[oldest]
            self._present.drop(oldest)  # so that it is announced when it is found
            self._absent.drop(oldest)
            self.dropped += 1
