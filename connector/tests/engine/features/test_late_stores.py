"""Late stores on vLLM's own block pool and our CPU tier: every byte is right, nothing is forgotten, nothing leaks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import RequestGroupState
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.base import OffloadKey, ReqContext

from spillway_connector import metrics
from spillway_connector.config import ConnectorConfig
from spillway_connector.device.host_region import HostRegion
from spillway_connector.engine.features import late_stores
from spillway_connector.engine.features.late_stores import LateStore, LateStores
from spillway_connector.engine.ipc.samples import sample_key
from spillway_connector.engine.requests.tenancy import UNKNOWN_REQUEST, TenantContext
from spillway_connector.plan.leaving import LeavingWindow
from spillway_connector.plan.sessions import SessionHint
from spillway_connector.testing.generation import RequestState, SpillwayTieringManager, make_cpu_tier
from spillway_connector.testing.memory import unnamed_region
from spillway_connector.testing.vllm_parts import part_of

ROWS, BLOCKS, CHUNKS = 6, 13, 4  # a request has so many chunks; 12 blocks can be used
CONTEXT = ReqContext(req_id="r")


def keys_of(prompt: int) -> list[OffloadKey]:
    """Prompts share their first chunk."""
    return [OffloadKey(bytes([0 if at == 0 else 1 + prompt, at]) * 18) for at in range(CHUNKS)]


@pytest.fixture
def region() -> Iterator[HostRegion]:
    region = unnamed_region(ROWS, 4096)
    yield region
    region.cleanup()


class Rig:
    """Acts as vLLM and the scheduler half do with both tiers, on memory that holds keys instead of KV."""

    def __init__(self, region: HostRegion, per_step: int = CHUNKS) -> None:
        self.tier = make_cpu_tier(ROWS, region, "lru", enable_events=True)
        config = ConnectorConfig(num_cpu_blocks=ROWS)
        self.manager = SpillwayTieringManager(self.tier, [], ROWS, config, chunk_tokens=16, chunk_bytes=4096)
        self.late = LateStores(self.manager, LeavingWindow(per_step, ROWS // 2), ranks=1, shared=True)
        self.manager.serve_half(loads_begin_early=False, late_stores=self.late)
        self.pool = BlockPool(BLOCKS, True, 16)
        self.late.bind(self.pool)
        self.memory: dict[int, OffloadKey] = {}  # by device block
        self.rows: dict[int, OffloadKey | None] = {}
        self.running: list[list[tuple[OffloadKey, KVCacheBlock]]] = []
        self.jobs: list[LateStore] = []
        self.needed_blocks = 0
        self._ids = count()

    def begin(self, prompt: int) -> None:
        """A request that finds what the device has of its prefix and computes the rest, within one step."""
        keys, held = keys_of(prompt), []
        for key in keys:
            block = self.pool.cached_block_hash_to_block.get_one_block(key)
            if block is None:
                break
            self.pool.touch([block])
            held.append((key, block))
        missing = keys[len(held) :]
        if len(missing) > self.pool.get_num_free_blocks():
            self.pool.free_blocks([block for _, block in reversed(held)])
            return
        for key, block in zip(missing, self.pool.get_new_blocks(len(missing)), strict=True):
            self.place(key, block)
            held.append((key, block))
        self.running.append(held)
        self.late.found_on_device(keys[: CHUNKS - len(missing)], CONTEXT)
        written = self.manager.prepare_store(missing, CONTEXT) if missing else None
        if written is not None and written.keys_to_store:  # eager
            self.manager.complete_store(written.keys_to_store, CONTEXT)
            for key, row in zip(written.keys_to_store, self.tier.rows_of(written.keys_to_store), strict=True):
                self.rows[row] = key

    def place(self, key: OffloadKey, block: KVCacheBlock) -> None:
        """The block holds this chunk from now on."""
        if hasattr(block, "set_block_hash"):  # since 0.30
            block.set_block_hash(key, 16)
        else:
            block.block_hash = key
        self.pool.cached_block_hash_to_block.insert(key, block)
        self.memory[block.block_id] = key

    def end(self, request: int, blocks: Sequence[int] = ()) -> None:
        held = self.running.pop(request)
        self.late.ending([key for key, _ in held], blocks)
        self.pool.free_blocks([block for _, block in reversed(held)])

    def step(self) -> None:
        self.jobs += self.late.due(lambda: next(self._ids), needed_blocks=max(self.needed_blocks, len(self.running), 1))

    def copy(self, failed: bool = False) -> None:
        """The oldest job reads what its blocks hold now, and is reported."""
        job = self.jobs.pop(0)
        for block, row in zip(job.blocks, job.rows.block_ids.tolist(), strict=True):
            self.rows[row] = None if failed else self.memory.get(block)
        self.late.ended({job.job_id: 1}, {job.job_id} if failed else set())

    def on_device(self) -> set[OffloadKey]:
        return {block.block_hash for block in self.pool.blocks if block.block_hash is not None}

    def require_right(self) -> None:
        ready = list(self.tier.ready)
        for key, row in zip(ready, self.tier.rows_of(ready), strict=True):
            assert self.rows[row] == key, "a row holds something else than its key says"


actions = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.integers(0, 5)),
        st.tuples(st.just("end"), st.integers(0, 3)),
        st.tuples(st.sampled_from(["step", "copy", "fail"]), st.just(0)),
        st.tuples(st.sampled_from(["reset", "doubt"]), st.just(0)),
    ),
    max_size=40,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(actions)
def test_published_rows_are_right_and_every_block_is_returned(region: HostRegion, plan: list[tuple[str, int]]):
    rig, doubted = Rig(region), False
    for action, number in plan:
        if action == "begin":
            rig.begin(number)
        elif action == "end" and number < len(rig.running):
            rig.end(number)
        elif action == "step":
            rig.step()
        elif action in ("copy", "fail") and rig.jobs:
            rig.copy(failed=action == "fail")
        elif action == "doubt":
            rig.late.lose_all()
        elif action == "reset" and not rig.running:
            rig.late.device_resetting()
            assert rig.pool.reset_prefix_cache(), "late stores hold blocks of a device that is being reset"
            rig.late.device_was_reset()
        rig.require_right()
        if action in ("fail", "doubt"):
            doubted = True  # what was not published is not stored again
        forgotten = rig.on_device() - rig.late._owed.keys() - set(rig.tier.resident)
        assert doubted or not forgotten, "the device holds chunks that no one will store"

    while rig.running:
        rig.end(0)
    rig.step()
    while rig.jobs:
        rig.copy()
    rig.require_right()
    assert not rig.late.under_way and rig.pool.get_num_free_blocks() == BLOCKS - 1
    assert rig.tier.ready == set(rig.tier.resident)


def test_both_tiers_hold_different_chunks_once_the_cpu_tier_is_full(region: HostRegion):
    """Eager stores leave all of the CPU tier's chunks on the device, too, and keep no more than twelve."""
    rig = Rig(region, per_step=1)
    for prompt in range(6):
        rig.begin(prompt)
        rig.step()
        rig.end(0)
        rig.step()
        while rig.jobs:
            rig.copy()

    together = rig.on_device() | rig.tier.ready
    assert len(together) >= BLOCKS, sorted(map(bytes.hex, together))  # more than the device has alone
    assert {key for prompt in (5, 4, 3) for key in keys_of(prompt)} <= together


