"""Prompts that are computed and loaded at once: when, how far each goes, and what ends it.

Requests of sixteen chunks, and a shared tier that loads half as fast as the device computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import PoolingParams
from vllm.config import SchedulerConfig
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_offload.base import RequestOffloadingContext
from vllm.v1.request import Request, RequestStatus

from spillway_connector import metrics
from spillway_connector.config import ConnectorConfig
from spillway_connector.engine.features.meetings import _LOOKUP_SECONDS_MAX
from spillway_connector.engine.generation import Generation, generation
from spillway_connector.engine.ipc.samples import sample_key
from spillway_connector.engine.shared_tiers.prefix_tier import PrefixTier, TierJobResult
from spillway_connector.plan.load_cost import RateMeter
from spillway_connector.plan.meeting import HOLD_SECONDS_MAX, MeetingOutcome
from spillway_connector.plan.prefix_memo import ChangeLog
from spillway_connector.testing.generation import (
    SpillwayConnectorScheduler,
    SpillwayTieringManager,
    make_cpu_tier,
    make_scheduler_control,
    scheduler_half,
    step_output,
)
from spillway_connector.testing.memory import unnamed_region
from spillway_connector.testing.requests import request_of
from spillway_connector.testing.vllm_parts import part_of
from spillway_connector.transfer.lookups import Answers, Lookup

CHUNKS, CHUNK_TOKENS, ROWS = 16, 16, 24
TOKENS = CHUNKS * CHUNK_TOKENS + 1
COMPUTED, LOADED = 20.0, 10.0  # chunks a second; STEP_SECONDS of computing is one chunk
CHUNK_BYTES = 4096


class ScriptedTier(PrefixTier):
    """Holds what `stored` says; ends jobs when the test does."""

    tier_type = "scripted"
    open = True

    def __init__(self) -> None:
        self.answered_requests = ChangeLog()
        self.stored: Lookup = Lookup.HIT
        self.jobs: list[Any] = []
        self.ended: list[TierJobResult] = []

    def lookup(self, key, req_context):
        raise AssertionError("one prefix is asked for at once")

    def lookup_prefix(self, keys: Sequence[bytes], req_context) -> Answers:
        return Answers([self.stored] * (1 if self.stored is Lookup.MISS else len(keys)), float("inf"))

    def submit_load(self, job_metadata) -> None:
        self.jobs.append(job_metadata)

    def submit_store(self, job_metadata) -> None:
        self.ended.append(TierJobResult(job_metadata.job_id, success=True))

    def end(self, lost: frozenset[bytes] = frozenset()) -> None:
        """All loads, at the tier's rate."""
        for job in self.jobs:
            result = TierJobResult(job.job_id, not lost, failed_keys=lost, seconds=len(job.keys) / LOADED)
            self.ended.append(result)
        self.jobs.clear()

    def get_finished_jobs(self):
        ended, self.ended = self.ended, []
        return ended

    def on_new_request(self, req_context):
        return RequestOffloadingContext()

    def on_schedule_end(self, *_: Any) -> None:
        pass

    def drain_jobs(self) -> None:
        raise AssertionError("the connector's own manager drains no tier")


def prompt(request_id: str = "asked", **others: Any) -> Request:
    """A request that waits. others: arguments of vLLM's Request."""
    hashes = [bytes([number]) * 32 for number in range(CHUNKS)]
    return request_of(
        request_id, hashes, tokens=TOKENS, block_tokens=CHUNK_TOKENS, status=RequestStatus.WAITING, **others
    )


