"""Decides which chunks the CPU tier gives to a shared tier, and when.

A tier that keeps up is given every chunk when the CPU tier has received it. If it cannot take everything, waiting
stores would pin the rows that they read, so that the CPU tier would evict others, and the tier would drop what waited
for too long, at random. So stores that are under way hold only a small part of the rows. Everything else waits in the
CPU tier, which can use and evict it like any other chunk. The shared tier gets what the CPU tier gives up next: the
conversation that was used longest ago, from the head of its prefix on, as fast as it takes it. While loads from the
tier do not pay, it is given one such batch now and then, so that a later probe finds something to measure.

What another engine or a client waits for goes at once: what its request computes and, for another engine, what of its
prefix waits already. What a client retains is held in the CPU tier until its turn.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Protocol

from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

from spillway_connector import metrics
from spillway_connector.engine.cpu_tier.duplicates import Duplicates
from spillway_connector.engine.cpu_tier.tier import CpuTier
from spillway_connector.engine.ipc.samples import Samples
from spillway_connector.engine.requests.tenancy import TenantContext, is_awaited, session_of_context
from spillway_connector.engine.shared_tiers.prefix_tier import SharedTierBase

IN_HAND_LEAST = 32  # chunks, so that a prompt of usual length waits for nothing
_IN_HAND_ROWS_PART = 64  # stores under way hold at most one in this number of the CPU tier's rows
_BATCH_CHUNKS = 8  # the least that is given at once, which keeps the jobs few
_CONVERSATIONS_MAX = 1024
_LOOKS_MAX = 4096  # at chunks of conversations, in one step
# In the prefixes of all requests' contexts, which then take 100 MB at most. Chunks that the device holds keep contexts
# of ended requests alive, perhaps thousands. If one has no prefix any more, its chunks go in the order of their stores.
PREFIX_CHUNKS_MAX = 1 << 20
UNPAID_SECONDS = 10.0  # between two batches while loads do not pay

_Name = tuple[bytes, bytes] | str


def _name_of(context: ReqContext) -> _Name:
    """The conversation of a request, or the request alone."""
    named = session_of_context(context)
    return context.req_id if named is None else (named[0], named[1].session)


class Spills:
    """The chunks that wait for one shared tier. Scheduler thread; no method blocks.

    Attributes:
        waiting: The newest request and the chunks of each conversation, the one used longest ago first.

    Args:
        submit: gives chunks to the tier; they are in the CPU tier.
        pays: whether loads from the tier pay now.
        clock: in seconds.
        rows: the number of the CPU tier's rows.
    """

    def __init__(
        self,
        tier: SharedTierBase,
        cpu_tier: CpuTier,
        submit: Callable[[Collection[OffloadKey], ReqContext], None],
        pays: Callable[[], bool],
        clock: Callable[[], float],
        *,
        rows: int,
    ) -> None:
        self._tier, self._cpu_tier = tier, cpu_tier
        self._submit, self._pays, self._clock = submit, pays, clock
        self._rows = rows
        self._in_hand_max = max(IN_HAND_LEAST, rows // _IN_HAND_ROWS_PART)
        self.waiting: OrderedDict[_Name, tuple[ReqContext, dict[OffloadKey, None]]] = OrderedDict()
        self._deferred = 0  # chunks, since those that have left were last forgotten
        self._unpaid_at = float("-inf")
        self._counted: Counter[str] = Counter()  # chunks since the last statistics

    @property
    def keeps_up(self) -> bool:
        """Whether the tier gets new chunks at once."""
        return not self.waiting and self._pays()

    @property
    def waiting_chunks(self) -> int:
        """The chunks that the tier would get if the engine had nothing else to do."""
        return sum(len(keys) for _, keys in self.waiting.values()) if self._pays() else 0

    def use(self, context: TenantContext) -> None:
        """A request uses the chunks of its prefix."""
        name = _name_of(context)
        if (waiting := self.waiting.pop(name, None)) is not None:
            self.waiting[name] = context, waiting[1]
        if context.hand_over and (given := self._leading(context.prefix, ())):
            self._counted["later"] += len(given)
            self._submit(given, context)

    def offer(self, keys: Collection[OffloadKey], context: ReqContext) -> None:
        """The CPU tier has received these chunks."""
        if is_awaited(context) or (self.keeps_up and len(keys) <= self._room()):
            self._counted["at_once"] += len(keys)
            self._submit(keys, context)
            return
        absent = dict.fromkeys(keys)
        for key in self._tier.known(list(keys)):
            del absent[key]
        if not absent:
            return
        name = _name_of(context)
        newest, waiting = self.waiting.get(name, (context, {}))
        before = len(waiting)
        waiting.update(absent)
        self.waiting[name] = newest, waiting
        self._counted["deferred"] += len(waiting) - before
        self._deferred += len(waiting) - before
        if self._deferred > self._rows:
            self._forget_those_that_left()
        while len(self.waiting) > _CONVERSATIONS_MAX:
            self.waiting.popitem(last=False)

    def lacks(self, keys: Sequence[OffloadKey]) -> set[OffloadKey]:
        """The chunks of which the engine does not know that the tier holds them or will hold them."""
        return set(keys) - self._tier.known(keys)

    def give(self) -> None:
        """Give the tier what it takes now of what waits. Called in each step in which something does."""
        if (room := self._room()) < _BATCH_CHUNKS:
            return
        if not self._pays():
            now = self._clock()
            if now - self._unpaid_at < UNPAID_SECONDS:
                return
            self._unpaid_at, room = now, min(room, IN_HAND_LEAST)
        looks = 0
        while self.waiting and room > 0 and looks < _LOOKS_MAX:
            name, (context, offered) = next(iter(self.waiting.items()))
            prefix = context.prefix if isinstance(context, TenantContext) else ()
            chunks = self._leading(prefix, offered)
            looks += len(prefix) + len(offered)
            given = chunks[:room]
            if len(given) == len(chunks):
                del self.waiting[name]
            if given:
                room -= len(given)
                self._counted["later"] += len(given)
                self._submit(given, context)

    def add_to(self, stats: Samples) -> None:
        """Report what happened since the last call."""
        for outcome, chunks in self._counted.items():
            stats.add(metrics.TIER_OFFERED, chunks, self._tier.tier_type, outcome)
        self._counted.clear()
        stats.add(metrics.TIER_STORES_WAIT, float(not self.keeps_up), self._tier.tier_type)

    def clear(self) -> None:
        """Forget all chunks: the CPU tier is empty."""
        self.waiting.clear()

    def _forget_those_that_left(self) -> None:
        """Forget chunks that have left the CPU tier, so that no more wait than it holds, even if the shared tier takes
        nothing."""
        self._deferred, ready = 0, self._cpu_tier.ready
        for name, (context, offered) in list(self.waiting.items()):
            if kept := dict.fromkeys(key for key in offered if key in ready):
                self.waiting[name] = context, kept
            else:
                del self.waiting[name]

    def _leading(self, prefix: Sequence[OffloadKey], offered: Collection[OffloadKey]) -> list[OffloadKey]:
        """The chunks to give: those of the prefix, in order, up to the first that is in neither tier, as behind it
        nothing can be loaded; then others that were offered, such as those of another branch of the conversation."""
        ready, known = self._cpu_tier.ready, self._tier.known(prefix)
        chunks: list[OffloadKey] = []
        for key in prefix:
            if key in known:
                continue
            if key not in ready:
                break
            chunks.append(key)
        of_prefix = set(prefix)
        others = [key for key in offered if key in ready and key not in of_prefix]
        known = self._tier.known(others)
        return chunks + [key for key in others if key not in known]

    def _room(self) -> int:
        """Chunks that the tier may be given now. While the CPU tier has free rows, stores under way displace no chunk,
        and only the tier's own bounds apply."""
        if self._cpu_tier.free_rows():
            return self._in_hand_max + len(self._cpu_tier.ready)
        return self._in_hand_max - self._tier.stores_in_hand()


