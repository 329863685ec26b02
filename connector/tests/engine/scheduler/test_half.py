"""The scheduler half with upstream's real scheduler, real CPU-tier manager and requests of four blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched import output as sched_output
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import make_offload_key
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from spillway_connector.config import ConnectorConfig
from spillway_connector.engine.generation import Generation, generation
from spillway_connector.engine.ipc.messages import SpillwayWorkerMetadata
from spillway_connector.engine.requests.tenancy import tenant_of, tenant_of_context
from spillway_connector.engine.scheduler.settling import HAND_OVER_SECONDS, INTRODUCTION_SECONDS_MAX
from spillway_connector.plan.answers import COUNTED_MIN
from spillway_connector.plan.sessions import SessionHint
from spillway_connector.testing.clock import SteppedClock
from spillway_connector.testing.generation import (
    SpillwayConnectorScheduler,
    SpillwayTieringManager,
    make_cpu_tier,
    scheduler_half,
    step_output,
)
from spillway_connector.testing.memory import unnamed_region
from spillway_connector.testing.requests import allocated, new_request, request_of
from spillway_connector.testing.vllm_parts import part_of
from spillway_connector.transfer.announcements import Announcements

BLOCK_TOKENS, BLOCKS, ROWS = 16, 4, 8
TOKENS = BLOCK_TOKENS * BLOCKS


def request_for(request_id: str, prompt: int = 0, blocks: int = BLOCKS) -> Request:
    """blocks: of the prompt; an answer fills the rest."""
    hashes = [bytes([n, prompt]) * 16 if prompt else bytes([n]) * 32 for n in range(BLOCKS)]
    return request_of(request_id, hashes, tokens=blocks * BLOCK_TOKENS, block_tokens=BLOCK_TOKENS)


def fill(request: Request) -> None:
    request.append_output_token_ids([0] * (TOKENS - request.num_tokens))


@pytest.fixture
def scheduler() -> Iterator[SpillwayConnectorScheduler]:
    with open_scheduler("fixture") as opened:
        yield opened


@contextmanager
def open_scheduler(
    name: str,
    clock: Callable[[], float] = time.monotonic,
    second_group: KVCacheSpec | None = None,
    generated_tokens: str = "on",
) -> Iterator[SpillwayConnectorScheduler]:
    region = unnamed_region(ROWS, 4096)
    config = ConnectorConfig.parse({"num_cpu_blocks": ROWS, "generated_tokens": generated_tokens})
    manager = SpillwayTieringManager(
        make_cpu_tier(ROWS, region, "lru", enable_events=False),
        [],
        ROWS,
        config,
        chunk_tokens=BLOCK_TOKENS,
        chunk_bytes=4096,
        clock=clock,
    )
    attention = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    groups = [attention] if second_group is None else [attention, second_group]
    try:
        yield scheduler_half(manager, groups, num_ranks=2)
    finally:
        region.cleanup()


def report(scheduler, completed: dict[int, int], failed: set[int] = frozenset()) -> None:
    meta = SpillwayWorkerMetadata(completed_jobs=completed, failed_jobs=set(failed))
    scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=meta))


@pytest.mark.parametrize(
    ("blocks", "computed_blocks", "flushed"),
    [
        ([1, 2, 3, 9], 3, False),  # a hit: the store and this request read the same blocks
        ([1, 2, 9, 4], 2, True),  # block 4 was evicted and is written by this step
        ([5, 6, 7, 1], 0, True),
    ],
)
@pytest.mark.parametrize("resumed", [False, True])
def test_only_a_step_that_writes_to_a_block_waits_for_its_store(scheduler, blocks, computed_blocks, flushed, resumed):
    writer = request_for("writer")
    scheduler.on_new_request(writer)
    scheduler.get_num_new_matched_tokens(writer, 0)
    [store] = build_meta(scheduler, {"writer": TOKENS}, {"writer": [1, 2, 3, 4]}).store_jobs
    writer.status = RequestStatus.FINISHED_STOPPED
    scheduler.request_finished(writer)
    computed = computed_blocks * BLOCK_TOKENS
    admit(scheduler, request_for("reader"), blocks, computed)
    reader = [new_request("reader", blocks, computed=computed)]
    output = step_output({"reader": BLOCK_TOKENS}, **{"resumed" if resumed else "new": reader})

    assert scheduler.build_connector_meta(output).jobs_to_flush == ({store} if flushed else set())


@pytest.mark.parametrize("had_more", [False, True])
def test_a_block_that_another_connector_loads_waits_for_its_store(scheduler, had_more):
    """vLLM's MultiConnector: the request is admitted with none of our tokens, and does not run in this step.

    had_more: at its last admission the device had its whole prompt, and its load has failed since.
    """
    writer, loader = request_for("writer"), request_for("loader")
    scheduler.on_new_request(writer)
    scheduler.get_num_new_matched_tokens(writer, 0)
    [store] = build_meta(scheduler, {"writer": TOKENS}, {"writer": [1, 2, 3, 4]}).store_jobs
    writer.status = RequestStatus.FINISHED_STOPPED
    scheduler.request_finished(writer)
    if had_more:
        admit(scheduler, loader, [5, 6, 7, 8], 3 * BLOCK_TOKENS)
        scheduler.build_connector_meta(step_output())
        scheduler._recompute_only.add("loader")
    admit(scheduler, loader, [5, 1, 2, 3], BLOCK_TOKENS)

    assert scheduler.build_connector_meta(step_output()).jobs_to_flush == {store}


def admit(scheduler, request, blocks: list[int], computed_tokens: int) -> None:
    """Admit a request as vLLM does if the connector has nothing for it."""
    if request.request_id not in scheduler._req_status:
        scheduler.on_new_request(request)
    scheduler.get_num_new_matched_tokens(request, computed_tokens)
    scheduler.update_state_after_alloc(request, allocated(blocks), 0)


def test_a_block_that_one_request_hits_and_another_fills_in_this_step_is_written(scheduler):
    """vLLM shares a block within the step that computes it."""
    writer = request_for("writer")
    scheduler.on_new_request(writer)
    scheduler.get_num_new_matched_tokens(writer, 0)
    [store] = build_meta(scheduler, {"writer": TOKENS}, {"writer": [1, 2, 3, 4]}).store_jobs
    writer.status = RequestStatus.FINISHED_STOPPED
    scheduler.request_finished(writer)
    for name in ("first", "second"):
        scheduler.on_new_request(request_for(name))
    new = [new_request("first", [1, 6]), new_request("second", [1, 7], computed=BLOCK_TOKENS)]

    assert scheduler.build_connector_meta(step_output({"first": 32, "second": 16}, new)).jobs_to_flush == {store}


def test_a_request_tells_the_shared_tiers_what_its_session_uses(scheduler, monkeypatch):
    used: list[tuple[str, list[bytes]]] = []
    monkeypatch.setattr(
        scheduler.manager, "use_chunks", lambda keys, prompt, tokens, context: used.append((context.req_id, [*keys]))
    )
    serve(scheduler, request_for("chat", blocks=2))

    (_, prompt), (_, everything) = used
    assert [len(prompt), len(everything)] == [2, BLOCKS] and everything[:2] == prompt
    assert {name for name, _ in used} == {"chat"}


def test_a_request_that_ends_with_the_chunks_it_began_with_does_not_tell_them_again(scheduler, monkeypatch):
    used: list[int] = []
    monkeypatch.setattr(scheduler.manager, "use_chunks", lambda keys, prompt, tokens, context: used.append(len(keys)))
    request = request_for("chat", blocks=2)
    scheduler.on_new_request(request)
    scheduler.get_num_new_matched_tokens(request, 0)
    request.status = RequestStatus.FINISHED_STOPPED
    scheduler.request_finished(request)
    assert used == [2]


def test_what_a_request_asks_to_retain_of_its_prompt_is_held_at_its_beginning_and_at_its_end(scheduler, monkeypatch):
    held: list[tuple[float, float, list[bytes]]] = []
    monkeypatch.setattr(
        scheduler.manager.primary_tier,
        "hold",
        lambda tenant, share, seconds, keys: held.append((share, seconds, [*keys])),
    )
    request = request_for("chat", blocks=3)
    marks = [[BLOCK_TOKENS + 1, 3600], [None, 300]]
    request.kv_transfer_params = {"spillway_retention": {"marks": marks, "share": 0.1}}
    serve(scheduler, request)

    keys = held[1][2]
    assert len(keys) == 3, "the answer is not part of the prompt"
    assert held == 2 * [(0.1, 3600.0, keys[:2]), (0.1, 300.0, keys)], "a mark holds the whole chunk that it is in"


def test_an_engine_that_has_just_started_steps_until_it_has_said_from_which_stores_it_loads(scheduler, monkeypatch):
    news = scheduler.manager.primary_tier.news = Announcements(time.monotonic)
    assert scheduler.without_requests.wanted
    news.take(b"store", usable=True)
    assert not scheduler.without_requests.wanted

    news.take(None, usable=False)
    assert scheduler.without_requests.wanted
    after = time.monotonic() + INTRODUCTION_SECONDS_MAX
    monkeypatch.setattr(time, "monotonic", lambda: after)
    assert not scheduler.without_requests.wanted, "a store that cannot be opened keeps no engine busy"


@pytest.mark.parametrize("params", [None, {"spillway_hand_over": True}])
def test_after_a_request_that_another_engine_goes_on_with_the_engine_settles(scheduler, monkeypatch, params):
    settled: list[float] = []
    monkeypatch.setattr(scheduler.without_requests, "settle", settled.append)
    request = request_for("first leg")
    request.kv_transfer_params = params
    scheduler.on_new_request(request)
    assert not settled
    scheduler.request_finished(request)
    assert settled == ([HAND_OVER_SECONDS] if params else [])


def test_a_request_that_names_no_session_belongs_to_the_conversation_that_it_goes_on_with(scheduler):
    def session_of(request: Request) -> SessionHint | None:
        scheduler.on_new_request(request)
        return scheduler._req_status[request.request_id].req_context.session

    first, second, named = request_for("first", blocks=2), request_for("second"), request_for("named")
    named.kv_transfer_params = {"spillway_session": {"id": "8f0c"}}

    assert session_of(first) is None, "it may never come back"
    turn = session_of(second)
    assert turn is not None and turn.session.startswith(b"\xff")
    assert session_of(named) == SessionHint(b"8f0c")


def test_answers_that_nobody_sends_back_are_stored_no_longer_until_the_weights_change():
    """Each turn's prompt leaves out what the one before generated, as a template that strips thinking does."""
    with open_scheduler("answers", generated_tokens="auto") as scheduler:
        scheduler.config = scheduler.config._replace(offload_prompt_only=False)
        manager = scheduler.manager
        stored_chunks = []
        for turn in range(COUNTED_MIN + 2):
            request = request_for(f"turn {turn}", prompt=turn + 1, blocks=2)
            request.kv_transfer_params = {"spillway_session": {"id": "chat"}}
            scheduler.on_new_request(request)
            scheduler.get_num_new_matched_tokens(request, 0)
            fill(request)
            jobs = build_meta(scheduler, {request.request_id: TOKENS}, {request.request_id: [1, 2, 3, 4]}).store_jobs
            stored_chunks.append(sum(len(scheduler._jobs[job].keys) for job in jobs))
            report(scheduler, dict.fromkeys(jobs, 2))
            request.status = RequestStatus.FINISHED_STOPPED
            scheduler.request_finished(request)

        assert stored_chunks == [BLOCKS] * COUNTED_MIN + [2, 2]
        samples = manager.take_samples()
        assert samples is not None and "spillway_answers_kept" in str(samples.samples())

        scheduler.weights_changing("test")
        admit(scheduler, request_for("next", prompt=99), [5, 6, 7, 8], 0)
        assert not scheduler.config.offload_prompt_only


