"""Chunks that clients asked to keep, and until when: they leave a tier last, within each tenant's share.

- A chunk is held until its time has passed; each request that asks for it again renews it.
- A tenant holds its share of the tier at most. Beyond it, what has expired is given up first, then what was renewed
  least recently, the end of a prefix before its beginning.
- All tenants together hold TOTAL_SHARE_MAX of the tier. Beyond it, the tenant with the most holds gives up its own, so
  no tenant that holds less loses one.

A hold pins nothing: if nothing else can leave, held chunks do. It outlives a chunk's eviction, so one that is stored or
promoted again before its time is held again.

Pure: no clock, no lock; the time is an argument, in seconds. Everything here belongs to one thread, the scheduler's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, KeysView, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

TOTAL_SHARE_MAX = 0.5  # of the tier: the rest is there for tenants that ask for nothing
SPANS_MAX = 8  # lengths of holds that one tenant has at a time; one more counts as the next shorter
TENANTS_MAX = 256  # that hold chunks at a time; one more holds nothing until another's holds have expired

_Key = TypeVar("_Key", bound=Hashable)


class RetentionMark(NamedTuple):
    """Time for which a prompt is kept, from its first token up to token number `tokens`; None: all of it."""

    tokens: int | None
    seconds: float


class RetentionHint(NamedTuple):
    """A request's hint about its prompt's retention. share: of a tier, the most that its tenant may hold."""

    marks: tuple[RetentionMark, ...]
    share: float


@dataclass(slots=True, eq=False)
class _Span(Generic[_Key]):
    """Holds of one tenant and one length, so the first to expire is the one that was renewed least recently."""

    tenant: _Tenant[_Key]
    seconds: float
    until: OrderedDict[_Key, float] = field(default_factory=OrderedDict)


@dataclass(slots=True, eq=False)
class _Tenant(Generic[_Key]):
    name: bytes
    chunks: int = 0  # that it holds, expired ones included
    spans: dict[float, _Span[_Key]] = field(default_factory=dict)


class Holds(Generic[_Key]):
    """The held chunks of a tier that has room for `chunks`."""

    def __init__(self, chunks: int, ended: Callable[[_Key], object] | None = None) -> None:
        """ended: called with each chunk whose hold ends in any other way than by :meth:`clear`."""
        self._chunks = chunks
        self._ended = ended
        self._chunks_max = int(chunks * TOTAL_SHARE_MAX)
        self._spans: dict[_Key, _Span[_Key]] = {}  # by chunk
        self._tenants: dict[bytes, _Tenant[_Key]] = {}
        self.keys: KeysView[_Key] = self._spans.keys()  # held, or until a moment ago

    def resize(self, chunks: int, now: float) -> None:
        """Set the number of chunks for which the tier has room. Tenants' shares follow with their next requests."""
        self._chunks, self._chunks_max = chunks, int(chunks * TOTAL_SHARE_MAX)
        while len(self._spans) > self._chunks_max:
            self._give_up_one(self._giving(next(iter(self._tenants.values())), now), now)

    def by_tenant(self, now: float) -> Iterator[tuple[bytes, list[_Key]]]:
        """The held chunks of each tenant."""
        self.expire(now)
        for owner in self._tenants.values():
            yield owner.name, [key for span in owner.spans.values() for key in span.until]

    def __len__(self) -> int:
        """Chunks that are held, or were until a moment ago."""
        return len(self._spans)

    def is_held(self, key: _Key, now: float) -> bool:
        return now < self.held_until(key)

    def held_until(self, key: _Key) -> float:
        """Return when the hold of a chunk ends or has ended; 0.0 if it was never held."""
        span = self._spans.get(key)
        return 0.0 if span is None else span.until[key]

    def held_of(self, keys: Collection[_Key], now: float) -> set[_Key]:
        """Return those of the keys that are held."""
        if not self._spans or self._spans.keys().isdisjoint(keys):  # most batches, without a loop
            return set()
        return {key for key in keys if self.is_held(key, now)}

    def hold(self, tenant: bytes, share: float, seconds: float, keys: Sequence[_Key], now: float) -> None:
        """Keep these chunks, in the order of the prefix, for so long.

        Those beyond the tenant's share are not held, and a chunk that is held for longer stays as it is.
        """
        limit = min(int(self._chunks * share), self._chunks_max)
        if limit <= 0 or seconds <= 0 or not keys:
            return
        owner = self._tenants.get(tenant)
        if owner is None:
            if len(self._tenants) >= TENANTS_MAX:
                self.expire(now)
                if len(self._tenants) >= TENANTS_MAX:
                    return
            owner = self._tenants[tenant] = _Tenant(tenant)
        span = _span_for(owner, seconds)
        until = now + span.seconds
        for key in reversed(keys[:limit]):  # the beginning is renewed last, and given up last
            held = self._spans.get(key)
            if held is not None:
                if held.until[key] > until or held.tenant is not owner:
                    continue
                self._give_up(held, key)
            span.until[key] = until
            self._spans[key] = span
            owner.chunks += 1
        while owner.chunks > limit:
            self._give_up_one(owner, now)
        while len(self._spans) > self._chunks_max:
            self._give_up_one(self._giving(owner, now), now)
        self._forget_idle(owner)

    def expire(self, now: float) -> None:
        """Forget what has expired. Expired holds have no effect even before this call, except on `len`."""
        if not self._spans:
            return
        for owner in list(self._tenants.values()):
            for span, key in list(_expired(owner, now)):
                self._give_up(span, key)
            self._forget_idle(owner)

    def clear(self) -> None:
        """The tier is empty, and what it held is of no use any more."""
        self._spans.clear()
        self._tenants.clear()

    def _giving(self, asking: _Tenant[_Key], now: float) -> _Tenant[_Key]:
        """The tenant whose hold ends because all tenants together hold too much: one with an expired hold, or the one
        with the most holds."""
        for owner in self._tenants.values():
            if next(_expired(owner, now), None) is not None:
                return owner
        return max(self._tenants.values(), key=lambda owner: (owner.chunks, owner is asking))

    def _give_up_one(self, owner: _Tenant[_Key], now: float) -> None:
        expired = next(_expired(owner, now), None)
        if expired is not None:
            self._give_up(*expired)
        else:
            span = min((span for span in owner.spans.values() if span.until), key=_renewed_at)
            self._give_up(span, next(iter(span.until)))
        self._forget_idle(owner)

    def _give_up(self, span: _Span[_Key], key: _Key) -> None:
        del span.until[key]
        del self._spans[key]
        span.tenant.chunks -= 1
        if self._ended is not None:
            self._ended(key)

    def _forget_idle(self, owner: _Tenant[_Key]) -> None:
        for seconds in [seconds for seconds, span in owner.spans.items() if not span.until]:
            del owner.spans[seconds]
        if not owner.spans:
            self._tenants.pop(owner.name, None)


def _span_for(owner: _Tenant[_Key], seconds: float) -> _Span[_Key]:
    """The tenant's holds of this length, or of the next shorter if it has SPANS_MAX others."""
    spans = owner.spans
    if seconds not in spans and len(spans) >= SPANS_MAX:
        seconds = max((other for other in spans if other < seconds), default=min(spans))
    span = spans.get(seconds)
    if span is None:
        span = spans[seconds] = _Span(owner, seconds)
    return span


def _renewed_at(span: _Span[_Key]) -> float:
    return next(iter(span.until.values())) - span.seconds


def _expired(owner: _Tenant[_Key], now: float) -> Iterator[tuple[_Span[_Key], _Key]]:
    for span in owner.spans.values():
        yield from ((span, key) for key in _expired_keys(span.until.items(), now))


def _expired_keys(until: Iterable[tuple[_Key, float]], now: float) -> Iterator[_Key]:
    for key, ends_at in until:
        if now < ends_at:
            return
        yield key
