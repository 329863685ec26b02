"""Looks up whole prefixes in the CPU tier and the shared tiers, and promotes what the shared tiers hold."""

from __future__ import annotations

import logging
import math
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple

from vllm.v1.kv_offload.base import OffloadingManager, OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

from spillway_connector import metrics
from spillway_connector.config import ConnectorConfig
from spillway_connector.engine.cpu_tier.tier import CpuTier
from spillway_connector.engine.ipc.samples import Samples
from spillway_connector.engine.manager.promotion import Bounds, Promotion, Wait
from spillway_connector.engine.requests.state import Prefix, TierState
from spillway_connector.engine.shared_tiers.prefix_tier import PrefixTier, gate_of
from spillway_connector.plan.load_cost import LoadPolicy, RateMeter
from spillway_connector.plan.meeting import Rates
from spillway_connector.plan.prefix_memo import ChangeLog, PrefixMemo, Step
from spillway_connector.transfer.jobs import ARRIVALS_REPORTED_FROM
from spillway_connector.transfer.lookups import Lookup
from spillway_connector.transfer.stats import MissReason

logger = logging.getLogger(__name__)

# A load starts when ARRIVALS_REPORTED_FROM of it is ready, from the first chunk on, and the rest is expected within
# this time. Chunks arrive a little out of order: with half asked for, no copy started before three quarters were read.
_EARLY_LOAD_SECONDS_MAX = 0.25
_ANSWERS_MAX = 8  # kept per request: one per KV group and length asked for lately


class ChunkState(Enum):
    """The state of one chunk, for one request."""

    READY = "in the CPU tier"
    COMING = "its row in the CPU tier is being written"
    LOOKING = "a shared tier is still being asked"
    ABSENT = "to be recomputed"


_NO_TIER = TierState(passes=False, open=False)


class _Asked(NamedTuple):
    """The tiers' answer about chunks that the CPU tier lacks."""

    stop: OffloadKey | None  # the first that no tier can give
    valid_until: float
    condition: TierState | None
    complete: bool  # all chunks before `stop` are being promoted; none is still looked up
    why: str = "others are on their way"  # for the log


