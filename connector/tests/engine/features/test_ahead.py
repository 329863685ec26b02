"""Promotion while requests wait: the real scheduler half and manager, and a tier whose loads the test ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_offload.base import RequestOffloadingContext, make_offload_key
from vllm.v1.request import Request, RequestStatus

from spillway_connector import metrics
from spillway_connector.config import ConnectorConfig
from spillway_connector.engine.features.ahead import HINT_SECONDS, HINTS_MAX
from spillway_connector.engine.features.hints import HintOutcome
from spillway_connector.engine.ipc.samples import sample_key
from spillway_connector.engine.shared_tiers.prefix_tier import PrefixTier, TierJobResult
from spillway_connector.plan.ahead import AheadOutcome
from spillway_connector.plan.prefix_memo import ChangeLog
from spillway_connector.testing.clock import SteppedClock
from spillway_connector.testing.generation import (
    SpillwayTieringManager,
    make_cpu_tier,
    patch_vllm,
    scheduler_half,
    step_output,
)
from spillway_connector.testing.memory import unnamed_region
from spillway_connector.testing.requests import request_of
from spillway_connector.testing.vllm_parts import part_of
from spillway_connector.transfer.lookups import Answers, Lookup
from spillway_settings.wire import PROMOTE_UTILITY

BLOCK_TOKENS, BLOCKS, ROWS, CHUNK_BYTES = 16, 6, 48, 4096
PIECE = 8  # of a tier whose rate is not known yet
AHEAD_ROWS = 12


class HeldTier(PrefixTier):
    """Tier that has every chunk but those in `lacks`, and does not know yet about those in `unknown`. The test ends
    loads."""

    def __init__(self) -> None:
        self.tier_type = "held"
        self.answered_requests = ChangeLog()
        self.lacks: set[bytes] = set()
        self.unknown: set[bytes] = set()
        self.asked: list[bytes] = []
        self.loads, self.ended = [], []
        self.resting = False

    @property
    def open(self) -> bool:
        return not self.resting

    def lookup(self, key, req_context):
        raise AssertionError("asked for whole prefixes alone")

    def lookup_prefix(self, keys: Sequence[bytes], req_context) -> Answers:
        self.asked += keys
        found = []
        for key in keys:
            found.append(Lookup.MISS if key in self.lacks else Lookup.PENDING if key in self.unknown else Lookup.HIT)
            if key in self.lacks:
                break
        return Answers(found, float("inf"))

    def submit_store(self, job_metadata):
        raise AssertionError("nothing is computed here")

    def submit_load(self, job_metadata):
        self.loads.append(job_metadata)

    def get_finished_jobs(self):
        ended, self.ended = self.ended, []
        return ended

    def on_new_request(self, req_context):
        return RequestOffloadingContext()

    def end_loads(self, *, failed: bool = False, seconds: float = 0.0) -> None:
        for job in self.loads:
            keys = frozenset(job.keys) if failed else frozenset()
            self.ended.append(TierJobResult(job.job_id, not failed, failed_keys=keys, seconds=seconds))
        self.loads.clear()


class Device:
    """The method of vLLM's BlockPool that is called."""

    def __init__(self) -> None:
        self.cached: set[bytes] = set()

    def get_cached_block(self, block_hash, kv_cache_group_ids):
        return object() if block_hash in self.cached else None


class Rig:
    def __init__(self, fraction: float = AHEAD_ROWS / ROWS) -> None:
        self.clock = SteppedClock()
        self.tier = HeldTier()
        self.device = Device()
        self.region = unnamed_region(ROWS, CHUNK_BYTES)
        options = {
            "num_cpu_blocks": ROWS,
            "prefill_tokens_per_second": 1.0,
            "promotion_ahead_fraction": fraction,
            "promotion_in_flight_fraction": 1.0,
        }
        self.manager = SpillwayTieringManager(
            make_cpu_tier(ROWS, self.region, "lru", enable_events=False),
            [self.tier],
            ROWS,
            ConnectorConfig.parse(options),
            chunk_tokens=BLOCK_TOKENS,
            chunk_bytes=CHUNK_BYTES,
            clock=self.clock,
        )
        attention = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
        self.half = scheduler_half(self.manager, [attention])
        self.half.device_blocks = self.device
        self.requests: dict[str, Request] = {}

    def close(self) -> None:
        self.region.cleanup()

    def arrive(self, name: str) -> Request:
        request = self.requests[name] = waiting(name, name)
        self.half.on_new_request(request)
        return request

    def step(self) -> None:
        """A step in which vLLM asks about no request."""
        self.half.build_connector_meta(step_output())

    def turn(self, name: str) -> tuple[int | None, bool]:
        return self.half.get_num_new_matched_tokens(self.requests[name], 0)

    def abort(self, name: str) -> None:
        request = self.requests.pop(name)
        request.status = RequestStatus.FINISHED_ABORTED
        self.half.request_finished(request)

    def counts(self) -> dict[str, float]:
        samples = self.manager.take_samples()
        found = {} if samples is None else samples.samples()
        return {
            outcome.value: found[key]
            for outcome in AheadOutcome
            if (key := sample_key(metrics.PROMOTED_AHEAD, outcome.value)) in found
        }