class LateRows(Duplicates, Protocol):
    """See engine/features/late_stores.py."""

    def postpones(self, keys: Collection[OffloadKey], context: ReqContext, /) -> bool: ...


class AllSpills:
    """The chunks that wait for each of an engine's shared tiers.

    Args:
        tiers: Spillway's own, each with whether loads from it pay now.
        submit: gives chunks of the CPU tier to a tier.
        follows_tiers: whether they say when new chunks are stored.
    """

    def __init__(
        self,
        tiers: Mapping[SharedTierBase, Callable[[], bool]],
        cpu_tier: CpuTier,
        submit: Callable[[SecondaryTierManager, Collection[OffloadKey], ReqContext], None],
        clock: Callable[[], float],
        *,
        rows: int,
        follows_tiers: bool,
    ) -> None:
        self._submit = submit
        self._of: dict[SecondaryTierManager, Spills] = {
            tier: Spills(tier, cpu_tier, partial(submit, tier), pays, clock, rows=rows) for tier, pays in tiers.items()
        }
        self._follows_tiers = follows_tiers and bool(self._of)
        self._prefixes: deque[tuple[TenantContext, int]] = deque()  # the newest requests that have one; its chunks
        self._prefix_chunks = 0

    def at_once(self, context: ReqContext) -> bool:
        """Whether new chunks are stored when they are computed although the device keeps them: what another engine or a
        client waits for, and, if it follows the tiers, everything, as long as they take it and loads from them pay."""
        if not self._follows_tiers:
            return False
        return is_awaited(context) or all(spills.keeps_up for spills in self._of.values())

    def offer(self, tier: SecondaryTierManager, keys: Collection[OffloadKey], context: ReqContext) -> None:
        """See Spills.offer; a tier that is not Spillway's gets everything at once."""
        spills = self._of.get(tier)
        if spills is None:
            self._submit(tier, keys, context)
        else:
            spills.offer(keys, context)

    def lacks(self, keys: Sequence[OffloadKey]) -> set[OffloadKey]:
        """Return the keys that one of the tiers lacks."""
        return set().union(*(spills.lacks(keys) for spills in self._of.values()))

    @property
    def waiting_chunks(self) -> int:
        return sum(spills.waiting_chunks for spills in self._of.values())

    def use(self, keys: Sequence[OffloadKey], context: TenantContext) -> None:
        """A request uses these chunks, which are the whole prefix of a model with one KV group."""
        if self._of and context.prefix is not keys:
            context.prefix = keys
            self._prefixes.append((context, len(keys)))
            self._prefix_chunks += len(keys)
            while self._prefix_chunks > PREFIX_CHUNKS_MAX:
                oldest, chunks = self._prefixes.popleft()
                oldest.prefix = ()
                self._prefix_chunks -= chunks
        for spills in self._of.values():
            if spills.waiting or context.hand_over:
                spills.use(context)

    def give(self) -> None:
        for spills in self._of.values():
            if spills.waiting:
                spills.give()

    def add_to(self, stats: Samples) -> None:
        for spills in self._of.values():
            spills.add_to(stats)

    def clear(self) -> None:
        for spills in self._of.values():
            spills.clear()