@pytest.mark.parametrize("prompt_only", [False, True])
def test_chunks_of_an_answer_count_as_asked_for_once(scheduler, monkeypatch, prompt_only):
    """Chunks of a prompt count likewise, so that a full shared tier admits both when they are stored again."""
    scheduler.config = scheduler.config._replace(offload_prompt_only=prompt_only)
    counted: list[bytes] = []
    monkeypatch.setattr(scheduler.manager, "count_request", counted.extend)
    request = request_for("chat", blocks=2)
    serve(scheduler, request)

    kept = request.block_hashes[:2] if prompt_only else request.block_hashes
    assert counted == [make_offload_key(one, 0) for one in kept]


def serve(scheduler, request: Request) -> None:
    """A request from its beginning, with two lookups, to the end of its answer, which fills the rest of its blocks."""
    scheduler.on_new_request(request)
    for _ in range(2):
        scheduler.get_num_new_matched_tokens(request, 0)
    fill(request)
    scheduler._req_status[request.request_id].update_offload_keys()
    request.status = RequestStatus.FINISHED_STOPPED
    scheduler.request_finished(request)


def build_meta(scheduler, scheduled: dict[str, int] | None = None, new: dict[str, list[int]] | None = None):
    """One scheduler step's metadata: `new` requests with their device blocks, `scheduled` tokens."""
    new_requests = [new_request(name, blocks) for name, blocks in (new or {}).items()]
    return scheduler.build_connector_meta(step_output(scheduled, new_requests))


