"""Lookups of whole prefixes: what the CPU tier holds, what the shared tier is asked for, how much is promoted."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
from vllm.v1.kv_offload.tiering.manager import PendingPromotion, TieringOffloadingManager

from spillway_connector.config import ConnectorConfig
from spillway_connector.engine.v023.cpu_tier import CpuTier
from spillway_connector.engine.v023.tier_adapter import PrefixTier
from spillway_connector.plan.load_cost import LoadGate, LoadPolicy, RateMeter
from spillway_connector.plan.prefix_memo import ChangeLog, PrefixAnswer, PrefixMemo
from spillway_connector.transfer.jobs import ARRIVALS_REPORTED_FROM
from spillway_connector.transfer.lookups import Lookup
from spillway_connector.transfer.stats import MissReason

# A load starts when ARRIVALS_REPORTED_FROM of it is ready, from the first chunk on, and the rest is expected within
# this time. Chunks arrive a little out of order: with half asked for, no copy started before three quarters were read.
_EARLY_LOAD_SECONDS_MAX = 0.25
_ANSWERS_MAX = 8  # kept per request: one per KV group and length asked for lately


class TierState(NamedTuple):
    """The condition of an answer that the shared tier has a part in."""

    passes: bool  # loading beats recomputing, or this request probes the tier
    open: bool  # the tier accepts lookups


Prefix = PrefixAnswer[OffloadKey, TierState]


class _Asked(NamedTuple):
    """The tiers' answer about chunks that the CPU tier lacks."""

    stop: OffloadKey | None  # the first that no tier can give
    valid_until: float
    condition: TierState | None
    complete: bool  # all chunks before `stop` are being promoted; none is still looked up


@dataclass(slots=True)
class _Wait:
    """What one request has cost the tiers so far, over all its lookups."""

    deadline: float | None = None  # from the first answer that made it wait
    rows_promoted: int = 0
    answers: dict[OffloadKey, Prefix] = field(default_factory=dict)  # by first key


@dataclass(slots=True)
class _PromotionBounds:
    in_flight_rows_max: int
    request_rows_max: int
    rows_in_flight: int = 0
    waits: dict[str, _Wait] = field(default_factory=dict)