def test_what_the_device_keeps_leaves_first_and_comes_back_when_it_is_given_up(region: HostRegion):
    rig = Rig(region, per_step=1)
    rig.begin(0)
    rig.begin(1)  # 7 chunks: the tier's 6 rows are eager's as far as they reach
    full = set(rig.tier.ready)
    rig.late.found_on_device(keys_of(0), CONTEXT)

    written = rig.tier.prepare_store([OffloadKey(b"new!" * 9)], CONTEXT)

    assert written is not None and set(written.evicted_keys) <= set(keys_of(0)) & full
    assert set(written.evicted_keys) <= rig.on_device()
    rig.tier.complete_store(written.keys_to_store, CONTEXT, False)
    while rig.running:
        rig.end(0)
    for prompt in range(2, 5):  # so that the device gives it up
        rig.begin(prompt)
        rig.step()
        while rig.jobs:
            rig.copy()
        rig.end(0)
    assert set(written.evicted_keys) <= rig.tier.ready | rig.on_device()


def step_of_preempted(name: str) -> SchedulerOutput:
    return part_of(SchedulerOutput, preempted_req_ids={name}, scheduled_new_reqs=[])


def queue(rig: Rig) -> list[int]:
    """Blocks in the order in which vLLM takes them."""
    return [block.block_id for block in late_stores._free_blocks(rig.pool)]