class PrefixLookupManager(OffloadingManager):
    """The lookups of a tiering manager: one chunk (`look_up`) or a whole prefix, bounded in time and rows.

    vLLM's manager answers for one chunk at a time and promotes each hit. This one differs in four ways. A request
    waits until one deadline, over all its lookups (vllm#49829, #53087). Promotions are bounded, in flight and per
    request (vllm#49902). A chunk is promoted only while loading is faster than computing. A lookup answers for a whole
    prefix, and is repeated only after a change that concerns its answer.

    EngineCore process, scheduler thread; no method blocks.

    Attributes:
        step: What the lookups of the present step have in common; None before the first one.
    """

    def __init__(
        self,
        primary_tier: CpuTier,
        secondary_tiers: list[SecondaryTierManager],
        num_rows: int,
        config: ConnectorConfig,
        *,
        chunk_tokens: int,
        chunk_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.primary_tier = primary_tier
        self.secondary_tiers = secondary_tiers
        self._promotions: dict[SecondaryTierManager, dict[str, Promotion]] = {}  # not submitted yet; by request
        self._processed_jobs_this_step = False
        self._chunk_tokens, self._chunk_bytes = chunk_tokens, chunk_bytes
        policy = LoadPolicy()
        self.prefill_rate = RateMeter(policy.half_life_seconds, config.prefill_tokens_per_second)
        self._gates = {
            tier: gate_of(tier, policy, chunk_tokens, chunk_bytes, self.prefill_rate) for tier in secondary_tiers
        }
        self._counted = Samples()  # since the last statistics
        self._unreported = True  # a count or a tier's rate has moved since then
        only = secondary_tiers[0] if len(secondary_tiers) == 1 else None
        self._prefix_tier = only if isinstance(only, PrefixTier) else None
        answered: ChangeLog[str] = ChangeLog() if self._prefix_tier is None else self._prefix_tier.answered_requests
        self.memo: PrefixMemo[OffloadKey, TierState] = PrefixMemo(
            primary_tier.changed_chunks, answered, self._condition_of
        )
        self.step: Step[TierState] | None = None
        self._wait_seconds = config.request_wait_seconds
        self._clock = clock
        self._bounds = Bounds(
            in_flight_rows_max=max(1, int(num_rows * config.promotion_in_flight_fraction)),
            request_rows_max=max(1, int(num_rows * config.promotion_per_request_fraction)),
        )
        self.loads_begin_early = False
        self.ahead_rows_max = int(num_rows * config.promotion_ahead_fraction) if self._prefix_tier is not None else 0
        self._never_probing: set[str] = set()

    @abstractmethod
    def _process_finished_jobs(self) -> None:
        """Process the jobs that the tiers have finished."""

    @abstractmethod
    def _submit_promotion(self, tier: SecondaryTierManager, promotion: Promotion) -> None:
        """Submit a job that loads the chunks into their rows."""

    @abstractmethod
    def _holds(self, tier: SecondaryTierManager, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """Ask the tier whether it holds one chunk. Returns None while it is still looking."""

    def _maybe_process_finished_jobs(self) -> None:
        """Process finished jobs, unless this step has done so."""
        if not self._processed_jobs_this_step:
            self._processed_jobs_this_step = True
            self._process_finished_jobs()

    def look_up(self, key: OffloadKey, req_context: ReqContext) -> ChunkState:
        """Return the state of one chunk, and begin its promotion. After its deadline a request waits for nothing."""
        self._maybe_process_finished_jobs()
        if key in self.primary_tier.ready:
            return ChunkState.READY
        wait = self._wait_of(req_context)
        if wait.deadline is not None and self._clock() >= wait.deadline:
            return ChunkState.ABSENT
        resident = key in self.primary_tier.resident
        answer = ChunkState.COMING if resident else self._ask_tiers(key, req_context)
        if answer is not ChunkState.ABSENT and wait.deadline is None:
            wait.deadline = self._clock() + self._wait_seconds
        return answer

    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> int | None:
        """Count the leading chunks in the CPU tier; None while more are on their way, so that vLLM asks again.

        The result is what :meth:`look_up` returns for each key in order, up to the first absent one.
        """
        if not keys:
            return 0
        step = self.step or self.begin_step()
        answers = self._wait_of(req_context).answers
        answer = answers.get(keys[0])
        if (
            answer is None
            or len(answer.keys) != len(keys)
            or not self.memo.is_current(answer, req_context.req_id, step)
        ):
            answer = self.find_prefix(keys, req_context, step)
            if len(answers) >= _ANSWERS_MAX:
                answers.clear()
            answers[keys[0]] = answer
        return answer.chunks

    def find_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext, step: Step[TierState]) -> Prefix:
        """Look up a prefix of at least one key. The caller keeps the answer while PrefixMemo finds it current."""
        chunks, valid_until, condition, ready, expected, why = self._answer(
            keys, req_context, self._wait_of(req_context), step
        )
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "request %s: %d of %d chunks are in the CPU tier; %s: %s",
                req_context.req_id,
                ready,
                len(keys),
                "it waits" if chunks is None else f"{chunks} can be loaded",
                why,
            )
        if self._promotions:
            self._flush_promotions()  # now, not at the end of the step: the I/O threads can start
        return self.memo.record(keys, chunks, valid_until, condition, step, ready=ready, expected=expected)

    def begin_step(self) -> Step[TierState]:
        """Process finished jobs, then read the clock and the tier's state once for all lookups of a scheduler step.

        Called by the first lookup of a step, which finds :attr:`step` None.
        """
        self._maybe_process_finished_jobs()
        tier = self._prefix_tier
        state = _NO_TIER if tier is None else TierState(self._gates[tier].pays(self.prefill_rate), tier.open)
        self.step = self.memo.begin_step(self._clock(), state)
        return self.step

    def end_lookups(self) -> None:
        """The CPU tier has changed: the next lookup begins a new :attr:`step`, even within vLLM's step."""
        self.step = None

    def _end_step(self) -> None:
        """The part of `on_schedule_end` that comes before the shared tiers'."""
        if not self._processed_jobs_this_step:
            self._process_finished_jobs()
        self._processed_jobs_this_step = False
        if self._promotions:
            self._flush_promotions()
        self.step = None

    def forbid_probing(self, request_id: str) -> None:
        """The request may compute and load its prefix at the same time, which measures a slow tier as a probe does."""
        self._never_probing.add(request_id)

    def allow_probing(self, request_id: str) -> None:
        """The request has ended."""
        self._never_probing.discard(request_id)

    def may_probe(self, request_id: str) -> bool:
        """Whether the request may load from a slow tier in order to measure it."""
        return request_id not in self._never_probing

    def may_begin_load(self, prefix: Prefix) -> bool:
        """Whether the load of a prefix may start before all of its chunks have been promoted.

        Chunks that are ready are copied while the tier reads the others, so the reads hide the copies. But until the
        last chunk arrives, the request holds device blocks that others could use, so the wait must be short.
        """
        rate = None if self._prefix_tier is None else self._gates[self._prefix_tier].load_rate.per_second
        missing = prefix.expected - prefix.ready
        return (
            rate is not None
            and missing > 0
            and prefix.ready >= prefix.expected * ARRIVALS_REPORTED_FROM
            and missing * self._chunk_bytes <= rate * _EARLY_LOAD_SECONDS_MAX
        )

    def rates(self) -> Rates | None:
        """The rates of computing and of the shared tier; None if there is no single one, or a rate is not known."""
        if self._prefix_tier is None:
            return None
        computed, loaded = self.prefill_rate.per_second, self._gates[self._prefix_tier].load_rate.per_second
        if computed is None or loaded is None:
            return None
        return Rates(computed / self._chunk_tokens, loaded / self._chunk_bytes)

    def is_slower_than_computing(self) -> bool:
        """Whether the shared tier accepts lookups, and loads of whole prefixes do not pay by its measured rate."""
        tier = self._prefix_tier
        return tier is not None and tier.open and not self._gates[tier].pays(self.prefill_rate)

    def stored_chunks(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> int | None:
        """Count the leading keys that are in the CPU tier or in the shared tier, whatever a load would cost.

        Returns:
            The count, or None while the shared tier is still looking.

        Raises:
            AssertionError: There is no shared tier, or there are several.
        """
        tier = self._prefix_tier
        assert tier is not None
        resident = self.primary_tier.resident
        missing = [key for key in keys if key not in resident]
        if not missing or not self._may_load(tier, req_context):
            return keys.index(missing[0]) if missing else len(keys)
        found = tier.lookup_prefix(missing, req_context).found
        if Lookup.PENDING in found:
            return None
        return keys.index(missing[len(found) - 1]) if found[-1] is Lookup.MISS else len(keys)

    def promote_meanwhile(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> int:
        """Promote the keys that have no row, in this order, for a request that is computed meanwhile.

        Returns:
            How many leading keys are in the CPU tier or on their way; not all of them if rows are short.

        Raises:
            AssertionError: There is no shared tier, or there are several.
        """
        tier = self._prefix_tier
        assert tier is not None
        resident = self.primary_tier.resident
        missing = [key for key in keys if key not in resident]
        promoted = self._promote(tier, missing, req_context, self._wait_of(req_context), keys) if missing else 0
        if promoted:
            self._flush_promotions()
        return len(keys) if promoted == len(missing) else keys.index(missing[promoted])

    def now(self) -> float:
        """Read the manager's clock."""
        return self._clock()

    @property
    def step_time(self) -> float:
        """The time of the present step; before its first lookup, the clock's time."""
        return self._clock() if self.step is None else self.step.now

    def _wait_of(self, req_context: ReqContext) -> Wait:
        wait = self._bounds.waits.get(req_context.req_id)
        if wait is None:
            wait = self._bounds.waits[req_context.req_id] = Wait()
        return wait

    def _condition_of(self, request_id: str, step: Step[TierState]) -> TierState:
        state = step.condition
        if state.passes or self._prefix_tier is None or request_id in self._never_probing:
            return state
        return TierState(self._gates[self._prefix_tier].passes(request_id, self.prefill_rate, step.now), state.open)

    def _answer(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, wait: Wait, step: Step[TierState]
    ) -> tuple[int | None, float, TierState | None, int, int, str]:
        """Return `chunks`, `valid_until`, `condition`, `ready` and `expected` of a PrefixAnswer, and why it is so."""
        now = step.now
        ready = self.primary_tier.ready
        if ready.issuperset(keys):
            return len(keys), math.inf, None, len(keys), len(keys), "no other is wanted"
        first = 0 if keys[0] not in ready else list(map(ready.__contains__, keys)).index(False)
        if wait.deadline is not None and now >= wait.deadline:
            self._count_miss(MissReason.REQUEST_DEADLINE)
            return first, math.inf, None, first, first, "its time for waiting is over"
        resident = self.primary_tier.resident
        missing = keys[first:] if first else keys
        if not resident.isdisjoint(missing):
            missing = [key for key in missing if key not in resident]
        if missing and len(missing) < len(keys) and not wait.rows_promoted:
            # The tier's oldest chunks may be this request's: they must not make room for its others.
            self.primary_tier.touch(keys, req_context)
        asked = self._ask_for(missing, keys, req_context, wait, step) if missing else _Asked(None, math.inf, None, True)
        if asked.stop == keys[first]:
            return first, asked.valid_until, asked.condition, first, first, asked.why
        if wait.deadline is None:
            wait.deadline = now + self._wait_seconds
        expected = 0
        if asked.complete:
            expected = len(keys) if asked.stop is None else keys.index(asked.stop)
        return None, min(asked.valid_until, wait.deadline), asked.condition, first, expected, asked.why

    def _ask_for(
        self,
        missing: Sequence[OffloadKey],
        prefix: Sequence[OffloadKey],
        req_context: ReqContext,
        wait: Wait,
        step: Step[TierState],
    ) -> _Asked:
        """Look the missing chunks of a prefix up and promote them, up to the first one that no tier can provide."""
        tier = self._prefix_tier
        if tier is None:  # several tiers, or one of vLLM's own: chunk by chunk, and the answer is not kept
            absent = ChunkState.ABSENT
            stop = next((key for key in missing if self._ask_tiers(key, req_context) is absent), None)
            return _Asked(stop, -math.inf, None, False, "several tiers are asked, chunk by chunk")
        if not self._may_load(tier, req_context):
            return _Asked(missing[0], math.inf, None, True, "the request may not load from the tier")
        condition = self._condition_of(req_context.req_id, step)
        if not condition.passes:
            self._count_not_worth(tier.tier_type)
            return _Asked(missing[0], math.inf, condition, True, "computing is faster than the tier")
        found, valid_until = tier.lookup_prefix(missing, req_context)
        if found.count(Lookup.HIT) == len(missing):  # the usual prompt that is in the tier, without a loop
            hits = list(missing)
        else:
            hits = [key for key, answer in zip(missing, found, strict=False) if answer is Lookup.HIT]
        promoted = self._promote(tier, hits, req_context, wait, prefix) if hits else 0
        if promoted < len(hits):
            self._count_miss(MissReason.NO_ROOM)
            # rows may be freed at any time
            return _Asked(hits[promoted], -math.inf, condition, False, "there are no rows to promote more")
        stop = missing[len(found) - 1] if found[-1] is Lookup.MISS else None
        why = "they are looked up or promoted" if stop is None else "the tier lacks the next one"
        return _Asked(stop, valid_until, condition, len(hits) == len(found) - (stop is not None), why)

    def _promote(
        self,
        tier: SecondaryTierManager,
        keys: Sequence[OffloadKey],
        req_context: ReqContext,
        wait: Wait,
        prefix: Sequence[OffloadKey] = (),
    ) -> int:
        """Allocate rows for the leading `keys` that the bounds allow, and queue their loads. Returns how many.

        prefix: Its chunks that have rows make no room for the others, or a load would miss them.
        """
        bounds = self._bounds
        room = min(
            bounds.in_flight_rows_max - bounds.rows_in_flight, bounds.request_rows_max - wait.rows_promoted, len(keys)
        )
        if room <= 0:
            return 0
        rows, present = self.primary_tier, list[OffloadKey]()
        if rows.free_rows() < room and not rows.resident.isdisjoint(prefix):
            present = [key for key in prefix if key in rows.resident]
        written = rows.prepare_write([*present, *keys[:room]], req_context)
        if written is None:  # no room for all of them: as many as fit
            half = room // 2
            promoted = self._promote(tier, keys[:half], req_context, wait, prefix)
            if promoted < half or room == 1:
                return promoted
            return half + self._promote(tier, keys[half:room], req_context, wait, prefix)
        assert isinstance(written.store_spec, CPULoadStoreSpec)
        if taken := written.keys_to_store:  # another engine of the node may have begun to load the others meanwhile
            pending = self._promotions.setdefault(tier, {})
            promotion = pending.setdefault(req_context.req_id, Promotion(req_context))
            promotion.keys += taken
            promotion.rows += written.store_spec.block_ids.tolist()
        bounds.rows_in_flight += len(taken)
        wait.rows_promoted += room
        return room

    def promote_ahead(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, asker: ReqContext, rows_max: int
    ) -> tuple[list[OffloadKey], bool]:
        """Begin to promote a prefix that vLLM has not asked about yet, unless the tier is slower than computing.

        Args:
            keys: The chunks of the prefix, in order.
            req_context: The request for which they are promoted.
            asker: The name under which the shared tier looks them up. It differs from the request, so that the time
                of this lookup does not count against the request's deadline.
            rows_max: The most chunks to promote.

        Returns:
            The chunks whose promotion begins now, and whether there may be more.
        """
        self._maybe_process_finished_jobs()
        tier = self._prefix_tier
        if tier is None or not tier.open or not self._may_load(tier, req_context):
            return [], False
        if not self._gates[tier].pays(self.prefill_rate):
            return [], False
        resident = self.primary_tier.resident
        missing = [key for key in keys if key not in resident]
        if not missing:
            return [], False
        found, _ = tier.lookup_prefix(missing, asker)
        there = [answer is Lookup.HIT for answer in found]
        hits = there.index(False) if False in there else len(there)
        if not hits:
            return [], found[0] is Lookup.PENDING
        self.primary_tier.touch(keys, req_context)  # they must not make room for the others
        promoted = self._promote(tier, missing[: min(hits, rows_max)], req_context, Wait(), keys)
        self._flush_promotions()
        return missing[:promoted], promoted > 0 and (hits > promoted or found[-1] is Lookup.PENDING)

    def forget_ahead(self, asker: ReqContext) -> None:
        """End the lookups of an `asker` of :meth:`promote_ahead`."""
        if self._prefix_tier is not None:
            self._prefix_tier.on_request_finished(asker)

    def rows_being_loaded(self) -> int:
        """Count the rows that promotions under way are filling."""
        self._maybe_process_finished_jobs()
        return self._bounds.rows_in_flight

    def chunks_loaded_in(self, seconds: float) -> int:
        """Estimate how many chunks the shared tier loads in this time by its measured rate, or 0 without one."""
        rate = None if self._prefix_tier is None else self._gates[self._prefix_tier].load_rate.per_second
        return 0 if rate is None else int(rate * seconds / self._chunk_bytes)

    def _flush_promotions(self) -> None:
        """Submit the queued promotions, one job for each tier and request."""
        for tier, by_request in self._promotions.items():
            for promotion in by_request.values():
                self._submit_promotion(tier, promotion)
        self._promotions.clear()

    def _ask_tiers(self, key: OffloadKey, req_context: ReqContext) -> ChunkState:
        """The state of a chunk that is not in the CPU tier: COMING if a tier holds it; its promotion is queued then."""
        looking = False
        for tier in self.secondary_tiers:
            if not self._may_load(tier, req_context):
                continue
            if not self._gates[tier].passes(req_context.req_id, self.prefill_rate, self._clock()):
                self._count_not_worth(tier.tier_type)
                continue
            held = self._holds(tier, key, req_context)
            if held:
                promoted = self._promote(tier, [key], req_context, self._wait_of(req_context))
                return ChunkState.COMING if promoted else ChunkState.ABSENT
            looking |= held is None
        return ChunkState.LOOKING if looking else ChunkState.ABSENT

    def _may_load(self, tier: SecondaryTierManager, req_context: ReqContext) -> bool:
        """Whether the request allows loads from this tier."""
        return True

    def _count(self, metric: metrics.Metric, amount: int, *labels: str) -> None:
        """Count what the next statistics report."""
        if amount:
            self._counted.add(metric, amount, *labels)
            self._unreported = True

    def _count_not_worth(self, tier_type: str) -> None:
        self._count(metrics.TIER_NOT_WORTH, 1, tier_type)
        self._count_miss(MissReason.NOT_WORTH)

    def _count_miss(self, reason: MissReason) -> None:
        if self._prefix_tier is not None:
            self._count(metrics.TIER_MISSES, 1, self._prefix_tier.tier_type, reason.value)