def compute_and_store(scheduler, name: str) -> int:
    """A request computes its blocks and a store job leaves for the workers; its id."""
    request = request_for(name)
    scheduler.on_new_request(request)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    (job_id,) = build_meta(scheduler, {name: TOKENS}, {name: [1, 2, 3, 4]}).store_jobs
    return job_id


def ask(scheduler, name: str) -> tuple[Request, tuple[int | None, bool]]:
    request = request_for(name)
    scheduler.on_new_request(request)
    return request, scheduler.get_num_new_matched_tokens(request, 0)


def test_a_store_becomes_a_hit_when_every_rank_has_done_it(scheduler):
    job = compute_and_store(scheduler, "writer")
    report(scheduler, {job: 1})
    assert ask(scheduler, "early")[1] == (None, False)
    report(scheduler, {job: 1})
    assert ask(scheduler, "reader")[1] == (TOKENS, True)


STATE = MambaSpec(block_size=BLOCK_TOKENS, shapes=((4, 16),), dtypes=(torch.bfloat16,), mamba_cache_mode="align")
WINDOW = SlidingWindowSpec(
    block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=64, dtype=torch.bfloat16, sliding_window=2 * BLOCK_TOKENS
)


@pytest.mark.parametrize(("second_group", "tokens"), [(STATE, TOKENS - BLOCK_TOKENS), (WINDOW, TOKENS - 1)])
def test_a_state_is_never_loaded_past_the_token_that_is_computed_again(second_group, tokens):
    """A prompt of whole blocks, all of them stored. Its last token is computed in any case: attention does that behind
    the block that holds it, a recurrent state of that block has seen the token already."""
    with open_scheduler("groups", second_group=second_group) as scheduler:
        writer = request_for("writer")
        scheduler.on_new_request(writer)
        assert scheduler.get_num_new_matched_tokens(writer, 0) == (0, False)
        output = step_output({"writer": TOKENS}, [new_request("writer", [1, 2, 3, 4], [5, 6, 7, 8])])
        if second_group is STATE and (kind := getattr(sched_output, "KVConnectorBlockState", None)) is not None:
            # Since 0.30 vLLM hands over the states at the ends of blocks one by one.
            states = [(1, 5 + block, (block + 1) * BLOCK_TOKENS) for block in range(BLOCKS)]
            output.kv_connector_block_state = part_of(kind, boundary_state_offloads={"writer": states})
        for job in scheduler.build_connector_meta(output).store_jobs:
            report(scheduler, {job: 2})
        assert ask(scheduler, "reader")[1] == (tokens, True)