def test_blocks_that_are_being_copied_are_not_taken_and_return_to_their_end_of_the_queue(region: HostRegion):
    rig = Rig(region, per_step=CHUNKS)
    rig.begin(0)
    rig.begin(1)  # the CPU tier is full
    rig.begin(2)
    rig.end(2)  # the queue is short: what this request leaves is about to be taken, behind all others
    ended = [block.block_id for block in rig.late._to_hold.values()]
    free = queue(rig)
    rig.step()
    copied = [block for job in rig.jobs for block in job.blocks]
    assert ended and set(ended) <= set(copied) and set(copied).isdisjoint(queue(rig))

    while rig.jobs:
        rig.copy()

    assert queue(rig) == [*free, *ended], "blocks of a request that has ended are taken before older ones"


def test_all_blocks_about_to_be_taken_are_held_not_the_next_steps_alone(region: HostRegion):
    rig = Rig(region, per_step=CHUNKS)
    for prompt in (0, 1):
        rig.begin(prompt)
    rig.late._window.lost(2 * CHUNKS)  # so that it looks further ahead than one step
    for _ in range(2):
        rig.pool.free_blocks([block for _, block in reversed(rig.running.pop(0))])
    before = [block for block in queue(rig) if rig.memory.get(block) in rig.late._owed]

    rig.step()

    copied = [block for job in rig.jobs for block in job.blocks]
    assert copied and set(copied) <= set(before) and set(copied).isdisjoint(queue(rig))
    while rig.jobs:
        rig.copy()
    assert queue(rig)[: len(copied)] == copied


def test_held_blocks_leave_free_what_running_requests_take_in_the_next_step(region: HostRegion):
    """vLLM preempts a running request that finds no free blocks, be they held for a moment or not."""
    rig = Rig(region, per_step=CHUNKS)
    for prompt in (0, 1, 2):
        rig.begin(prompt)
    rig.late._window.lost(2 * CHUNKS)
    rig.needed_blocks = 6  # the next chunk of a long prompt
    for _ in range(2):
        rig.pool.free_blocks([block for _, block in reversed(rig.running.pop(0))])

    rig.step()

    assert len(rig.jobs[0].blocks) == 3 and rig.pool.get_num_free_blocks() == 6, "one is copied, but not held"


def test_an_ended_requests_blocks_leave_free_what_others_take_in_the_next_step(region: HostRegion):
    rig = Rig(region, per_step=CHUNKS)
    for prompt in (0, 1, 2):
        rig.begin(prompt)
    rig.needed_blocks = 4
    rig.step()
    assert not rig.jobs and rig.pool.get_num_free_blocks() == 2

    rig.end(2)

    assert len(rig.late._to_hold) == 1 and rig.pool.get_num_free_blocks() == 4


