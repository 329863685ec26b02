"""Who holds what, and what moves between CPU tier and shared tiers: upstream's manager with its traps closed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager
from vllm.v1.kv_offload.tiering.manager import PendingPromotion, TieringOffloadingManager

from spillway_connector import metrics
from spillway_connector.config import ConnectorConfig
from spillway_connector.engine.cpu_tier import CpuTier
from spillway_connector.engine.early_loads import ComingRows
from spillway_connector.engine.stats import SpillwayStats
from spillway_connector.engine.tier_adapter import PrefixTier, SharedTierAdapter, TierJobResult
from spillway_connector.plan.change_log import ChangeLog
from spillway_connector.plan.load_cost import LoadGate, RateMeter, WorthPolicy
from spillway_connector.transfer.jobs import ARRIVALS_TOLD_FROM
from spillway_connector.transfer.lookups import Lookup
from spillway_connector.transfer.stats import MissReason

# A load begins when ARRIVALS_TOLD_FROM of it is there, from the first chunk on, and the rest is expected in this time.
# They come a little out of order: where half was asked for, nothing was copied before three quarters had been read.
_BEGUN_SECONDS_MAX = 0.25
_PREFIXES_MAX = 8  # of one request: one per KV group and length asked for lately


class _Verdict(NamedTuple):
    """About asking the shared tier: whether loading from it pays (or this request probes it), whether it answers."""

    passes: bool
    open: bool


class _News(NamedTuple):
    chunks: frozenset[OffloadKey]  # whose state in the CPU tier has changed
    requests: frozenset[str]  # about whose chunks the shared tier has answered


@dataclass(slots=True)
class View:
    """One reading of the clock and of everything that answers rest on, for a whole step.

    The stamp is the same for as long as nothing of it but the clock has changed, so that who waits compares one number.
    """

    now: float
    positions: tuple[int, ...]  # in the change logs
    verdict: _Verdict  # for requests in general
    stamp: int = 0
    # What has changed between earlier positions and these: all who wait since the same step ask for the same. None:
    # perhaps everything.
    news: dict[tuple[int, ...], _News | None] = field(default_factory=dict)


@dataclass(slots=True)
class Prefix:
    """The last answer about one prefix, and what it rests on."""

    keys: Sequence[OffloadKey]
    answer: int | None
    good_until: float
    verdict: _Verdict | None  # None: no shared tier was asked
    positions: tuple[int, ...]
    stamp: int  # of the view in which it was last found to be so; -1: it has to be looked at every time
    ready: int = 0  # chunks from the first on that are in the CPU tier
    coming: int = 0  # and those that are or will be, all being promoted; 0 while some are still looked for
    members: frozenset[OffloadKey] | None = None  # of `keys`, once it is needed


class _Asked(NamedTuple):
    """What the tiers said of chunks that the CPU tier lacks."""

    stop: OffloadKey | None  # the first that no tier can give
    good_until: float
    verdict: _Verdict | None
    found_out: bool  # what lies before `stop` is being promoted, and nothing more of the prefix will be


@dataclass(slots=True)
class _Wait:
    """What one request has cost the tiers so far, over all its lookups."""

    deadline: float | None = None  # from the first answer that made it wait
    rows_promoted: int = 0
    prefixes: dict[OffloadKey, Prefix] = field(default_factory=dict)  # by first key


@dataclass(slots=True)
class _PromotionBounds:
    in_flight_rows_max: int
    request_rows_max: int
    rows_in_flight: int = 0
    waits: dict[str, _Wait] = field(default_factory=dict)


class SpillwayTieringManager(TieringOffloadingManager):
    """Runs in the EngineCore process on the scheduler thread; nothing here may block.

    Beyond upstream: a request's waiting has one deadline over all its lookups (vllm#49829, #53087), promotions are
    bounded in flight and per request (vllm#49902) and made only while they beat recomputing, a promotion keeps its
    good chunks when others fail, a failed device copy never becomes a hit, and a reset leaves no row pending for ever.
    A whole prefix is asked about at once, and again only when something it rests on has changed.
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
        self._num_rows = num_rows
        self._chunk_bytes = chunk_bytes
        policy = WorthPolicy()
        self.prefill_rate = RateMeter(policy.half_life_seconds, config.prefill_tokens_per_second)
        self._gates = {
            tier: LoadGate(policy, chunk_tokens, chunk_bytes, RateMeter(policy.half_life_seconds))
            for tier in secondary_tiers
        }
        self._not_worth: dict[str, int] = {tier.tier_type: 0 for tier in secondary_tiers}
        self._shared_tiers = [tier for tier in secondary_tiers if isinstance(tier, SharedTierAdapter)]
        self._unreported = True  # a count or a tier's rate has moved since the last statistics
        self._reported_changes: tuple[int, float | None] | None = None
        self._reported_rows = -1
        self._reported_rates: dict[str, float] = {}  # by tier; "" is the prefill's
        self._misses: dict[tuple[str, MissReason], int] = {}
        self._resets = {"done": 0, "refused": 0}
        only = secondary_tiers[0] if len(secondary_tiers) == 1 else None
        self._prefix_tier = only if isinstance(only, PrefixTier) else None
        self.view = View(-math.inf, (), _Verdict(passes=False, open=False))
        self.looked = False  # since the step began: `view` is of this step
        self._answers: ChangeLog[str] = ChangeLog() if self._prefix_tier is None else self._prefix_tier.changes
        self._wait_seconds = config.request_wait_seconds
        self._clock = clock
        self._bounds = _PromotionBounds(
            in_flight_rows_max=max(1, int(num_rows * config.promotion_in_flight_fraction)),
            request_rows_max=max(1, int(num_rows * config.promotion_per_request_fraction)),
        )
        self._distrusted: set[OffloadKey] = set()
        self.loads_begin_early = False  # for the scheduler half to say
        self._taken_in: dict[int, int] = {}  # chunks of promotions under way that have come, by job
        self._forgotten: dict[int, list[int]] = {}  # rows of jobs under way whose chunks a reset has forgotten

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """True: in the CPU tier. None: on its way, ask again. False: recompute."""
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
        """How many chunks from the first on are in the CPU tier; None while more are on their way: ask again.

        As :meth:`lookup` of one after the other up to the first that cannot be had.
        """
        if not keys:
            return 0
        wait = self._wait_of(req_context)
        known = wait.prefixes.get(keys[0])
        if known is None or len(known.keys) != len(keys) or not self.last_answer(known, req_context):
            known = self.look_up(keys, req_context)
            if len(wait.prefixes) >= _PREFIXES_MAX:
                wait.prefixes.clear()
            wait.prefixes[keys[0]] = known
        return known.answer

    def look_up(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> Prefix:
        """:meth:`lookup_prefix` of at least one chunk, with what :meth:`last_answer` needs."""
        view = self.view if self.looked else self.look_around()
        answer, good_until, verdict, ready, coming = self._answer(keys, req_context, self._wait_of(req_context), view)
        if self._pending_load_submissions:
            self._flush_pending_promotions()  # now, not at the end of the step: the threads can begin
        self._read_positions(view)
        stamp = view.stamp if verdict is None or verdict is view.verdict else -1
        return Prefix(keys, answer, good_until, verdict, view.positions, stamp, ready, coming)

    def comes_soon(self, prefix: Prefix) -> bool:
        """Whether so much of a prefix has come, and the rest is so near, that its load may begin.

        Copying what is there while the rest is read hides the copies behind the reading. Until the rest has come the
        request keeps its device blocks from others, so it must not be far.
        """
        rate = None if self._prefix_tier is None else self._gates[self._prefix_tier].load_rate.per_second
        missing = prefix.coming - prefix.ready
        return (
            rate is not None
            and missing > 0
            and prefix.ready >= prefix.coming * ARRIVALS_TOLD_FROM
            and missing * self._chunk_bytes <= rate * _BEGUN_SECONDS_MAX
        )

    def _wait_of(self, req_context: ReqContext) -> _Wait:
        wait = self._bounds.waits.get(req_context.req_id)
        if wait is None:
            wait = self._bounds.waits[req_context.req_id] = _Wait()
        return wait

    def last_answer(self, prefix: Prefix, req_context: ReqContext) -> bool:
        """Whether `prefix.answer` is still what lookup_prefix would say of it: cheap, for requests that wait."""
        view = self.view if self.looked else self.look_around()
        if view.now >= prefix.good_until:
            return False
        if prefix.stamp == view.stamp:
            return True
        if view.positions != prefix.positions and not self._untouched(prefix, req_context.req_id, view):
            return False
        if prefix.verdict is not None and prefix.verdict is not view.verdict:
            # Last, because a verdict may make this request the probe of a slow tier.
            verdict = self._verdict(req_context, view)
            if prefix.verdict != verdict:
                return False
            if verdict is not view.verdict:
                return True  # this request's own, which time may change
            prefix.verdict = verdict
        prefix.stamp = view.stamp
        return True

    @property
    def step_time(self) -> float:
        """The clock's reading; within a step that has asked anything, the one its answers rest on."""
        return self.view.now if self.looked else self._clock()

    def look_around(self) -> View:
        """What all questions of this step have in common; to be called while `looked` is false."""
        self._maybe_process_finished_jobs()  # type: ignore[no-untyped-call]
        tier, view = self._prefix_tier, self.view
        if tier is not None:
            verdict = view.verdict
            pays, open_now = self._gates[tier].pays(self.prefill_rate), tier.open
            if verdict.passes is not pays or verdict.open is not open_now:
                view.verdict = _Verdict(pays, open_now)  # else the same object, which compares at once
                view.stamp += 1
        view.now = self._clock()
        self._read_positions(view)
        self.looked = True
        return view

    def _read_positions(self, view: View) -> None:
        positions = self.primary_tier.changes.position, self._answers.position
        if positions != view.positions:
            view.positions = positions
            view.stamp += 1
            view.news.clear()

    def _untouched(self, prefix: Prefix, request_id: str, view: View) -> bool:
        """Whether nothing that has changed since concerns the prefix."""
        if prefix.positions in view.news:
            news = view.news[prefix.positions]
        else:
            news = view.news[prefix.positions] = self._changed_since(prefix.positions)
        if news is None or request_id in news.requests:
            return False
        if news.chunks:
            if prefix.members is None:
                prefix.members = frozenset(prefix.keys)
            if not prefix.members.isdisjoint(news.chunks):
                return False
        prefix.positions = view.positions
        return True

    def _changed_since(self, positions: tuple[int, ...]) -> _News | None:
        chunks = self.primary_tier.changes.since(positions[0])
        requests = self._answers.since(positions[1])
        return None if chunks is None or requests is None else _News(frozenset(chunks), frozenset(requests))

    def _verdict(self, req_context: ReqContext, view: View) -> _Verdict:
        if view.verdict.passes or self._prefix_tier is None:
            return view.verdict
        passes = self._gates[self._prefix_tier].passes(req_context.req_id, self.prefill_rate, view.now)
        return _Verdict(passes, view.verdict.open)

    def _answer(
        self, keys: Sequence[OffloadKey], req_context: ReqContext, wait: _Wait, view: View
    ) -> tuple[int | None, float, _Verdict | None, int, int]:
        """(what lookup_prefix says, until when it is good, the verdict it rests on, Prefix.ready, Prefix.coming)."""
        ready = self.primary_tier.ready
        if ready.issuperset(keys):
            return len(keys), math.inf, None, len(keys), len(keys)
        first = 0 if keys[0] not in ready else list(map(ready.__contains__, keys)).index(False)
        if wait.deadline is not None and view.now >= wait.deadline:
            self._count_miss(MissReason.REQUEST_DEADLINE)
            return first, math.inf, None, first, first
        resident = self.primary_tier.resident
        missing = keys[first:] if first else keys
        if not resident.isdisjoint(missing):
            missing = [key for key in missing if key not in resident]
        asked = self._ask_for(missing, req_context, wait, view) if missing else _Asked(None, math.inf, None, True)
        if asked.stop == keys[first]:
            return first, asked.good_until, asked.verdict, first, first
        if wait.deadline is None:
            wait.deadline = view.now + self._wait_seconds
        coming = 0
        if asked.found_out:
            coming = len(keys) if asked.stop is None else keys.index(asked.stop)
        return None, min(asked.good_until, wait.deadline), asked.verdict, first, coming

    def _ask_for(self, missing: Sequence[OffloadKey], req_context: ReqContext, wait: _Wait, view: View) -> _Asked:
        """Have the chunks looked for and promoted, up to the first that no tier can give."""
        tier = self._prefix_tier
        if tier is None:  # several tiers, or one of vLLM's own: one chunk after the other, and never remembered
            stop = next((key for key in missing if self._ask_tiers(key, req_context) is False), None)
            return _Asked(stop, -math.inf, None, found_out=False)
        verdict = self._verdict(req_context, view)
        if not verdict.passes:
            self._count_not_worth(tier.tier_type)
            return _Asked(missing[0], math.inf, verdict, found_out=True)
        found, good_until = tier.lookup_prefix(missing, req_context)
        if found.count(Lookup.HIT) == len(missing):  # the usual prompt that is in the tier, without a loop
            hits = list(missing)
        else:
            hits = [key for key, answer in zip(missing, found, strict=False) if answer is Lookup.HIT]
        promoted = self._promote(tier, hits, req_context, wait) if hits else 0
        if promoted < len(hits):
            self._count_miss(MissReason.NO_ROOM)
            return _Asked(hits[promoted], -math.inf, verdict, found_out=False)  # there may be room at any time
        stop = missing[len(found) - 1] if found[-1] is Lookup.MISS else None
        return _Asked(stop, good_until, verdict, found_out=len(hits) == len(found) - (stop is not None))

    def _promote(self, tier: SecondaryTierManager, keys: list[OffloadKey], req_context: ReqContext, wait: _Wait) -> int:
        """Give as many of `keys`, from the first on, rows and queue their loads as the bounds allow; how many."""
        bounds = self._bounds
        room = min(
            bounds.in_flight_rows_max - bounds.rows_in_flight, bounds.request_rows_max - wait.rows_promoted, len(keys)
        )
        if room <= 0:
            return 0
        written = self.primary_tier.prepare_write(keys[:room], req_context)
        if written is None:  # not for all of them: then for as many as there is room for
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

    def count_request(self, keys: Sequence[OffloadKey]) -> None:
        """The chunks of a request that is new, once, for what a full tier admits."""
        for tier in self._shared_tiers:
            tier.count_request(keys)

    def on_schedule_end(self) -> None:
        """As upstream's, in fewer calls: this is every step."""
        if not self._processed_jobs_this_step:
            self._process_finished_jobs()
        self._processed_jobs_this_step = False
        if self._pending_load_submissions:
            self._flush_pending_promotions()
        for tier in self.secondary_tiers:
            tier.on_schedule_end()
        self.looked = False

    def weights_changed(self) -> None:
        """What the shared tiers hold belongs to a model that is no more: they are neither read nor written again."""
        for tier in self._shared_tiers:
            tier.weights_changed()

    def _process_finished_jobs(self) -> None:
        for tier in self.secondary_tiers:
            for result in tier.get_finished_jobs():
                self._complete(tier, result)
        if self.loads_begin_early and self._prefix_tier is not None and self._bounds.rows_in_flight:
            for job_id, arrived in self._prefix_tier.take_arrived():
                if job_id not in self._forgotten:
                    self._take_in(job_id, arrived)

    def _take_in(self, job_id: int, arrived: list[OffloadKey]) -> None:
        """These chunks of a promotion have come; from here on its job is about the others."""
        job = self._transfer_jobs[job_id]
        come = set(arrived)
        job.keys = [key for key in job.keys if key not in come]
        self._taken_in[job_id] = self._taken_in.get(job_id, 0) + len(arrived)
        self._bounds.rows_in_flight -= len(arrived)
        self.primary_tier.complete_write(arrived, job.req_context, True)

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Rows, pinned; or, where some chunks have still to come, ComingRows: nothing is pinned yet."""
        self._maybe_process_finished_jobs()  # type: ignore[no-untyped-call]
        if self.loads_begin_early and not self.primary_tier.ready.issuperset(keys):
            return ComingRows(list(keys))
        return self.primary_tier.prepare_load(keys, req_context)

    def _complete(self, tier: SecondaryTierManager, result: JobResult) -> None:
        job = self._transfer_jobs.pop(result.job_id)
        forgotten_rows = self._forgotten.pop(result.job_id, None)
        if forgotten_rows is not None:
            self.primary_tier.release(forgotten_rows)
        if not job.is_promotion:
            if forgotten_rows is None:
                self.primary_tier.complete_read(job.keys, job.req_context)
            return
        self._bounds.rows_in_flight -= len(job.keys)
        arrived: Collection[OffloadKey] = job.keys if result.success else ()
        lost: Collection[OffloadKey] = () if result.success else job.keys
        if isinstance(result, TierJobResult):
            if result.failed_keys:
                arrived = [key for key in job.keys if key not in result.failed_keys]
                lost = [key for key in job.keys if key in result.failed_keys]
            chunks = len(arrived) + self._taken_in.pop(result.job_id, 0)
            self._gates[tier].load_rate.add(chunks * self._chunk_bytes, result.seconds, self._clock())
            self._unreported = True
        if forgotten_rows is not None:
            return
        if arrived:
            self.primary_tier.complete_write(arrived, job.req_context, True)
        if lost:
            self.primary_tier.complete_write(lost, job.req_context, False)

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        # Upstream polls for ended jobs here, too, and takes that for the next step's poll: what ends in between would
        # be seen a step late.
        polled = self._processed_jobs_this_step
        output = super().prepare_store(keys, req_context)
        self._processed_jobs_this_step = polled
        return output

    def distrust_store(self, keys: Collection[OffloadKey]) -> None:
        """The device copy of these chunks failed: the coming complete_store must free their rows."""
        self._distrusted.update(keys)

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        self.looked = False  # whoever asks next sees what has changed, whether or not a step lies between
        failed = self._distrusted.intersection(keys)
        if failed:
            self._distrusted -= failed
            super().complete_store(failed, req_context, success=False)
            keys = [key for key in keys if key not in failed]
        if keys:
            super().complete_store(keys, req_context, success)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._bounds.waits.pop(req_context.req_id, None)
        if len(self._shared_tiers) == len(self.secondary_tiers):
            return RequestOffloadingContext()  # ours have no wishes of their own
        return super().on_new_request(req_context)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._bounds.waits.pop(req_context.req_id, None)
        super().on_request_finished(req_context)

    def reset_cache(self) -> None:
        """Forget the CPU tier. Jobs of the shared tiers go on; the rows they use are kept back until they end."""
        self._flush_pending_promotions()
        self._process_finished_jobs()
        for job_id, job in self._transfer_jobs.items():
            if job_id not in self._forgotten:
                self._forgotten[job_id] = self.primary_tier.rows_of(job.keys)
        self._distrusted.clear()
        self._bounds.waits.clear()
        self.looked = False
        self.primary_tier.reset_cache()
        self._resets["done"] += 1
        self._unreported = True

    def count_refused_reset(self) -> None:
        self._resets["refused"] += 1
        self._unreported = True

    def take_stats(self) -> SpillwayStats | None:
        """What happened since the last call, as vLLM's stats; called once per engine step, where mostly nothing has."""
        changed = self.primary_tier.changes.position, self.prefill_rate.updated_at
        if (
            changed == self._reported_changes
            and not self._unreported
            and not any(tier.report.has_news() for tier in self._shared_tiers)
        ):
            return None
        self._reported_changes, self._unreported = changed, False
        stats = SpillwayStats()
        used = self.primary_tier.used_rows()
        if used != self._reported_rows:
            self._reported_rows = used
            stats.add(metrics.CPU_TIER_BLOCKS, used, "used")
            stats.add(metrics.CPU_TIER_BLOCKS, self._num_rows, "total")
        if (rate := self.prefill_rate.per_second) is not None and rate != self._reported_rates.get(""):
            self._reported_rates[""] = rate
            stats.add(metrics.PREFILL_RATE, rate)
        for outcome, count in self._resets.items():
            if count:
                stats.add(metrics.CPU_TIER_RESETS, count, outcome)
                self._resets[outcome] = 0
        for shared in self._shared_tiers:
            shared.report.add_to(stats)
        for tier, gate in self._gates.items():
            rate = gate.load_rate.per_second
            if rate is not None and rate != self._reported_rates.get(tier.tier_type):
                self._reported_rates[tier.tier_type] = rate
                stats.add(metrics.TIER_LOAD_RATE, rate, tier.tier_type)
        for tier_type, count in self._not_worth.items():
            if count:
                stats.add(metrics.TIER_NOT_WORTH, count, tier_type)
                self._not_worth[tier_type] = 0
        for (tier_type, reason), count in self._misses.items():
            stats.add(metrics.TIER_MISSES, count, tier_type, reason.value)
        self._misses.clear()
        return stats
