"""Asking about a whole prefix, with its memory of the last answer, against asking about one chunk after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from vllm.v1.kv_offload.base import ReqContext, RequestOffloadingContext, make_offload_key

from spillway_connector.config import ConnectorConfig
from spillway_connector.engine.shared_tiers.prefix_tier import PrefixTier, TierJobResult
from spillway_connector.plan.prefix_memo import ChangeLog
from spillway_connector.testing.clock import SteppedClock
from spillway_connector.testing.generation import (
    HIT,
    MISS,
    RETRY,
    STEP_END,
    SpillwayTieringManager,
    make_cpu_tier,
    rows_on_the_way,
)
from spillway_connector.testing.memory import unnamed_region
from spillway_connector.transfer.jobs import Behind
from spillway_connector.transfer.lookups import Answers, Lookup

ROWS, CHUNKS, PROMPTS = 20, 6, 3  # all prompts fit, so a look-up evicts none of the chunks it asks about
FILLERS = [bytes([200 + number]) * 36 for number in range(10)]


def prompt_keys(prompt: int) -> list[bytes]:
    """The first two chunks are common to all prompts."""
    return [make_offload_key(bytes([0 if at < 2 else prompt, at]) * 16, 0) for at in range(CHUNKS)]


class ScriptedTier(PrefixTier):
    """Answers at once from `holds` (absent: miss; None: still looking) and ends jobs when the test chooses."""

    def __init__(self) -> None:
        self.tier_type = "scripted"
        self.answered_requests = ChangeLog()
        self.askers: dict[bytes, set[str]] = {}
        self.holds: dict[bytes, bool | None] = {}
        self.resting = False
        self.questions = 0
        self.loads, self.stores, self.ended, self.arrived = [], [], [], []

    def take_arrived(self):
        arrived, self.arrived = self.arrived, []
        return arrived

    @property
    def open(self) -> bool:
        return not self.resting

    def lookup(self, key, req_context):
        return {True: HIT, None: RETRY, False: MISS}[self.look_up(key, req_context)]

    def look_up(self, key: bytes, req_context: ReqContext) -> bool | None:
        self.questions += 1
        self.askers.setdefault(key, set()).add(req_context.req_id)
        return False if self.resting else self.holds.get(key, False)

    def lookup_prefix(self, keys: Sequence[bytes], req_context) -> Answers:
        found = []
        for key in keys:
            held = self.look_up(key, req_context)
            found.append(Lookup.PENDING if held is None else Lookup.HIT if held else Lookup.MISS)
            if held is False:
                break
        return Answers(found, float("inf"))

    def set_held(self, keys: Sequence[bytes], held: bool | None) -> None:
        self.holds.update(dict.fromkeys(keys, held))
        self.report(keys)

    def report(self, keys: Sequence[bytes]) -> None:
        self.answered_requests.add(set().union(*(self.askers.get(key, ()) for key in keys)))

    def submit_store(self, job_metadata):
        self.stores.append(job_metadata)

    def submit_load(self, job_metadata):
        self.loads.append(job_metadata)

    def get_finished_jobs(self):
        ended, self.ended = self.ended, []
        return ended

    def on_new_request(self, req_context):
        return RequestOffloadingContext()


class Stack:
    def __init__(self, name: str, tiers: int = 1) -> None:
        self.clock = SteppedClock()
        self.tiers = [ScriptedTier() for _ in range(tiers)]
        self.tier = self.tiers[0]
        self.region = unnamed_region(ROWS, 4096)
        self.manager = SpillwayTieringManager(
            make_cpu_tier(ROWS, self.region, "lru", enable_events=False),
            list(self.tiers),
            ROWS,
            ConnectorConfig.parse(
                {
                    "num_cpu_blocks": ROWS,
                    "prefill_tokens_per_second": 1280.0,
                    "promotion_in_flight_fraction": 5 / ROWS,
                    "promotion_per_request_fraction": 0.3,
                }
            ),
            chunk_tokens=128,
            chunk_bytes=4096,
            clock=self.clock,
        )
        self.manager.serve_half(loads_begin_early=True, late_stores=None)
        self.requests: dict[str, ReqContext] = {}
        self.reset()

    def reset(self) -> None:
        self.manager.reset_cache()
        for prompt in range(PROMPTS):
            self.requests[f"r{prompt}"] = ReqContext(req_id=f"r{prompt}")
            self.manager.on_new_request(self.requests[f"r{prompt}"])

    def naive(self, keys: Sequence[bytes], request: str) -> int | None:
        """Upstream's search."""
        hits, deferred = 0, False
        for key in keys:
            answer = self.manager.lookup(key, self.requests[request])
            if answer is MISS:
                break
            deferred |= answer is not HIT
            hits += 1
        return None if deferred else hits

    def _use_prompts(self, context: ReqContext) -> None:
        for prompt in range(PROMPTS):
            self.manager.touch(prompt_keys(prompt), context)

    def apply(self, action: str, prompt: int, number: int) -> None:
        keys = prompt_keys(prompt)
        context = self.requests[f"r{prompt}"]
        if action == "hold":
            self.tier.set_held(keys[: number + 1], True)
        elif action == "look":
            self.tier.set_held(keys[number:], None)
        elif action == "lose":
            self.tier.set_held(keys[number:], False)
        elif action == "rest":
            self.tier.resting = not self.tier.resting
        elif action == "store":
            output = self.manager.prepare_store(keys[number : number + 2], context)
            if output is not None and output.keys_to_store:
                self.manager.complete_store(output.keys_to_store, context, number % 2 == 0)
        elif action == "end":
            for jobs in (self.tier.loads, self.tier.stores):
                for job in jobs[: number + 1]:
                    failed = [key for at, key in enumerate(job.keys) if job.is_promotion and at % 3 == 1 and number > 3]
                    for key in failed:
                        self.tier.holds[key] = False
                    self.tier.report(failed)
                    self.tier.ended.append(
                        TierJobResult(job.job_id, not failed, failed_keys=frozenset(failed), seconds=0.05 * number)
                    )
                del jobs[: number + 1]
        elif action == "arrive":
            reported = {key for _, keys in self.tier.arrived for key in keys}
            for job in self.tier.loads[:1]:
                fresh = [key for key in job.keys if key not in reported][: number + 1]
                if fresh:
                    self.tier.arrived.append((job.job_id, fresh))
        elif action == "evict":
            self._use_prompts(context)  # the two ways of looking up leave chunks in another order of use
            output = self.manager.prepare_store(FILLERS[: 2 * number], context)
            if output is not None and output.keys_to_store:
                self.manager.complete_store(output.keys_to_store, context)
            self._use_prompts(context)  # the fillers are the first to leave
        elif action == "wait":
            self.clock.advance(0.5 * number)
        elif action == "again":
            self.manager.on_request_finished(context)
            self.manager.on_new_request(context)
        self.manager.on_schedule_end(*STEP_END)