def hashes(name: str) -> list[bytes]:
    return [name.encode().ljust(31, b".") + bytes([number]) for number in range(BLOCKS)]


def waiting(request_id: str, prefix: str) -> Request:
    return request_of(
        request_id,
        hashes(prefix),
        tokens=BLOCK_TOKENS * BLOCKS + 1,
        block_tokens=BLOCK_TOKENS,
        status=RequestStatus.WAITING,
    )


def keys(name: str) -> list[bytes]:
    return [make_offload_key(one, 0) for one in hashes(name)]


@pytest.fixture
def rig() -> Iterator[Rig]:
    opened = Rig()
    yield opened
    opened.close()


def test_a_waiting_request_finds_its_prefix_in_the_cpu_tier_when_its_turn_comes(rig):
    rig.arrive("w")
    rig.step()
    assert list(rig.tier.loads[0].keys) == keys("w")
    rig.tier.end_loads()
    rig.step()

    assert rig.manager.primary_tier.ready >= set(keys("w"))
    assert rig.turn("w") == (BLOCK_TOKENS * BLOCKS, True), "loaded to the device at once"
    assert rig.counts() == {"promoted": BLOCKS, "used": BLOCKS}
    assert not rig.half.ahead.waiting


def test_a_request_whose_turn_is_at_once_is_looked_up_once(rig):
    rig.arrive("w")
    rig.turn("w")
    asked = list(rig.tier.asked)
    rig.step()

    assert rig.tier.asked == asked
    assert rig.counts() == {}


def test_at_its_turn_a_request_waits_for_what_is_on_its_way_and_has_all_of_its_time_left(rig):
    rig.arrive("w")
    rig.step()
    rig.clock.advance(60.0)  # longer than a request waits for its loads

    assert rig.turn("w") == (None, False)
    assert rig.counts() == {"promoted": BLOCKS, "used": BLOCKS}
    rig.tier.end_loads()
    rig.step()
    assert rig.turn("w") == (BLOCK_TOKENS * BLOCKS, True)


def test_switched_off_nothing_is_asked_before_the_turn():
    rig = Rig(fraction=0)
    rig.arrive("w")
    rig.step()

    assert not rig.tier.asked
    rig.close()


def test_chunks_that_the_device_has_are_not_promoted(rig):
    rig.device.cached.update(hashes("part")[:4])
    rig.device.cached.update(hashes("all")[: BLOCKS - 1])
    rig.arrive("part")
    rig.arrive("all")  # its last chunk is computed with its last token
    rig.step()

    assert list(rig.tier.loads[0].keys) == keys("part")[4:]
    assert len(rig.tier.loads) == 1


def test_one_piece_at_a_time_and_none_while_a_request_whose_turn_has_come_loads(rig):
    for name in "abc":
        rig.arrive(name)
    rig.step()
    assert sum(len(job.keys) for job in rig.tier.loads) == PIECE
    rig.step()
    assert sum(len(job.keys) for job in rig.tier.loads) == PIECE, "the first piece is still on its way"
    rig.tier.end_loads()
    rig.arrive("now")
    rig.turn("now")  # loads
    rig.step()
    assert [list(job.keys) for job in rig.tier.loads] == [keys("now")]
    rig.tier.end_loads()
    rig.step()
    assert sum(len(job.keys) for job in rig.tier.loads) == AHEAD_ROWS - PIECE, "up to the bound of rows"


def test_a_turn_makes_room_for_the_next(rig):
    for name in "abc":
        rig.arrive(name)
    for _ in range(4):
        rig.step()
        rig.tier.end_loads()
    assert not rig.manager.primary_tier.resident.isdisjoint(keys("b"))
    assert rig.manager.primary_tier.resident.isdisjoint(keys("c"))

    rig.turn("a")
    rig.step()
    assert [list(job.keys) for job in rig.tier.loads] == [keys("c")]