def test_a_block_that_is_taken_before_its_copy_has_ended_is_never_published(
    region: HostRegion, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(late_stores, "_HELD_SHARE_MAX", 0.0)
    rig = Rig(region, per_step=4)
    for prompt in (0, 1, 2):
        rig.begin(prompt)
    while rig.running:
        rig.end(0)
    rig.step()
    owed = set(rig.late._owed)
    taken = rig.pool.get_new_blocks(rig.pool.get_num_free_blocks())
    not_begun = owed - rig.late._owed.keys()
    for block in taken:
        rig.memory[block.block_id] = OffloadKey(b"else" * 9)
    unheld = [block for job in rig.jobs for block in job.blocks if block in {one.block_id for one in taken}]
    assert unheld

    while rig.jobs:
        rig.copy()

    rig.require_right()
    samples = rig.manager.take_samples()
    assert samples is not None
    assert samples.samples()[sample_key(metrics.LATE_STORES, "lost")] == len(unheld) + len(not_begun)


def test_a_block_that_is_taken_before_its_copy_has_begun_counts_as_lost_and_widens_the_window(region: HostRegion):
    rig = Rig(region, per_step=1)
    for prompt in (0, 1, 2):
        rig.begin(prompt)
    while rig.running:
        rig.end(0)
    owed = set(rig.late._owed)
    before = rig.late._window.blocks
    assert owed

    rig.pool.get_new_blocks(rig.pool.get_num_free_blocks())

    gone = owed - rig.on_device()
    samples = rig.manager.take_samples()
    assert samples is not None and gone
    assert samples.samples()[sample_key(metrics.LATE_STORES, "lost")] == len(gone)
    assert not gone & rig.late._owed.keys() and rig.late._window.blocks > before


def test_two_blocks_of_one_chunk_that_are_taken_together_lose_it_once(region: HostRegion):
    """Requests that compute the same prefix at the same time leave the device two blocks of each of its chunks."""
    rig = Rig(region)
    for prompt in (0, 1):
        rig.begin(prompt)
    owed = list(rig.late._owed)
    blocks = rig.pool.get_new_blocks(len(owed))
    for key, block in zip(owed, blocks, strict=True):
        rig.place(key, block)
    rig.pool.free_blocks(blocks)
    while rig.running:
        rig.end(0)
    assert owed

    rig.pool.get_new_blocks(rig.pool.get_num_free_blocks())

    samples = rig.manager.take_samples()
    assert samples is not None
    lost = len(owed) - len(rig.late._to_hold)
    assert samples.samples()[sample_key(metrics.LATE_STORES, "lost")] == lost
    assert len(rig.late._owed) == len(rig.late._to_hold)


def test_bad_blocks_lose_the_copies_of_what_was_computed_with_them_alone(region: HostRegion):
    """A block that was given up since steps under way were planned is of a request that is not known any more."""
    rig = Rig(region, per_step=CHUNKS)
    for prompt in (0, 1, 2):
        rig.begin(prompt)
    rig.end(2)
    rig.step()
    (job,) = rig.jobs
    bad, *others = job.blocks
    assert others

    rig.late.lose({bad})
    rig.copy()

    assert rig.tier.ready.isdisjoint({rig.memory[bad]})
    assert rig.tier.ready.issuperset(rig.memory[block] for block in others)
    rig.require_right()


def test_bad_blocks_lose_the_copies_of_what_a_request_gave_up_while_steps_were_under_way(region: HostRegion):
    rig = Rig(region, per_step=CHUNKS)
    for prompt in (0, 1, 2):
        rig.begin(prompt)
    rig.end(2, [block.block_id for _, block in rig.running[2]])
    rig.step()
    (job,) = rig.jobs
    copied = {rig.memory[block] for block in job.blocks}
    before = set(rig.tier.ready)

    rig.late.lose({BLOCKS + 1})  # of another request
    rig.copy()

    assert rig.tier.ready.isdisjoint(copied - before)


def test_bad_blocks_leave_nothing_to_be_copied_later_of_what_was_given_up_meanwhile(region: HostRegion):
    rig = Rig(region, per_step=CHUNKS)
    for prompt in (0, 1, 2):
        rig.begin(prompt)
    held = rig.running[2]
    owed = {key for key, _ in held} & rig.late._owed.keys()
    assert owed
    rig.end(2, [block.block_id for _, block in held])

    rig.late.lose({BLOCKS + 1})  # of another request
    rig.step()

    assert owed.isdisjoint(rig.memory[block] for job in rig.jobs for block in job.blocks)
    assert owed.isdisjoint(rig.late._owed) and owed.isdisjoint(rig.late._alone) and not rig.late._to_hold
    assert rig.pool.get_num_free_blocks() == BLOCKS - 1 - len(
        {block.block_id for all_ in rig.running for _, block in all_}
    )


@pytest.mark.parametrize("steps_ago", [0, late_stores._STEPS_UNDER_WAY_MAX])
def test_bad_blocks_lose_the_copies_of_what_a_preempted_request_gave_up_lately(region: HostRegion, steps_ago: int):
    rig = Rig(region, per_step=CHUNKS)
    for prompt in (0, 1, 2):
        rig.begin(prompt)
    held = rig.running.pop(2)
    state = part_of(RequestGroupState, block_ids=[block.block_id for _, block in held])
    preempted = part_of(RequestState, group_states=(state,))
    rig.pool.free_blocks([block for _, block in reversed(held)])
    rig.late.scheduled(step_of_preempted("preempted"), {"preempted": preempted}.get, 16)
    rig.step()
    (job,) = rig.jobs
    copied = {rig.memory[block] for block in job.blocks} - rig.tier.ready
    assert copied
    for _ in range(steps_ago):
        rig.step()

    rig.late.lose({BLOCKS + 1})  # of another request
    rig.copy()

    assert copied & rig.tier.ready == (copied if steps_ago else set())


def test_what_gone_sessions_left_makes_room_for_new_chunks_at_once_and_is_not_copied_again(region: HostRegion):
    """A chunk that a request uses after all is stored before the device gives it up."""
    rig = Rig(region, per_step=1)
    now = [0.0]
    rig.tier._clock = lambda: now[0]
    context = TenantContext(req_id="gone", session=SessionHint(b"gone", return_seconds=1.0))
    rig.tier.on_new_request(context)
    rig.begin(0)
    rig.begin(1)  # the CPU tier is full
    rig.tier.touch(keys_of(0), context)
    rig.tier.on_request_finished(context)
    rig.begin(2)
    assert rig.tier.ready.isdisjoint(keys_of(2)[1:]), "nothing is gone yet"
    now[0] = 3600.0
    assert rig.tier.has_room(CHUNKS - 1)

    rig.end(1)  # it leaves the blocks that the next one takes
    rig.step()
    while rig.jobs:
        rig.copy()
    rig.begin(3)

    assert rig.tier.ready.issuperset(keys_of(3)[1:]), "a session that is gone made no room"
    left = set(keys_of(0)) - set(rig.tier.resident)
    assert left and left <= rig.on_device() and left.isdisjoint(rig.late._owed)
    rig.late.found_on_device(keys_of(0), context)
    assert left <= rig.late._owed.keys()


def test_the_cpu_tier_learns_the_order_of_what_is_stored_later(region: HostRegion):
    rig = Rig(region)
    announced = list[tuple[list[OffloadKey], str]]()
    rig.tier.will_store = lambda keys, context: announced.append((list(keys), context.req_id))
    for prompt in range(3):  # the CPU tier has room for the first
        rig.begin(prompt)

    assert announced == [(keys_of(prompt)[1:], "r") for prompt in (1, 2)]


def test_a_step_that_changed_nothing_looks_at_no_block(region: HostRegion, monkeypatch: pytest.MonkeyPatch):
    rig = Rig(region, per_step=CHUNKS)
    for prompt in (0, 1, 2):
        rig.begin(prompt)
    looks: list[int] = []
    free_blocks = late_stores._free_blocks
    monkeypatch.setattr(late_stores, "_free_blocks", lambda pool: looks.append(1) or free_blocks(pool))
    rig.step()
    assert len(looks) == 1 and rig.pool.get_num_free_blocks() < rig.late._window.blocks
    for _ in range(5):
        rig.step()
    assert len(looks) == 1, "nothing was freed, and nothing taken"

    rig.end(0)
    rig.step()

    assert len(looks) == 2


def test_a_chunk_that_the_device_does_not_hold_under_its_key_is_stored_at_once(region: HostRegion):
    """Chunks of LoRA adapters, for example: the device's hash does not name the adapter's files."""
    rig = Rig(region)
    rig.begin(0)
    rig.begin(1)
    adapters = [OffloadKey(b"adapter" * 7)]

    written = rig.manager.prepare_store(adapters, CONTEXT)

    assert written is not None and list(written.keys_to_store) == adapters


def _in_session(name: str) -> TenantContext:
    return TenantContext(req_id=name, session=SessionHint(name.encode()))


@pytest.mark.parametrize(("second", "stored"), [("another", True), ("one", False)])
def test_a_chunk_of_two_sessions_is_stored_at_once(region: HostRegion, second: str, stored: bool):
    rig = Rig(region)
    for prompt in range(2):  # fills the CPU tier
        rig.begin(prompt)
    keys = keys_of(2)
    rig.begin(2)
    alone = [key for key in keys if key in rig.late._alone]
    assert alone, "the prompt was stored when it was computed"
    for key in alone:
        rig.late._owed[key] = _in_session("one")

    rig.late.found_on_device(keys, _in_session(second))
    rig.step()
    while rig.jobs:
        rig.copy()

    assert all((key in rig.tier.ready) is stored for key in alone)
    rig.require_right()


def test_what_a_shared_tier_lacks_of_a_prompt_that_is_handed_over_is_stored_at_once(
    region: HostRegion, monkeypatch: pytest.MonkeyPatch
):
    rig = Rig(region)
    for prompt in range(3):  # the first two fill the CPU tier
        rig.begin(prompt)
    keys = keys_of(2)
    lacking = [key for key in keys if key in rig.late._owed][:-1]
    assert lacking, "the prompt was stored when it was computed"
    monkeypatch.setattr(rig.manager.spills, "lacks", set(lacking).intersection)

    rig.late.found_on_device(keys, TenantContext(req_id="leg", hand_over=True))
    rig.step()
    while rig.jobs:
        rig.copy()

    assert [key for key in keys[1:] if key in rig.tier.ready] == lacking
    rig.require_right()


def test_the_log_says_when_and_why_a_chunk_is_stored_late(region: HostRegion, decisions: list[str]):
    rig = Rig(region)
    for prompt in range(6):
        rig.begin(prompt)
        rig.step()
        rig.end(0)
    assert any(line.endswith("chunks stay on the device alone for now") for line in decisions)
    assert any(": late store " in line and line.endswith("the device gives them up") for line in decisions)


@pytest.mark.parametrize(
    ("settings", "meant"),
    [
        ({}, "storing: auto means late"),
        ({"storing": "eager"}, "storing: eager means eager: it is asked for"),
        (
            {"storing": "late", "eviction_policy": "arc"},
            "storing: late means eager: eviction_policy: arc does not know what the device holds",
        ),
    ],
)
def test_the_log_says_why_chunks_are_stored_early(
    region: HostRegion, settings: dict[str, str], meant: str, decisions: list[str]
):
    config = ConnectorConfig.parse({"num_cpu_blocks": ROWS, **settings})
    late = LateStores.wanted(Rig(region).manager, config, LeavingWindow(1), ranks=1)
    assert decisions[-1] == meant
    assert (late is not None) is meant.endswith("late")
    assert [line for line in decisions if line.startswith("kv_connector")] == [
        f"kv_connector_extra_config sets {name}: {value!r}"
        for name, value in {"num_cpu_blocks": ROWS, **settings}.items()
    ]


def test_while_the_shared_tier_keeps_up_new_chunks_are_stored_at_once(
    region: HostRegion, monkeypatch: pytest.MonkeyPatch
):
    rig = Rig(region)
    keeps_up = True
    monkeypatch.setattr(rig.manager.spills, "at_once", lambda context: keeps_up)
    for prompt in range(3):
        rig.begin(prompt)
        rig.end(0)
    assert rig.tier.ready.issuperset(keys_of(2)[1:]), "the tier was full, and the chunks are in it all the same"
    keeps_up = False
    rig.begin(3)
    assert rig.tier.ready.isdisjoint(keys_of(3)[1:])


def test_an_engine_without_requests_begins_no_copy_of_what_stays_on_its_device(region: HostRegion):
    rig = Rig(region)
    for prompt in range(3):
        rig.begin(prompt)
        rig.end(0)
    while rig.late._to_hold or rig.jobs:
        rig.jobs += rig.late.due(lambda: next(rig._ids), needed_blocks=0)
        while rig.jobs:
            rig.copy()
    assert rig.late._owed, "the device alone holds something"

    assert not list(rig.late.due(lambda: next(rig._ids), needed_blocks=0))
    assert list(rig.late.due(lambda: next(rig._ids), needed_blocks=1)), "which a busy one copies before it leaves"


def test_without_a_shared_tier_nothing_is_stored_early(region: HostRegion):
    rig = Rig(region)
    rig.late._shared = False
    for prompt in range(3):
        rig.begin(prompt)
        rig.end(0)
    assert not rig.late.alone and rig.late._owed, "what the device alone holds waits until it leaves"


def test_an_engine_without_work_stores_what_its_device_alone_holds_and_ends(region: HostRegion):
    rig = Rig(region)
    for prompt in range(3):
        rig.begin(prompt)
        rig.end(0)
    alone = rig.late.alone
    for prompt in (1, 2):
        rig.late._owed.update(dict.fromkeys(rig.late._alone.keys() & {*keys_of(prompt)}, _in_session(str(prompt))))
    latest_first = [key for prompt in (2, 1) for key in keys_of(prompt) if key in rig.late._alone]
    assert len(latest_first) == alone > 1
    copied: list[OffloadKey] = []
    for _ in range(alone):
        rig.jobs += rig.late.due(lambda: next(rig._ids), needed_blocks=0, settling=1)
        assert len(rig.jobs) == 1 and len(rig.jobs[0].blocks) == 1, "more is on its way than there is room for"
        copied += [rig.memory[block] for block in rig.jobs[0].blocks]
        rig.copy()
    rig.jobs += rig.late.due(lambda: next(rig._ids), needed_blocks=0, settling=1)

    assert not rig.jobs and not rig.late.alone
    assert copied == latest_first, "not the last used prefix first, from its head on"
    assert rig.manager.settled_chunks == alone
    rig.require_right()


@pytest.mark.parametrize(("context", "offered"), [(CONTEXT, 1), (UNKNOWN_REQUEST, 0)])
def test_chunks_of_an_unknown_request_are_offered_to_no_shared_tier(
    region: HostRegion, monkeypatch: pytest.MonkeyPatch, context: ReqContext, offered: int
):
    rig = Rig(region)
    stores: list[object] = []
    monkeypatch.setattr(rig.manager, "secondary_tiers", [object()])
    monkeypatch.setattr(rig.manager.spills, "_submit", lambda *store: stores.append(store))
    monkeypatch.setattr(rig.manager, "_process_finished_jobs", lambda: None)
    keys = keys_of(0)
    rig.manager.prepare_store(keys, context)
    rig.manager.complete_store(keys, context)

    assert len(stores) == offered
    assert rig.tier.ready.issuperset(keys)