ACTIONS = (
    "hold",
    "hold",
    "look",
    "lose",
    "rest",
    "store",
    "end",
    "end",
    "arrive",
    "arrive",
    "evict",
    "wait",
    "again",
    "nothing",
)
schedules = st.lists(
    st.tuples(st.sampled_from(ACTIONS), st.integers(0, PROMPTS - 1), st.integers(0, CHUNKS - 1)), max_size=40
)


@pytest.fixture(scope="module", params=[1, 2], ids=["one tier", "two tiers"])
def stacks(request: pytest.FixtureRequest) -> Iterator[int]:
    yield request.param


@settings(
    max_examples=3 * settings.default.max_examples // 2,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(schedule=schedules)
@example(schedule=[("store", 0, 0), ("hold", 0, 5), ("hold", 1, 2), ("hold", 2, 5), ("end", 0, 0), ("evict", 0, 5)])
def test_a_prefix_is_answered_as_its_chunks_one_by_one(stacks: int, schedule: list[tuple[str, int, int]]):
    whole, single = Stack("whole", stacks), Stack("single", stacks)
    try:
        for action, prompt, number in schedule:
            for prompt_asked in range(PROMPTS):
                keys, name = prompt_keys(prompt_asked), f"r{prompt_asked}"
                assert whole.manager.lookup_prefix(keys, whole.requests[name]) == single.naive(keys, name)
            for stack in (whole, single):
                stack.manager.on_schedule_end(*STEP_END)
                stack.apply(action, prompt, number)
            for ours, theirs in zip(whole.tiers, single.tiers, strict=True):
                promoted = [sorted(key for job in tier.loads for key in job.keys) for tier in (ours, theirs)]
                assert promoted[0] == promoted[1]
            assert whole.manager.primary_tier.ready == single.manager.primary_tier.ready
            assert set(whole.manager.primary_tier.resident) == set(single.manager.primary_tier.resident)
    finally:
        for stack in (whole, single):
            stack.region.cleanup()


@pytest.fixture
def stack() -> Iterator[Stack]:
    stack = Stack("one")
    yield stack
    stack.region.cleanup()


def test_a_request_that_waits_asks_the_tier_only_when_something_has_changed(stack: Stack):
    keys, context = prompt_keys(1), stack.requests["r1"]
    stack.tier.set_held(keys, None)
    for _ in range(5):
        assert stack.manager.lookup_prefix(keys, context) is None
        stack.apply("nothing", 0, 0)
    assert stack.tier.questions == CHUNKS
    stack.tier.set_held(prompt_keys(2)[2:], True)  # of no concern to it
    assert stack.manager.lookup_prefix(keys, context) is None
    stack.apply("nothing", 0, 0)
    assert stack.tier.questions == CHUNKS
    stack.tier.set_held(keys[:1], True)
    assert stack.manager.lookup_prefix(keys, context) is None
    assert stack.tier.questions == 2 * CHUNKS
    assert [list(job.keys) for job in stack.tier.loads] == [keys[:1]], "loaded at once, not at the end of the step"


def test_the_chunks_of_a_request_are_promoted_as_one_job(stack: Stack):
    keys = prompt_keys(1)[:5]
    stack.tier.set_held(keys, True)
    assert stack.manager.lookup_prefix(keys, stack.requests["r1"]) is None
    (job,) = stack.tier.loads
    assert job.keys == keys
    assert sorted(rows_on_the_way(job)) == list(range(5))


def test_what_a_prefix_ended_at_is_counted_by_reason(stack: Stack):
    keys = prompt_keys(1)
    stack.tier.set_held(keys, True)
    stack.manager.lookup_prefix(keys, stack.requests["r1"])  # 5 of 6: a quarter of 20 rows may be in flight
    stack.clock.advance(3.1)
    stack.apply("nothing", 0, 0)
    assert stack.manager.lookup_prefix(keys, stack.requests["r1"]) == 0
    samples = stack.manager.take_samples().samples()
    assert samples["spillway_tier_misses|scripted|no_room"] == 1
    assert samples["spillway_tier_misses|scripted|request_deadline"] == 1


def test_whether_loads_pay_is_reported_each_time(stack: Stack):
    """vLLM may drop the statistics of a step. Of a change that was dropped the gateway would never hear, and expect
    nothing of the tier from then on."""

    def reported() -> float | None:
        stack.clock.advance(1.0)
        stack.manager.prefill_rate.add(1000, 1.0, stack.clock())
        samples = stack.manager.take_samples()
        return None if samples is None else samples.samples().get("spillway_tier_loads_pay|scripted")

    (gate,) = stack.manager._gates.values()
    assert (reported(), reported()) == (1.0, 1.0), "loads pay before anything is known of the tier"
    gate.load_rate.add(1.0, 1.0, stack.clock())
    assert (reported(), reported()) == (0.0, 0.0)
    gate.load_rate.replace(1e12, 1.0, stack.clock())
    assert (reported(), reported()) == (1.0, 1.0)


def test_a_requests_own_chunks_make_no_room_for_its_others(stack: Stack):
    keys, context = prompt_keys(1), stack.requests["r1"]
    others = [make_offload_key(bytes([100 + number]) * 32, 0) for number in range(ROWS - 3)]
    for stored in (keys[:3], others):  # its beginning is the oldest of a full tier
        output = stack.manager.prepare_store(stored, context)
        assert output is not None
        stack.manager.complete_store(output.keys_to_store, context)
    stack.apply("end", 1, 1)  # the stores of both to the tier
    assert stack.manager.primary_tier.free_rows() == 0
    stack.tier.set_held(keys, True)
    assert stack.manager.lookup_prefix(keys, context) is None
    (job,) = stack.tier.loads
    assert job.keys == keys[3:]
    assert stack.manager.primary_tier.ready.issuperset(keys[:3])


def test_a_requests_own_chunks_make_no_room_for_its_others_even_if_nothing_else_can(stack: Stack):
    """Rows whose stores are under way cannot be freed while the tier stores slowly."""
    keys, context = prompt_keys(1), stack.requests["r1"]
    others = [make_offload_key(bytes([100 + number]) * 32, 0) for number in range(ROWS - 4)]
    for stored in (keys[:3], others):
        output = stack.manager.prepare_store(stored, context)
        assert output is not None
        stack.manager.complete_store(output.keys_to_store, context)
    stack.apply("end", 1, 0)  # the first of the two stores to the tier
    tier = stack.manager.primary_tier
    assert tier.free_rows() == 1
    stack.tier.set_held(keys, True)
    stack.manager.lookup_prefix(keys, context)
    assert tier.ready.issuperset(keys[:3]), "its beginning left for its end"
    assert [list(job.keys) for job in stack.tier.loads] == [keys[3:4]], "as far as rows go"


def test_what_is_stored_is_known_whatever_a_load_would_cost(stack: Stack):
    keys, context = prompt_keys(1), stack.requests["r1"]
    gate = stack.manager._gates[stack.tier]
    assert stack.manager.rates() is None and not stack.manager.is_slower_than_computing()
    gate.load_rate.add(4096, 0.2, now=0.0)  # a chunk in 200 ms, where it is computed in 100
    assert stack.manager.rates() == pytest.approx((10.0, 5.0))
    assert stack.manager.is_slower_than_computing()
    stack.tier.set_held(keys[:3], None)
    assert stack.manager.stored_chunks(keys, context) is None
    stack.tier.set_held(keys[:3], True)
    assert stack.manager.stored_chunks(keys, context) == 3
    stack.tier.set_held(keys, True)
    assert stack.manager.stored_chunks(keys, context) == CHUNKS
    assert not stack.tier.loads, "asking is not loading"
    stack.tier.resting = True
    assert not stack.manager.is_slower_than_computing()


def test_chunks_are_promoted_in_the_order_they_are_asked_for_as_far_as_rows_go(stack: Stack):
    keys, context = prompt_keys(1), stack.requests["r1"]
    stack.tier.set_held(keys, True)
    backwards = keys[::-1]
    assert stack.manager.promote_meanwhile(backwards[:2], context) == 2
    assert stack.manager.promote_meanwhile(backwards, context) == 5, "one of six has no row: a quarter may be in flight"
    assert [list(job.keys) for job in stack.tier.loads] == [backwards[:2], backwards[2:5]]
    assert stack.manager.promote_meanwhile(backwards[:5], context) == 5, "they are on their way"


def test_a_request_that_may_meet_its_load_is_no_probe(stack: Stack):
    keys, context = prompt_keys(1), stack.requests["r1"]
    stack.manager._gates[stack.tier].load_rate.add(4096, 0.2, now=0.0)
    stack.tier.set_held(keys, True)
    stack.manager.forbid_probing("r1")
    assert stack.manager.lookup_prefix(keys, context) == 0
    assert not stack.tier.loads
    assert stack.manager.lookup_prefix(keys, stack.requests["r2"]) is None, "another one probes"


def test_a_request_whose_load_was_given_up_computes_and_the_next_one_does_not_load(stack: Stack):
    """The tier has no measured rate yet: it is the first load of its life."""
    keys = prompt_keys(1)
    stack.tier.set_held(keys, True)
    assert stack.manager.lookup_prefix(keys, stack.requests["r1"]) is None
    stack.apply("end_step", 1, 0)
    (job,) = stack.tier.loads
    stack.tier.set_held(keys, False)  # as after any failed load, until it is asked again
    stack.tier.ended.append(
        TierJobResult(job.job_id, False, failed_keys=frozenset(job.keys), behind=Behind(chunks=0.2, seconds=0.3))
    )
    stack.manager.on_schedule_end(*STEP_END)
    assert stack.manager.lookup_prefix(keys, stack.requests["r1"]) == 0
    stack.tier.set_held(keys, True)
    assert stack.manager.lookup_prefix(keys, stack.requests["r2"]) == 0, "it was measured, and probing can wait"


def test_loads_are_compared_with_computing_once_a_step_unless_their_request_is_computed_meanwhile(stack: Stack):
    asked: list[tuple[float, list[bool]]] = []

    def give_up_behind(seconds_per_chunk, spared):
        asked.append((seconds_per_chunk, [spared(job.job_id) for job in stack.tier.loads]))

    stack.tier.give_up_behind = give_up_behind
    stack.manager._shared_tiers = [stack.tier]
    keys = prompt_keys(1)
    stack.tier.set_held(keys, True)
    assert stack.manager.lookup_prefix(keys, stack.requests["r1"]) is None
    stack.manager._flush_promotions()
    stack.manager._process_finished_jobs()
    stack.manager.forbid_probing("r1")
    stack.manager._process_finished_jobs()
    assert asked == [(0.1, [False]), (0.1, [True])]


def test_the_log_says_what_was_decided_about_a_load_and_why(stack: Stack, decisions: list[str]):
    keys, context = prompt_keys(1), stack.requests["r1"]
    stack.tier.set_held(keys, False)
    stack.manager.lookup_prefix(keys, context)
    stack.apply("hold", 1, CHUNKS)
    stack.manager.lookup_prefix(keys, context)  # 5 of 6: a quarter of 20 rows may be in flight
    stack.clock.advance(3.1)
    stack.apply("nothing", 0, 0)
    stack.manager.lookup_prefix(keys, context)
    assert decisions == [
        "request r1: 0 of 6 chunks are in the CPU tier; 0 can be loaded: the tier lacks the next one",
        "request r1: 0 of 6 chunks are in the CPU tier; it waits: there are no rows to promote more",
        "request r1: job 0 promotes 5 chunks",
        "request r1: 0 of 6 chunks are in the CPU tier; 0 can be loaded: its time for waiting is over",
    ]


def test_the_log_says_what_was_decided_about_a_store_and_why(stack: Stack, decisions: list[str]):
    keys, context = prompt_keys(1), stack.requests["r1"]
    stack.manager.complete_store(stack.manager.prepare_store(keys, context).keys_to_store, context)
    stack.manager.prepare_load(keys, context)
    stack.manager.prepare_store([bytes([100 + number]) * 36 for number in range(ROWS)], context)
    assert decisions == [
        "request r1: 6 of 6 chunks are copied to the CPU tier, the others are there; 0 others are evicted",
        "request r1: job 0 stores 6 chunks",
        "request r1 loads 6 chunks to the device: all are in the CPU tier",
        "request r1: 20 chunks are not stored: no rows can be freed",
    ]