def test_answers_of_the_tier_are_waited_for_and_what_it_lacks_is_left_alone(rig):
    rig.tier.unknown.update(keys("slow"))
    rig.tier.lacks.add(keys("short")[2])
    rig.tier.lacks.add(keys("cold")[0])
    for name in ("slow", "short", "cold"):
        rig.arrive(name)
    rig.step()
    assert [list(job.keys) for job in rig.tier.loads] == [keys("short")[:2]]
    rig.tier.end_loads()
    rig.tier.unknown.clear()
    rig.step()
    assert [list(job.keys) for job in rig.tier.loads] == [keys("slow")]


@pytest.mark.parametrize("why", ["resting", "does not pay"])
def test_a_tier_that_would_not_be_loaded_from_is_not_asked(rig, why):
    if why == "resting":
        rig.tier.resting = True
    else:
        rig.manager._gates[rig.tier].load_rate.add(1.0, 1e6, 0.0)
    rig.arrive("w")
    rig.step()

    assert not rig.tier.asked


def test_useless_promotions_end_when_their_budget_is_used_up(rig):
    """All requests leave before their turn. A load of one chunk takes a second here, twice the budget."""
    rig.manager._gates[rig.tier].load_rate.add(float(CHUNK_BYTES), 1.0, 0.0)
    rig.manager._gates[rig.tier].pays = lambda _: True
    for number in range(3):
        rig.arrive(f"{number}")
        rig.step()
        rig.tier.end_loads()
        rig.step()
        rig.abort(f"{number}")
    assert rig.counts() == {"promoted": BLOCKS, "unused": BLOCKS}, "the second and third were refused"


def test_what_others_use_is_not_evicted_for_it(rig):
    """Rows that are being read stay; with all of them read, nothing is promoted."""
    old = [make_offload_key(b"o" * 31 + bytes([number]), 0) for number in range(ROWS)]
    context = rig.arrive("reader")
    cpu = rig.manager.primary_tier
    status = rig.half._req_status["reader"].req_context
    cpu.prepare_write(old, status)
    cpu.complete_write(old, status, True)
    cpu.prepare_load(old[2:], status)
    rig.tier.lacks.add(keys("reader")[0])
    rig.arrive("w")
    rig.step()

    assert set(old[2:]) <= cpu.ready
    assert sum(len(job.keys) for job in rig.tier.loads) <= 2
    assert context is rig.requests["reader"]


actions = st.lists(
    st.tuples(
        st.sampled_from(("arrive", "arrive", "step", "step", "turn", "abort", "end", "fail", "reset", "pause")),
        st.integers(0, 7),
    ),
    max_size=60,
)


@given(actions)
def test_rows_are_bounded_and_every_promoted_chunk_is_accounted_for(moves):
    rig = Rig()
    counted = dict.fromkeys((outcome.value for outcome in AheadOutcome), 0.0)
    waiting: list[str] = []
    for number, (action, choice) in enumerate(moves):
        if action == "arrive":
            rig.arrive(f"r{number}")
            waiting.append(f"r{number}")
        elif action in ("turn", "abort") and waiting:
            name = waiting.pop(choice % len(waiting))
            if action == "turn":
                rig.turn(name)
            rig.abort(name)
        elif action == "step":
            before = rig.manager.rows_being_loaded()
            rig.step()
            assert rig.manager.rows_being_loaded() <= max(before, PIECE)
        elif action in ("end", "fail"):
            rig.tier.end_loads(failed=action == "fail")
        elif action == "reset":
            rig.manager.reset_cache()
        else:
            rig.clock.advance(choice)
        assert sum(len(one.promoted) for one in rig.half.ahead.waiting.values()) <= AHEAD_ROWS
        for outcome, count in rig.counts().items():
            counted[outcome] += count
    for name in waiting:
        rig.abort(name)
    for outcome, count in rig.counts().items():
        counted[outcome] += count
    assert counted["promoted"] == counted["used"] + counted["evicted"] + counted["unused"]
    assert rig.half.ahead._rows == 0
    assert not rig.half.ahead.waiting
    assert not rig.half.ahead._due
    rig.close()


def expected(rig: Rig, name: str, hashing_seconds: float = 0.0) -> None:
    """A hint of the prefix that the request `name` would have."""
    rig.half.prefix_expected(waiting(f"hint of {name}", name), hashing_seconds)


def test_a_hint_promotes_before_its_request_comes_and_is_used_at_its_turn(rig):
    expected(rig, "w")
    rig.step()
    assert list(rig.tier.loads[0].keys) == keys("w")
    rig.tier.end_loads()
    rig.step()
    rig.arrive("w")

    assert rig.turn("w") == (BLOCK_TOKENS * BLOCKS, True)
    assert rig.counts() == {"promoted": BLOCKS, "used": BLOCKS}
    assert not rig.half.ahead._hints