def test_a_store_that_failed_on_one_rank_is_no_hit(scheduler):
    job = compute_and_store(scheduler, "writer")
    report(scheduler, {job: 1}, failed={job})
    report(scheduler, {job: 1})
    assert ask(scheduler, "reader")[1] == (0, False)
    assert scheduler.manager.primary_tier.free_rows() == ROWS
    assert not scheduler._failed_jobs


@pytest.mark.parametrize(("lost", "found"), [({3, 77}, 0), ({77}, TOKENS)])
def test_what_was_computed_with_blocks_that_another_connector_did_not_fill_is_no_hit(scheduler, lost, found):
    """The writer computes with blocks 1 to 4 (vLLM's MultiConnector: another one's load runs within the step)."""
    job = compute_and_store(scheduler, "writer")
    scheduler.update_connector_output(KVConnectorOutput(invalid_block_ids=lost))
    report(scheduler, {job: 2})

    assert ask(scheduler, "reader")[1] == (found, bool(found))
    assert scheduler.manager.primary_tier.free_rows() == (ROWS if not found else ROWS - TOKENS // BLOCK_TOKENS)


@pytest.mark.parametrize(("lost", "not_copied"), [({3, 77}, {1, 2, 3, 4, 77}), ({77}, {77})])
def test_late_copies_of_what_was_computed_with_such_blocks_are_lost(scheduler, monkeypatch, lost, not_copied):
    compute_and_store(scheduler, "writer")
    asked = []
    monkeypatch.setattr(scheduler, "late_stores", SimpleNamespace(lose=lambda blocks: asked.append(set(blocks))))
    scheduler.update_connector_output(KVConnectorOutput(invalid_block_ids=lost))
    assert asked == [not_copied]


def test_a_request_whose_load_failed_recomputes_and_is_not_offered_the_load_again(scheduler):
    job = compute_and_store(scheduler, "writer")
    report(scheduler, {job: 2})
    request, matched = ask(scheduler, "reader")
    assert matched == (TOKENS, True)
    scheduler.update_state_after_alloc(request, allocated([5, 6, 7, 8]), TOKENS)
    (load_job,) = build_meta(scheduler).load_jobs
    report(scheduler, {load_job: 2}, failed={load_job})
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    assert ask(scheduler, "another")[1] == (TOKENS, True)  # the bytes in the CPU tier are good
    scheduler.request_finished(request)
    assert not scheduler._recompute_only


def test_steps_that_prefill_are_timed_and_others_are_not(scheduler, monkeypatch):
    clock = SteppedClock()
    monkeypatch.setattr("spillway_connector.engine.scheduler.half.time.monotonic", clock)
    build_meta(scheduler, {"a": 1000})
    build_meta(scheduler, {"a": 2000})  # async scheduling: begun before the first has ended
    clock.advance(1.0)
    report(scheduler, {})
    clock.advance(2.0)
    report(scheduler, {})
    assert scheduler.manager.prefill_rate.per_second == pytest.approx(1000)
    build_meta(scheduler, {"a": 1})  # a decode step
    clock.advance(1.0)
    report(scheduler, {})
    assert scheduler.manager.prefill_rate.per_second == pytest.approx(1000)


def test_a_preempted_request_waits_for_its_own_stores(scheduler):
    job = compute_and_store(scheduler, "writer")
    request = scheduler._req_status["writer"].req
    assert scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    report(scheduler, {job: 2})
    assert scheduler.get_num_new_matched_tokens(request, 0) == (TOKENS, True)


def test_a_request_that_waits_is_answered_without_looking_again(scheduler):
    compute_and_store(scheduler, "writer")  # on its way to the CPU tier
    request, matched = ask(scheduler, "reader")
    assert matched == (None, False)
    prefix = scheduler._req_status["reader"].prefix
    build_meta(scheduler)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    assert scheduler._req_status["reader"].prefix is prefix


class Engine:
    """Steps of one scheduler in which three prompts of four blocks share eight rows of the CPU tier."""

    def __init__(self, scheduler: SpillwayConnectorScheduler, forgetful: bool) -> None:
        self.scheduler, self.forgetful = scheduler, forgetful
        self.jobs: list[int] = []
        self.waiting: dict[str, Request] = {}
        self.names = 0

    def ask(self, request: Request) -> tuple[int | None, bool]:
        if self.forgetful:
            self.scheduler._req_status[request.request_id].prefix = None
        return self.scheduler.get_num_new_matched_tokens(request, 0)

    def come(self, prompt: int) -> tuple[int | None, bool]:
        self.names += 1
        request = self.waiting[f"request-{self.names}"] = request_for(f"request-{self.names}", prompt)
        self.scheduler.on_new_request(request)
        return self.ask(request)

    def do(self, action: str, number: int) -> object:
        if action == "come":
            return self.come(1 + number % 3)
        if action == "ask":
            return [self.ask(request) for request in self.waiting.values()]
        if action == "report":
            jobs, self.jobs = self.jobs, []
            failed = set(jobs[:1]) if number == 0 else set()
            report(self.scheduler, dict.fromkeys(jobs, 2), failed)
            return None
        if action == "step" or not self.waiting:
            meta = build_meta(self.scheduler)
        else:  # go: the oldest that waits gets device blocks
            name, request = next(iter(self.waiting.items()))
            tokens, loads = self.ask(request)
            if tokens is None:
                return tokens
            if loads:
                self.scheduler.update_state_after_alloc(request, allocated([5, 6, 7, 8]), tokens)
                meta = build_meta(self.scheduler)
            else:
                del self.waiting[name]
                meta = build_meta(self.scheduler, {name: TOKENS}, {name: [1, 2, 3, 4]})
        self.jobs += [*meta.store_jobs, *meta.load_jobs]
        return sorted(self.jobs)


engine_steps = st.lists(
    st.tuples(st.sampled_from(("come", "ask", "ask", "step", "go", "go", "report")), st.integers(0, 5)), max_size=40
)


@settings(max_examples=settings.default.max_examples, deadline=None)
@given(schedule=engine_steps)
@example(schedule=[("come", 0), ("come", 0), ("go", 0), ("ask", 0), ("report", 0), ("ask", 0)])
def test_a_waiting_request_gets_the_answer_of_a_new_lookup(schedule):
    with open_scheduler("memory") as remembering, open_scheduler("forgetful") as looking:
        engines = Engine(remembering, forgetful=False), Engine(looking, forgetful=True)
        for action, number in schedule:
            actual, expected = (engine.do(action, number) for engine in engines)
            assert actual == expected, action


def test_the_chunks_of_a_request_that_waits_are_renewed_once_a_second():
    clock = SteppedClock()
    with open_scheduler("renewed", clock) as scheduler:
        touched: list[int] = []
        touch = scheduler.manager.touch
        scheduler.manager.touch = lambda keys, context: (touched.append(len(keys)), touch(keys, context))  # type: ignore[method-assign]
        job = compute_and_store(scheduler, "writer")
        report(scheduler, {job: 2})
        request, matched = ask(scheduler, "reader")
        touched.clear()
        for seconds, expected in ((0.0, 0), (0.5, 0), (0.5, 1), (0.9, 1), (0.2, 2)):
            clock.advance(seconds)
            build_meta(scheduler)
            assert scheduler.get_num_new_matched_tokens(request, 0) == matched == (TOKENS, True)
            assert len(touched) == expected


def test_keys_grow_with_the_request(scheduler):
    request, _ = ask(scheduler, "reader")
    state = scheduler._req_status["reader"].group_states[0]
    assert state.offload_keys == [make_offload_key(block_hash, 0) for block_hash in request.block_hashes]
    request.block_hashes.append(bytes([9]) * 32)
    scheduler._req_status["reader"].update_offload_keys()
    assert state.offload_keys[BLOCKS:] == [make_offload_key(bytes([9]) * 32, 0)]


def test_a_partly_computed_request_loads_the_rest(scheduler):
    job = compute_and_store(scheduler, "writer")
    report(scheduler, {job: 2})
    request, _ = ask(scheduler, "reader")
    assert scheduler.get_num_new_matched_tokens(request, BLOCK_TOKENS) == (TOKENS - BLOCK_TOKENS, True)
    assert scheduler.get_num_new_matched_tokens(request, TOKENS - 1) == (0, False)


def test_the_last_chunk_alone_is_computed_not_loaded(scheduler):
    job = compute_and_store(scheduler, "writer")
    report(scheduler, {job: 2})
    request, matched = ask(scheduler, "reader")
    assert matched == (TOKENS, True), "without a device hit, all of it is loaded"
    state = scheduler._req_status["reader"]
    for computed, missing in (
        (0, False),
        (TOKENS - BLOCK_TOKENS - 1, False),
        (TOKENS - BLOCK_TOKENS, True),
        (TOKENS - 1, True),
    ):
        state.num_locally_computed_tokens = computed
        assert state.lacks_only_last_chunk(BLOCK_TOKENS) is missing
    request.append_output_token_ids(0)  # a token of a block that no tier holds
    state.num_locally_computed_tokens = TOKENS - BLOCK_TOKENS
    assert not state.lacks_only_last_chunk(BLOCK_TOKENS), "the device lacks a block and a token"


def test_blocks_that_another_request_loads_are_waited_for(scheduler):
    job = compute_and_store(scheduler, "writer")
    report(scheduler, {job: 2})
    request, matched = ask(scheduler, "first")
    assert matched == (TOKENS, True)
    scheduler.update_state_after_alloc(request, allocated([5, 6, 7, 8]), TOKENS)
    assert ask(scheduler, "second")[1] == (None, False)
    (load_job,) = build_meta(scheduler).load_jobs
    report(scheduler, {load_job: 2})
    second = scheduler._req_status["second"].req
    assert scheduler.get_num_new_matched_tokens(second, 0) == (TOKENS, True)


def test_a_request_s_tenant_comes_from_its_salt(scheduler):
    request = request_for("salted")
    request.cache_salt = "alice"
    scheduler.on_new_request(request)
    assert tenant_of_context(scheduler._req_status["salted"].req_context) == tenant_of("alice")


def test_a_change_of_weights_drops_the_cpu_tier_and_running_requests_offload_no_more(scheduler, caplog):
    job = compute_and_store(scheduler, "writer")
    report(scheduler, {job: 2})
    scheduler.weights_changing("reload_weights")
    scheduler.weights_changing("update_weights")
    assert sum("may change the model's weights" in record.getMessage() for record in caplog.records) == 1
    assert scheduler.manager.primary_tier.used_rows() == 0
    assert ask(scheduler, "reader")[1] == (0, False)
    build_meta(scheduler, {"writer": TOKENS})
    assert not scheduler._jobs, "what runs was computed with the old weights"
    build_meta(scheduler, {"reader": TOKENS}, {"reader": [5, 6, 7, 8]})
    assert not scheduler._jobs, "it may have hit blocks of the device that were computed with the old weights"


@pytest.mark.parametrize("accepted", [True, False])
def test_what_is_computed_after_the_device_s_reset_is_stored_again(scheduler, accepted: bool):
    """This holds for a request that came before the reset, too: it holds no block that is older."""
    pool = BlockPool(64, enable_caching=True, hash_block_size=BLOCK_TOKENS)
    if not accepted:
        pool.get_new_blocks(1)  # by a request that runs
    scheduler.bind_device_blocks(pool)
    scheduler.weights_changing("reload_weights")
    ask(scheduler, "waiting")
    assert pool.reset_prefix_cache() is accepted
    ask(scheduler, "later")
    new = {"waiting": [1, 2, 3, 4], "later": [5, 6, 7, 8]}
    stored = build_meta(scheduler, dict.fromkeys(new, TOKENS), new).store_jobs

    assert bool(stored) is accepted
    assert pool.num_gpu_blocks == 64


def test_a_reset_leaves_no_request_waiting_for_dropped_jobs(scheduler):
    compute_and_store(scheduler, "writer")
    gone = compute_and_store_distinct(scheduler)
    request = scheduler._req_status["writer"].req
    scheduler.reset_cache()
    assert gone not in scheduler._req_status
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)


