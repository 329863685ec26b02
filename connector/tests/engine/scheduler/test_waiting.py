"""Chunks for waiting requests stay in the CPU tier until these have blocks: the real scheduler half and manager."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.request import Request, RequestStatus

from spillway_connector import metrics
from spillway_connector.config import ConnectorConfig
from spillway_connector.engine.ipc.samples import sample_key
from spillway_connector.plan.waiting import LOOK_SECONDS, SECONDS_MAX
from spillway_connector.testing.clock import SteppedClock
from spillway_connector.testing.generation import SpillwayTieringManager, make_cpu_tier, scheduler_half, step_output
from spillway_connector.testing.memory import unnamed_region
from spillway_connector.testing.requests import allocated, request_of

BLOCK_TOKENS, BLOCKS, ROWS = 16, 4, 16
OTHERS = ReqContext(req_id="others")


class Rig:
    def __init__(self) -> None:
        self.clock = SteppedClock()
        self.region = unnamed_region(ROWS, 4096)
        self.tier = make_cpu_tier(ROWS, self.region, "lru", enable_events=False)
        self.manager = SpillwayTieringManager(
            self.tier,
            [],
            ROWS,
            ConnectorConfig.parse({"num_cpu_blocks": ROWS}),
            chunk_tokens=BLOCK_TOKENS,
            chunk_bytes=4096,
            clock=self.clock,
        )
        attention = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
        self.half = scheduler_half(self.manager, [attention])

    def arrive(self, name: str, salt: str | None = None, *, priority: int = 0, skips: bool = False) -> Request:
        request = request_of(
            name,
            hashes(name),
            tokens=BLOCK_TOKENS * BLOCKS + 1,
            block_tokens=BLOCK_TOKENS,
            status=RequestStatus.WAITING,
            cache_salt=salt,
            priority=priority,
            skips_reading=skips,
        )
        self.half.on_new_request(request)
        return request

    def store(self, *names: str) -> None:
        """Have the CPU tier hold the prefixes of these requests, the last one used last."""
        for name in names:
            stored = self.tier.prepare_store(keys(name), OTHERS)
            assert stored is not None
            self.tier.complete_store(stored.keys_to_store, OTHERS)

    def step(self, preempted: tuple[str, ...] = ()) -> None:
        self.half.build_connector_meta(step_output(preempted=preempted))

    def kept(self) -> set[str]:
        """Return the names of the prompts all of whose chunks are kept."""
        kept = self.tier.waiting.kept
        return {name for name in "abcdef" if kept >= set(keys(name))}


def hashes(name: str) -> list[bytes]:
    return [name.encode().ljust(31, b".") + bytes([number]) for number in range(BLOCKS)]


def keys(name: str) -> list[bytes]:
    return [make_offload_key(one, 0) for one in hashes(name)]


def blocks() -> KVCacheBlocks:
    return allocated(range(1, BLOCKS + 2))


@pytest.fixture
def rig() -> Iterator[Rig]:
    opened = Rig()
    opened.store("a", "b", "c", "d")
    yield opened
    opened.region.cleanup()


def test_what_waits_in_the_queue_is_there_at_its_turn_although_it_was_used_longest_ago(rig):
    rig.arrive("a")
    rig.step()
    rig.store("e", "f")

    assert rig.tier.ready == {key for name in "adef" for key in keys(name)}


def test_nothing_is_done_for_a_request_that_waits_until_a_chunk_is_to_leave(rig):
    rig.arrive("a")
    rig.step()
    rig.step()
    (state,) = rig.half.known_state("a").group_states
    assert not state.offload_keys

    rig.store("e")
    assert rig.kept() == {"a"} and state.offload_keys == keys("a")


def test_of_many_requests_that_wait_only_some_are_begun_in_a_step(rig):
    for number in range(20):
        rig.arrive(f"{number:02}")
    rig.step()
    assert not rig.tier.waiting.kept and len(rig.tier.waiting) == 16

    rig.step()
    assert not rig.tier.waiting.kept and len(rig.tier.waiting) == 20


def test_a_request_whose_turn_is_at_once_keeps_nothing(rig):
    request = rig.arrive("a")
    rig.half.get_num_new_matched_tokens(request, 0)
    rig.half.update_state_after_alloc(request, blocks(), 0)
    rig.step()

    assert not rig.kept()


def test_the_head_of_the_queue_keeps_its_chunks_until_it_has_blocks(rig):
    request = rig.arrive("a")
    rig.half.get_num_new_matched_tokens(request, 0)
    rig.step()
    assert rig.kept() == {"a"}

    rig.half.update_state_after_alloc(request, blocks(), BLOCKS * BLOCK_TOKENS)
    assert not rig.kept()
    assert rig.tier._readers, "from then on its load pins them"


def test_a_request_that_ends_in_the_queue_keeps_nothing(rig):
    request = rig.arrive("a")
    rig.step()
    request.status = RequestStatus.FINISHED_ABORTED
    rig.half.request_finished(request)

    assert not rig.kept()


def test_nobody_keeps_chunks_for_longer_than_the_bound(rig):
    rig.arrive("a")
    rig.step()
    rig.clock.advance(SECONDS_MAX)
    rig.step()

    assert not rig.kept()


def test_those_whose_turn_comes_first_keep_theirs(rig):
    for name in "abc":
        rig.arrive(name)
    rig.step()
    assert rig.kept() == {"a", "b"}, "half of the tier"

    rig.arrive("d", priority=-1)
    rig.step()
    assert rig.kept() == {"d", "a"}


def test_a_preempted_request_goes_first(rig):
    preempted = rig.arrive("c")
    rig.half.get_num_new_matched_tokens(preempted, 0)
    rig.half.update_state_after_alloc(preempted, blocks(), 0)
    rig.arrive("a")
    rig.arrive("b")
    rig.step()
    preempted.status = RequestStatus.PREEMPTED
    rig.step(preempted=("c",))

    assert rig.kept() == {"c", "a"}


def test_a_request_that_reads_no_cache_keeps_nothing(rig):
    rig.arrive("a", skips=True)
    rig.step()

    assert not rig.kept()


def test_a_reset_leaves_nothing_kept(rig):
    rig.arrive("a")
    rig.step()
    rig.half.reset_cache()

    assert not rig.tier.waiting.kept


@pytest.mark.parametrize("others", [("b", "c", "d", "e", "f"), ("b", "c", "d", "e")])
def test_the_first_eviction_of_a_tier_that_had_room_takes_nothing_that_waits(rig, others):
    """This holds however much of the tier the request takes at once, although no step has ended since there was
    room."""
    rig.half.reset_cache()
    rig.store("a")
    rig.arrive("a")
    rig.step()
    rig.store("b", "c")
    assert not rig.tier.waiting.kept_count, "nothing leaves a tier with room: there is nothing to find out"

    stored = rig.tier.prepare_store([key for name in others[2:] for key in keys(name)], OTHERS)
    assert stored is not None and len(stored.evicted_keys) == len(others[3:]) * BLOCKS
    assert rig.kept() == {"a"} and rig.tier.ready >= set(keys("a"))


def test_the_kept_chunks_are_reported(rig):
    rig.arrive("a")
    rig.step()
    rig.clock.advance(LOOK_SECONDS)
    rig.step()
    samples = rig.manager.take_samples()

    assert samples is not None
    assert samples.samples()[sample_key(metrics.CPU_TIER_BLOCKS, "waiting")] == BLOCKS