def test_requests_that_have_come_go_before_hints(rig):
    expected(rig, "later")
    rig.arrive("now")
    rig.step()

    assert [job.req_context.req_id for job in rig.tier.loads] == ["now", "hint of later"]
    assert len(rig.tier.loads[0].keys) == BLOCKS, "all of it, and of the hint what is left of a piece"


def test_a_hint_that_nobody_comes_for_is_given_up_and_its_chunks_go_first(rig):
    cpu = rig.manager.primary_tier
    old = [make_offload_key(b"o" * 31 + bytes([number]), 0) for number in range(ROWS - BLOCKS)]
    context = rig.half._req_status["user"].req_context if rig.arrive("user") else None
    cpu.prepare_write(old, context)
    cpu.complete_write(old, context, True)
    rig.turn("user")
    rig.tier.end_loads()
    rig.step()
    rig.abort("user")
    expected(rig, "w")
    rig.step()
    rig.tier.end_loads()
    rig.step()
    promoted = set(keys("w")) & cpu.ready
    assert promoted
    rig.clock.advance(HINT_SECONDS)
    rig.step()
    cpu.prepare_write([make_offload_key(b"n" * 32, 0)], context)

    assert len(promoted & cpu.ready) == len(promoted) - 1, "not one that was used, however long ago"
    assert rig.half.ahead._rows == rig.half.ahead._hint_rows == 0


def test_a_hint_that_finds_nothing_to_promote_keeps_no_slot(rig):
    for number in range(HINTS_MAX):
        rig.tier.lacks.update(keys(f"{number}"))
        expected(rig, f"{number}")
    assert rig.half.ahead.hint_refused() is HintOutcome.BUSY
    for _ in range(HINTS_MAX):
        rig.step()

    assert rig.half.ahead.hint_refused() is None
    assert not rig.half.ahead._hints
    assert rig.counts() == {}


def test_a_hint_whose_answer_is_on_its_way_waits_for_it(rig):
    rig.tier.unknown.update(keys("w"))
    expected(rig, "w")
    rig.step()
    assert rig.half.ahead._hints
    rig.tier.unknown.clear()
    rig.step()

    assert list(rig.tier.loads[0].keys) == keys("w")


def test_an_idle_engine_gives_up_old_hints_when_another_comes(rig):
    for number in range(HINTS_MAX):
        expected(rig, f"{number}")
    assert rig.half.ahead.hint_refused() is HintOutcome.BUSY
    rig.clock.advance(HINT_SECONDS)

    assert rig.half.ahead.hint_refused() is None


def test_hints_are_refused_beyond_their_bounds():
    rig = Rig(fraction=0)
    assert rig.half.ahead.hint_refused() is HintOutcome.OFF
    rig.close()
    rig = Rig()
    assert rig.half.ahead.hint_refused() is None
    expected(rig, "slow", hashing_seconds=0.002)
    assert rig.half.ahead.hint_refused() is HintOutcome.BUSY, "hashing has a hundredth of the time"
    rig.clock.advance(0.21)
    assert rig.half.ahead.hint_refused() is None
    rig.step()  # a piece of it takes all rows that hints may have
    assert rig.half.ahead._hint_rows == AHEAD_ROWS // 2
    assert rig.half.ahead.hint_refused() is HintOutcome.BUSY
    rig.close()


def test_the_engine_core_gets_the_utility():
    """Called as vLLM calls a utility; vLLM's own Request is hashed by the engine's own function."""
    patch_vllm("promotion-hints")
    patch_vllm("promotion-hints")
    taken = []
    connector = SimpleNamespace(
        hint_refused=lambda: None, prefix_expected=lambda request, seconds: taken.append((request, seconds))
    )
    core = part_of(
        EngineCore,
        scheduler=part_of(Scheduler, connector=connector),
        request_block_hasher=lambda request: [bytes(request.prompt_token_ids)],
    )
    promote = getattr(EngineCore, PROMOTE_UTILITY)

    assert promote(core, [1, 2, 3], "salt") == "accepted"
    [(request, seconds)] = taken
    assert (request.block_hashes, request.cache_salt) == ([b"\1\2\3"], "salt")
    assert seconds >= 0
    connector.hint_refused = lambda: HintOutcome.BUSY
    assert promote(core, [1], None) == "busy"
    core.scheduler.connector = None
    assert promote(core, [1], None) == "off"
    assert len(taken) == 1