def compute_and_store_distinct(scheduler) -> str:
    """A request with chunks of its own that ends while its store is under way; its name."""
    request = request_for("gone")
    request.block_hashes = [bytes([100 + n]) * 32 for n in range(BLOCKS)]
    scheduler.on_new_request(request)
    scheduler.get_num_new_matched_tokens(request, 0)
    assert build_meta(scheduler, {"gone": TOKENS}, {"gone": [11, 12, 13, 14]}).store_jobs
    request.status = RequestStatus.FINISHED_STOPPED
    scheduler.request_finished(request)
    assert "gone" in scheduler._req_status
    return "gone"


@pytest.mark.skipif(generation() is Generation.V023, reason="vLLM 0.23 does not report which requests a reset preempts")
def test_a_request_that_a_reset_preempted_loads_in_the_next_step(scheduler):
    """The step begins its load and reports it as preempted."""
    job = compute_and_store(scheduler, "writer")
    report(scheduler, {job: 2})
    request, matched = ask(scheduler, "reader")
    assert matched == (TOKENS, True)
    scheduler.update_state_after_alloc(request, allocated([5, 6, 7, 8]), TOKENS)
    metadata = scheduler.build_connector_meta(step_output(preempted=["reader"]))
    assert len(metadata.load_jobs) == 1
    assert metadata.jobs_to_flush.isdisjoint(metadata.load_jobs)