class Engine:
    """The connector's half and, of vLLM's scheduler, what a meeting touches."""

    def __init__(self) -> None:
        self.tier = ScriptedTier()
        self.region = unnamed_region(ROWS, CHUNK_BYTES)
        self.manager = SpillwayTieringManager(
            make_cpu_tier(ROWS, self.region, "lru", enable_events=False),
            [self.tier],
            ROWS,
            ConnectorConfig.parse({"num_cpu_blocks": ROWS, "prefill_tokens_per_second": COMPUTED * CHUNK_TOKENS}),
            chunk_tokens=CHUNK_TOKENS,
            chunk_bytes=CHUNK_BYTES,
        )
        self.loads_at(LOADED)
        attention = FullAttentionSpec(block_size=CHUNK_TOKENS, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
        settings = ConnectorConfig.parse({"num_cpu_blocks": ROWS, "compute_while_loading": "on"})
        half = scheduler_half(self.manager, [attention], settings=settings)
        assert isinstance(half, SpillwayConnectorScheduler)
        assert half.meetings is not None
        self.half, self.meetings = half, half.meetings
        self.now = 1000.0
        self.meetings._clock = lambda: self.now
        self.config = part_of(SchedulerConfig, long_prefill_token_threshold=0)
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.pause_state = PauseState.UNPAUSED
        self.free_blocks = 100
        self.kv_cache_manager = SimpleNamespace(block_pool=self, watermark_blocks=0)
        self._spec_decode_step_blocks = 0
        self.scheduler_config = self.config
        self.prev_step_scheduled_req_ids: set[str] = set()
        self.current_step = self.parts_min = 0
        self.newest: Request | None = None
        self.limit = 0  # of its tokens, in the last step; 0: none
        self.schedule()

    def loads_at(self, chunks_per_second: float) -> None:
        self.manager._gates[self.tier].load_rate = RateMeter(1.0, pinned=chunks_per_second * CHUNK_BYTES)

    def get_num_free_blocks(self) -> int:
        return self.free_blocks

    def _inflight_prefill_reserved_blocks(self) -> int:
        return 10

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        return num_new_tokens if num_new_tokens >= self.parts_min else 0

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        request.status, request.num_computed_tokens = RequestStatus.PREEMPTED, 0
        self.waiting.insert(0, request)

    def schedule(self) -> None:
        def step() -> Any:
            self.current_step += 1
            self.limit = self.bound_of(self.newest) if self.newest is not None else 0
            self.half.build_connector_meta(step_output())

        self.meetings.schedule(self, step)

    def bound_of(self, request: Request) -> int:
        """Return how many tokens of it the step that is being scheduled may compute; 0: any number."""
        if generation() is Generation.V023:
            return self.config.long_prefill_token_threshold
        tokens = self._reserve_prefill_lookahead(request, request.num_computed_tokens, TOKENS)
        return 0 if tokens == TOKENS else tokens

    def ask(self, request: Request, computed: int = 0) -> tuple[int | None, bool]:
        self.newest = request
        if request.request_id not in self.half._req_status:
            self.half.on_new_request(request)
        answer = self.half.get_num_new_matched_tokens(request, computed)
        self.half.build_connector_meta(step_output())
        return answer

    def begin(self, request: Request | None = None) -> Request:
        """A request that runs, with a meeting ahead."""
        request = prompt() if request is None else request
        assert self.ask(request) == (None, False), "its first step is not to be scheduled before it is bounded"
        self.schedule()
        assert self.ask(request) == (0, False)
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        return request

    def counted(self) -> dict[str, float]:
        """Prompts by outcome since the last call, as they are reported."""
        samples = self.manager.take_samples()
        found = {} if samples is None else samples.samples()
        by_key = {sample_key(metrics.MEETINGS, outcome.value): outcome.value for outcome in MeetingOutcome}
        return {outcome: found[key] for key, outcome in by_key.items() if key in found}

    def compute(self, request: Request, chunks: int) -> None:
        request.num_computed_tokens = chunks * CHUNK_TOKENS
        self.schedule()


@pytest.fixture
def engine() -> Iterator[Engine]:
    opened = Engine()
    yield opened
    opened.region.cleanup()


def places(job: Any) -> list[int]:
    """Return the chunks of the prompt that a job loads."""
    return [key[0] for key in job.keys]


def test_the_end_of_the_prefix_is_loaded_backwards_while_its_front_is_computed(engine):
    request = engine.begin()
    (job,) = engine.tier.jobs
    assert places(job) == [15, 14, 13, 12, 11], "a third of the chunks, as the tier has a third of the speed"
    assert engine.limit == 11 * CHUNK_TOKENS // 2 // CHUNK_TOKENS * CHUNK_TOKENS, "half of the way"
    assert engine.config.long_prefill_token_threshold == 0, "vLLM's own bound is as it was"
    engine.now += 5 / COMPUTED  # in which 2.5 chunks are loaded, although no step has seen them yet
    engine.compute(request, 5)
    assert engine.limit == 3 * CHUNK_TOKENS
    engine.tier.end()
    engine.compute(request, 8)
    assert [places(job) for job in engine.tier.jobs] == [[10]], "the tier was faster than its rate said"
    assert engine.limit == CHUNK_TOKENS
    engine.compute(request, 10)
    assert request in engine.running
    engine.tier.end()
    engine.compute(request, 10)
    assert request.status is RequestStatus.PREEMPTED and engine.running == [] and engine.meetings.jumps == 1
    assert engine.counted() == {"planned": 1, "met": 1}
    assert engine.ask(request, 10 * CHUNK_TOKENS) == (6 * CHUNK_TOKENS, True), "the rest is an ordinary load"


def test_a_tier_that_stalls_costs_one_bounded_wait(engine):
    request = engine.begin()
    engine.loads_at(100.0)  # so that it looks as if the rest were near
    engine.manager._gates[engine.tier].pays = lambda rate: False
    engine.compute(request, 12)
    assert request.next_decode_eligible_step == engine.current_step + 1, "it is not scheduled in this step"
    engine.now += HOLD_SECONDS_MAX / 2
    engine.compute(request, 12)
    assert request.next_decode_eligible_step == engine.current_step + 1
    engine.now += HOLD_SECONDS_MAX
    for chunks in range(12, CHUNKS):
        engine.compute(request, chunks)
        assert request.next_decode_eligible_step <= engine.current_step, "it waits once"
        assert engine.limit
    engine.compute(request, CHUNKS)
    assert engine.running == [request] and engine.meetings.jumps == 0
    assert not engine.meetings._meetings
    assert engine.counted() == {"planned": 1, "abandoned": 1}


@pytest.mark.skipif(generation() is Generation.V023, reason="vLLM 0.23 bounds all long prompts of a step")
def test_the_step_is_bounded_for_the_request_that_meets_its_load_alone(engine):
    control, request, other = make_scheduler_control(), prompt(), prompt("other")
    with control.bounded(engine, {request.request_id: 40}):
        assert engine._reserve_prefill_lookahead(request, 0, 100) == 40
        assert engine._reserve_prefill_lookahead(request, 0, 30) == 30
        assert engine._reserve_prefill_lookahead(other, 0, 100) == 100
        engine.parts_min = 50  # of vLLM's: what is shorter is not scheduled
        assert engine._reserve_prefill_lookahead(request, 0, 100) == 100, "the request is not to starve"
    assert engine._reserve_prefill_lookahead(request, 0, 100) == 100


def test_a_chunk_that_is_lost_is_computed_and_what_lies_behind_it_loaded(engine):
    request = engine.begin()
    (job,) = engine.tier.jobs
    engine.tier.end(lost=frozenset(list(job.keys)[2:3]))  # chunk 13
    engine.compute(request, 8)
    assert not engine.tier.jobs, "nothing before a chunk that must be computed"
    engine.compute(request, 13)
    assert request in engine.running
    engine.compute(request, 14)
    assert request.status is RequestStatus.PREEMPTED
    assert engine.ask(request, 14 * CHUNK_TOKENS) == (2 * CHUNK_TOKENS, True)


def test_a_request_is_not_preempted_where_it_would_not_come_back_at_once(engine):
    request = engine.begin()
    engine.tier.end()
    engine.free_blocks = 9
    engine.compute(request, 11)
    assert engine.running == [request]
    engine.free_blocks, engine.pause_state = 11, PauseState.PAUSED_NEW
    engine.compute(request, 11)
    assert engine.running == [request]
    engine.pause_state = PauseState.UNPAUSED
    engine.compute(request, 11)
    assert engine.running == []


def test_chunks_that_were_evicted_again_are_computed(engine):
    request = engine.begin()
    engine.tier.end()
    engine.compute(request, 8)
    engine.manager.primary_tier.reset_cache()
    engine.compute(request, 11)
    assert engine.running == [request]
    engine.compute(request, CHUNKS)
    assert engine.counted() == {"planned": 1, "abandoned": 1}


def test_a_reset_ends_the_meetings(engine):
    engine.begin()
    engine.half.reset_cache()
    assert engine.counted() == {"planned": 1, "abandoned": 1}


@pytest.mark.parametrize(
    "others", [{"mm_features": [object()]}, {"resumable": True}, {"pooling_params": PoolingParams()}, {}]
)
def test_requests_that_would_lose_more_than_kv_are_computed(engine, others):
    engine.manager._gates[engine.tier]._probed_at = float("inf")
    request = prompt(**others)
    if not others:
        request.append_output_token_ids(0)
    assert engine.ask(request) == (0, False)
    assert not engine.tier.jobs


def test_a_tier_that_is_faster_than_computing_is_loaded_from_as_ever(engine):
    engine.loads_at(2 * COMPUTED)
    assert engine.ask(prompt()) == (None, False)
    (job,) = engine.tier.jobs
    assert places(job) == list(range(ROWS // 2)), "from the first on, as far as the bound on rows"
    assert not engine.meetings._meetings


def test_a_prefix_that_is_not_stored_is_computed_at_once(engine):
    engine.tier.stored = Lookup.MISS
    assert engine.ask(prompt()) == (0, False)


def test_a_lookup_that_takes_long_is_not_waited_for(engine):
    engine.tier.stored = Lookup.PENDING
    request = prompt()
    assert engine.ask(request) == (None, False)
    engine.now += _LOOKUP_SECONDS_MAX
    assert engine.ask(request) == (0, False)


def test_a_slow_tier_is_not_probed_by_a_request_that_waits_for_all_of_it(engine):
    gate = engine.manager._gates[engine.tier]
    request = engine.begin()
    assert gate._probing_request is None
    engine.tier.end()
    engine.compute(request, 8)
    assert gate._probed_at is not None, "the meeting has measured it"


@pytest.mark.parametrize("when", ["waiting", "running", "preempted"])
def test_a_request_that_is_aborted_leaves_nothing(engine, when):
    request = prompt()
    if when == "waiting":
        engine.ask(request)
    else:
        engine.begin(request)
    if when == "preempted":
        engine.tier.end()
        engine.compute(request, 11)
    request.status = RequestStatus.FINISHED_ABORTED
    engine.half.request_finished(request)
    engine.tier.end()
    engine.schedule()
    if generation() is not Generation.V023:  # the manager learns of it with a step
        engine.half.build_connector_meta(step_output(finished=[request.request_id]))
    assert engine.meetings.idle
    assert engine.counted() == {"planned": 1, "met" if when == "preempted" else "abandoned": 1}
    assert engine.manager.primary_tier.ready == set(engine.manager.primary_tier.resident)
    assert not engine.manager._bounds.rows_in_flight and not engine.manager._bounds.waits


def test_what_a_request_computed_itself_is_not_counted_as_cached(engine):
    request = engine.begin()
    stats = request.prefill_stats
    stats.set(TOKENS, 0, 0)
    engine.tier.end()
    engine.compute(request, 11)
    assert request.status is RequestStatus.PREEMPTED
    if generation() is Generation.V023:  # later ones leave what they counted first
        stats.set(TOKENS, 11 * CHUNK_TOKENS, 5 * CHUNK_TOKENS)
    engine.meetings.admitted(request.request_id, 5 * CHUNK_TOKENS)
    request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.schedule()
    assert (stats.num_local_cached_tokens, stats.num_external_cached_tokens) == (0, 5 * CHUNK_TOKENS)