class PrefixLookupManager(TieringOffloadingManager):
    """Upstream's manager, with `lookup` bounded in time and rows, and `lookup_prefix` beside it.

    Upstream answers one chunk at a time and promotes each hit. Here a request's waiting has one deadline over all its
    lookups (vllm#49829, #53087), promotions are bounded in flight and per request (vllm#49902) and made only while
    they beat recomputing. A whole prefix is asked about at once, and again only when something changed that the last
    answer rests on.

    EngineCore process, scheduler thread; no method blocks. chunk_tokens, chunk_bytes: of one chunk, all ranks together.
    """

    primary_tier: CpuTier

    def __init__(
        self,
        primary_tier: CpuTier,
        secondary_tiers: list[SecondaryTierManager],
        num_rows: int,
        config: ConnectorConfig,
        *,
        enable_events: bool,
        chunk_tokens: int,
        chunk_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(primary_tier, secondary_tiers, enable_events)
        self._chunk_bytes = chunk_bytes
        policy = LoadPolicy()
        self.prefill_rate = RateMeter(policy.half_life_seconds, config.prefill_tokens_per_second)
        self._gates = {
            tier: LoadGate(policy, chunk_tokens, chunk_bytes, RateMeter(policy.half_life_seconds))
            for tier in secondary_tiers
        }
        self._not_worth: dict[str, int] = {tier.tier_type: 0 for tier in secondary_tiers}
        self._misses: dict[tuple[str, MissReason], int] = {}
        self._unreported = True  # a count or a tier's rate has moved since the last statistics
        only = secondary_tiers[0] if len(secondary_tiers) == 1 else None
        self._prefix_tier = only if isinstance(only, PrefixTier) else None
        answered: ChangeLog[str] = ChangeLog() if self._prefix_tier is None else self._prefix_tier.answered_requests
        self._tier_state = TierState(passes=False, open=False)  # for requests in general
        self.memo: PrefixMemo[OffloadKey, TierState] = PrefixMemo(
            primary_tier.changed_chunks, answered, self._condition_of
        )
        self._wait_seconds = config.request_wait_seconds
        self._clock = clock
        self._bounds = _PromotionBounds(
            in_flight_rows_max=max(1, int(num_rows * config.promotion_in_flight_fraction)),
            request_rows_max=max(1, int(num_rows * config.promotion_per_request_fraction)),
        )
        self.loads_begin_early = False  # set by the scheduler half

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """True: in the CPU tier. None: on its way, ask again. False: recompute.

        Upstream's contract, except that None turns into False at the request's deadline.
        """
        self._maybe_process_finished_jobs()  # type: ignore[no-untyped-call]
        in_cpu_tier = self.primary_tier.lookup(key, req_context)
        if in_cpu_tier:
            return True
        wait = self._wait_of(req_context)
        if wait.deadline is not None and self._clock() >= wait.deadline:
            return False
        answer = None if in_cpu_tier is None else self._ask_tiers(key, req_context)
        if answer is None and wait.deadline is None:
            wait.deadline = self._clock() + self._wait_seconds
        return answer

    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> int | None:
        """The number of leading chunks in the CPU tier; None while more are on their way: ask again.

        The same as :meth:`lookup` of each key in order, up to the first False.
        """
        if not keys:
            return 0
        if not self.memo.fresh:
            self.begin_step()
        answers = self._wait_of(req_context).answers
        answer = answers.get(keys[0])
        if answer is None or len(answer.keys) != len(keys) or not self.memo.is_current(answer, req_context.req_id):
            answer = self.find_prefix(keys, req_context)
            if len(answers) >= _ANSWERS_MAX:
                answers.clear()
            answers[keys[0]] = answer
        return answer.chunks

    def find_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Prefix:
        """A new answer of :meth:`lookup_prefix` for at least one key, for the caller to keep; see PrefixMemo."""
        memo = self.memo
        if not memo.fresh:
            self.begin_step()
        chunks, valid_until, condition, ready, expected = self._answer(keys, req_context, self._wait_of(req_context))
        if self._pending_load_submissions:
            self._flush_pending_promotions()  # now, not at the end of the step: the I/O threads can start
        return memo.record(keys, chunks, valid_until, condition, ready=ready, expected=expected)

    def begin_step(self) -> None:
        """Read the clock and everything that the answers of this step have in common; needed while `memo` is stale."""
        self._maybe_process_finished_jobs()  # type: ignore[no-untyped-call]
        tier, state = self._prefix_tier, self._tier_state
        if tier is not None:
            pays, open_now = self._gates[tier].pays(self.prefill_rate), tier.open
            if state.passes is not pays or state.open is not open_now:
                self._tier_state = state = TierState(pays, open_now)
        self.memo.begin_step(self._clock(), state)

    def may_begin_load(self, prefix: Prefix) -> bool:
        """Whether the load of a prefix may start before all of its chunks have been promoted.

        Copying the chunks that are ready while the rest is read hides the copies behind the reads. Until the last one
        arrives the request holds device blocks that others could use, so the rest must be near.
        """
        rate = None if self._prefix_tier is None else self._gates[self._prefix_tier].load_rate.per_second
        missing = prefix.expected - prefix.ready
        return (
            rate is not None
            and missing > 0
            and prefix.ready >= prefix.expected * ARRIVALS_REPORTED_FROM
            and missing * self._chunk_bytes <= rate * _EARLY_LOAD_SECONDS_MAX
        )

    @property
    def step_time(self) -> float:
        """The time that this step's answers rest on; before the first lookup of a step, the clock's."""
        return self.memo.now if self.memo.fresh else self._clock()

    def _wait_of(self, req_context: ReqContext) -> _Wait:
        wait = self._bounds.waits.get(req_context.req_id)
        if wait is None:
            wait = self._bounds.waits[req_context.req_id] = _Wait()
        return wait

    def _condition_of(self, request_id: str) -> TierState:
        state = self._tier_state
        if state.passes or self._prefix_tier is None:
            return state
        passes = self._gates[self._prefix_tier].passes(request_id, self.prefill_rate, self.memo.now)
        return TierState(passes, state.open)

    def _answer(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, wait: _Wait
    ) -> tuple[int | None, float, TierState | None, int, int]:
        """PrefixAnswer's chunks, valid_until, condition, ready and expected."""
        now = self.memo.now
        ready = self.primary_tier.ready
        if ready.issuperset(keys):
            return len(keys), math.inf, None, len(keys), len(keys)
        first = 0 if keys[0] not in ready else list(map(ready.__contains__, keys)).index(False)
        if wait.deadline is not None and now >= wait.deadline:
            self._count_miss(MissReason.REQUEST_DEADLINE)
            return first, math.inf, None, first, first
        resident = self.primary_tier.resident
        missing = keys[first:] if first else keys
        if not resident.isdisjoint(missing):
            missing = [key for key in missing if key not in resident]
        asked = self._ask_for(missing, req_context, wait) if missing else _Asked(None, math.inf, None, True)
        if asked.stop == keys[first]:
            return first, asked.valid_until, asked.condition, first, first
        if wait.deadline is None:
            wait.deadline = now + self._wait_seconds
        expected = 0
        if asked.complete:
            expected = len(keys) if asked.stop is None else keys.index(asked.stop)
        return None, min(asked.valid_until, wait.deadline), asked.condition, first, expected

    def _ask_for(self, missing: Sequence[OffloadKey], req_context: ReqContext, wait: _Wait) -> _Asked:
        """Have the chunks looked up and promoted, up to the first that no tier can give."""
        tier = self._prefix_tier
        if tier is None:  # several tiers, or one of vLLM's own: chunk by chunk, and the answer is not kept
            stop = next((key for key in missing if self._ask_tiers(key, req_context) is False), None)
            return _Asked(stop, -math.inf, None, complete=False)
        condition = self._condition_of(req_context.req_id)
        if not condition.passes:
            self._count_not_worth(tier.tier_type)
            return _Asked(missing[0], math.inf, condition, complete=True)
        found, valid_until = tier.lookup_prefix(missing, req_context)
        if found.count(Lookup.HIT) == len(missing):  # the usual prompt that is in the tier, without a loop
            hits = list(missing)
        else:
            hits = [key for key, answer in zip(missing, found, strict=False) if answer is Lookup.HIT]
        promoted = self._promote(tier, hits, req_context, wait) if hits else 0
        if promoted < len(hits):
            self._count_miss(MissReason.NO_ROOM)
            return _Asked(hits[promoted], -math.inf, condition, complete=False)  # rows may be freed at any time
        stop = missing[len(found) - 1] if found[-1] is Lookup.MISS else None
        return _Asked(stop, valid_until, condition, complete=len(hits) == len(found) - (stop is not None))

    def _promote(self, tier: SecondaryTierManager, keys: list[OffloadKey], req_context: ReqContext, wait: _Wait) -> int:
        """Allocate rows for `keys`, from the first on as far as the bounds allow, and queue their loads; how many."""
        bounds = self._bounds
        room = min(
            bounds.in_flight_rows_max - bounds.rows_in_flight, bounds.request_rows_max - wait.rows_promoted, len(keys)
        )
        if room <= 0:
            return 0
        written = self.primary_tier.prepare_write(keys[:room], req_context)
        if written is None:  # no room for all of them: as many as fit
            promoted = 0
            while promoted < room and self._initiate_promotion(tier, keys[promoted], req_context):
                promoted += 1
            return promoted
        assert isinstance(written.store_spec, CPULoadStoreSpec)
        pending = self._pending_load_submissions.setdefault(tier, {})
        entry = pending.setdefault(req_context.req_id, PendingPromotion(req_context=req_context))
        entry.keys += written.keys_to_store
        entry.block_ids += written.store_spec.block_ids.tolist()
        bounds.rows_in_flight += room
        wait.rows_promoted += room
        return room

    def _ask_tiers(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """None: a tier holds it (promotion queued) or is still looking. False: no tier holds it."""
        looking = False
        for tier in self.secondary_tiers:
            if not self._gates[tier].passes(req_context.req_id, self.prefill_rate, self._clock()):
                self._count_not_worth(tier.tier_type)
                continue
            held = tier.lookup(key, req_context)
            if held:
                return None if self._initiate_promotion(tier, key, req_context) else False
            looking |= held is None
        return None if looking else False

    def _initiate_promotion(self, tier: SecondaryTierManager, key: OffloadKey, req_context: ReqContext) -> bool:
        """Upstream's, within the bounds: False, and nothing has changed, beyond them."""
        bounds = self._bounds
        wait = self._wait_of(req_context)
        if bounds.rows_in_flight >= bounds.in_flight_rows_max or wait.rows_promoted >= bounds.request_rows_max:
            return False
        if not super()._initiate_promotion(tier, key, req_context):
            return False
        bounds.rows_in_flight += 1
        wait.rows_promoted += 1
        return True

    def _count_not_worth(self, tier_type: str) -> None:
        self._not_worth[tier_type] = self._not_worth.get(tier_type, 0) + 1
        self._unreported = True
        self._count_miss(MissReason.NOT_WORTH)

    def _count_miss(self, reason: MissReason) -> None:
        if self._prefix_tier is not None:
            entry = (self._prefix_tier.tier_type, reason)
            self._misses[entry] = self._misses.get(entry, 0) + 1
            self._unreported = True