def test_only_a_step_that_computes_nothing_awaits_the_copies_of_a_load(scheduler):
    job = compute_and_store(scheduler, "writer")
    report(scheduler, {job: 2})
    request, _ = ask(scheduler, "reader")
    assert not getattr(build_meta(scheduler), "awaits_copies", False), "nothing is under way"
    scheduler.update_state_after_alloc(request, allocated([5, 6, 7, 8]), TOKENS)
    metadata = build_meta(scheduler)
    assert metadata.awaits_copies
    assert not getattr(build_meta(scheduler, {"writer": 1}), "awaits_copies", False), "it computes a token"
    assert build_meta(scheduler).awaits_copies, "the load has not ended"
    report(scheduler, dict.fromkeys(metadata.load_jobs, 2))
    assert not getattr(build_meta(scheduler), "awaits_copies", False)


def test_a_request_that_may_not_read_a_prefix_cache_is_offered_nothing_and_stores_all_the_same(scheduler):
    job = compute_and_store(scheduler, "writer")
    report(scheduler, {job: 2})
    request = request_for("prompt-logprobs", prompt=0)
    request.skip_reading_prefix_cache = True
    scheduler.on_new_request(request)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    assert not build_meta(scheduler, {request.request_id: TOKENS}, {request.request_id: [5, 6, 7, 8]}).store_jobs
    assert ask(scheduler, "reader")[1] == (TOKENS, True)
    fresh = request_for("fresh-prompt-logprobs", prompt=7)
    fresh.skip_reading_prefix_cache = True
    scheduler.on_new_request(fresh)
    assert scheduler.get_num_new_matched_tokens(fresh, 0) == (0, False)
    assert build_meta(scheduler, {fresh.request_id: TOKENS}, {fresh.request_id: [9, 10, 11, 12]}).store_jobs
