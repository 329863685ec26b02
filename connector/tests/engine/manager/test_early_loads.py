"""Loads that begin while their chunks still come: in pieces of ready rows, ended once, whatever becomes of the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_offload.base import ReqContext, RequestOffloadingContext
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from spillway_connector.config import ConnectorConfig
from spillway_connector.engine.ipc.messages import LoadPiece, SpillwayWorkerMetadata
from spillway_connector.engine.manager.early_loads import EarlyLoad
from spillway_connector.engine.shared_tiers.prefix_tier import PrefixTier, TierJobResult
from spillway_connector.plan.prefix_memo import ChangeLog
from spillway_connector.testing.clock import SteppedClock
from spillway_connector.testing.generation import SpillwayTieringManager, make_cpu_tier, scheduler_half, step_output
from spillway_connector.testing.memory import unnamed_region
from spillway_connector.testing.requests import allocated, request_of
from spillway_connector.transfer.lookups import Answers, Lookup

BLOCK_TOKENS, BLOCKS, ROWS, CHUNK_BYTES = 16, 16, 24, 4096
TOKENS = BLOCK_TOKENS * BLOCKS
DEVICE_BLOCKS = [100 + number for number in range(BLOCKS)]


def key(number: int) -> bytes:
    return bytes([number]) * 36


events = st.lists(st.tuples(st.sampled_from(("arrive", "vanish", "look", "look")), st.integers(0, 9)), max_size=40)


@given(events, st.integers(1, 10))
def test_every_chunk_is_sent_once_and_the_end_reported_once(events, chunks):
    load = EarlyLoad(ReqContext("r"), [key(n) for n in range(chunks)], list(range(chunks)), 0)
    ready: set[bytes] = set()
    resident = {key(n) for n in range(chunks)}
    left: list[int] = []
    lost: list[int] = []
    ends = 0
    for action, number in [*events, *[("arrive", n) for n in range(chunks)], ("look", 0)]:
        if action == "arrive" and key(number) in resident:
            ready.add(key(number))
        elif action == "vanish":
            ready.discard(key(number))
            resident.discard(key(number))
        elif action == "look" and (due := load.due(ready, resident)) is not None:
            assert all(key(position) in ready for position in due.ready)
            gone = [position for position in range(chunks) if key(position) not in resident and position not in left]
            assert not due.lost or min(due.lost) == min(set(gone) - set(lost)), "from the first that is gone"
            left += due.ready
            lost += due.lost
            ends += due.last
    assert ends == 1
    assert sorted(left + lost) == list(range(chunks))
    assert load.due(ready, resident) is None


class ComingTier(PrefixTier):
    """Holds everything; chunks of its loads arrive, and fail, when the test chooses."""

    def __init__(self) -> None:
        self.tier_type = "coming"
        self.answered_requests = ChangeLog()
        self.loads, self.arrived, self.ended = [], [], []

    @property
    def open(self) -> bool:
        return True

    def lookup(self, key, req_context):
        return True

    def lookup_prefix(self, keys: Sequence[bytes], req_context) -> Answers:
        return Answers([Lookup.HIT] * len(keys), float("inf"))

    def take_arrived(self):
        arrived, self.arrived = self.arrived, []
        return arrived

    def submit_store(self, job_metadata):
        raise AssertionError("nothing is computed here")

    def submit_load(self, job_metadata):
        self.loads.append((job_metadata, list(job_metadata.keys)))

    def get_finished_jobs(self):
        ended, self.ended = self.ended, []
        return ended

    def on_new_request(self, req_context):
        return RequestOffloadingContext()

    def arrive(self, first: int, last: int) -> None:
        job, keys = self.loads[0]
        self.arrived.append((job.job_id, keys[first:last]))

    def end(self, failed: Sequence[int] = ()) -> None:
        job, keys = self.loads.pop(0)
        failed_keys = frozenset(keys[number] for number in failed)
        self.ended.append(TierJobResult(job.job_id, not failed, failed_keys=failed_keys, seconds=0.1))


class Rig:
    def __init__(self) -> None:
        self.tier = ComingTier()
        self.region = unnamed_region(ROWS, CHUNK_BYTES)
        options = {"num_cpu_blocks": ROWS, "prefill_tokens_per_second": 1.0}
        options |= {"promotion_in_flight_fraction": 1.0, "promotion_per_request_fraction": 1.0}
        self.manager = SpillwayTieringManager(
            make_cpu_tier(ROWS, self.region, "lru", enable_events=False),
            [self.tier],
            ROWS,
            ConnectorConfig.parse(options),
            chunk_tokens=BLOCK_TOKENS,
            chunk_bytes=CHUNK_BYTES,
            clock=SteppedClock(),
        )
        # What a tier of this rate has not brought yet is near.
        self.manager._gates[self.tier].load_rate.add(1e9, 1.0, 0.0)
        attention = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
        self.scheduler = scheduler_half(self.manager, [attention])
        self.request = request_of(
            "r", [bytes([number]) * 32 for number in range(BLOCKS)], tokens=TOKENS + 1, block_tokens=BLOCK_TOKENS
        )
        self.scheduler.on_new_request(self.request)

    def ask(self) -> tuple[int | None, bool]:
        return self.scheduler.get_num_new_matched_tokens(self.request, 0)

    def give_blocks(self) -> None:
        self.scheduler.update_state_after_alloc(self.request, allocated(DEVICE_BLOCKS), TOKENS)

    def step(self, finished: Sequence[str] = ()) -> list[LoadPiece]:
        metadata = self.scheduler.build_connector_meta(step_output(finished=finished))
        assert not metadata.load_jobs
        return list(getattr(metadata, "pieces", []))

    def begin(self) -> list[LoadPiece]:
        """Half has come, the request gets its blocks, the first piece leaves."""
        assert self.ask() == (None, False)
        self.step()
        self.tier.arrive(0, 8)
        assert self.ask() == (TOKENS, True)
        self.give_blocks()
        return self.step()

    def report(self, job_id: int, failed: bool = False) -> None:
        meta = SpillwayWorkerMetadata(completed_jobs={job_id: 1}, failed_jobs={job_id} if failed else set())
        self.scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=meta))

    def require_nothing_left(self) -> None:
        assert not self.scheduler._early_loads.loads
        assert not self.scheduler._jobs
        assert not self.scheduler._being_loaded
        assert not self.manager.primary_tier._readers
        assert self.manager._bounds.rows_in_flight == 0
        assert not self.manager._early_chunks
        assert self.manager.primary_tier.ready == set(self.manager.primary_tier.resident)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.region.cleanup()


def blocks_of(piece: LoadPiece) -> list[int]:
    return [] if piece.transfer_spec is None else piece.transfer_spec[1].block_ids.tolist()


def rows_of(rig: Rig, piece: LoadPiece) -> tuple[list[int], list[int]]:
    """(rows of the piece, rows of the chunks that its blocks are for)."""
    assert piece.transfer_spec is not None
    keys = rig.scheduler._req_status["r"].group_states[0].offload_keys
    numbers = [block - DEVICE_BLOCKS[0] for block in blocks_of(piece)]
    expected = [rig.manager.primary_tier._rows[keys[number]] for number in numbers]
    return piece.transfer_spec[0].block_ids.tolist(), expected


def test_a_load_is_sent_in_pieces_as_its_chunks_arrive(rig: Rig):
    (first,) = rig.begin()
    assert (blocks_of(first), first.last, first.lost_blocks) == (DEVICE_BLOCKS[:8], False, [])
    assert rig.step() == [], "nothing has come since"
    rig.tier.arrive(8, 9)
    assert rig.step() == [], "one more chunk makes no piece"
    rig.tier.arrive(9, 12)
    (second,) = rig.step()
    assert (blocks_of(second), second.last) == (DEVICE_BLOCKS[8:12], False)
    rig.tier.end()
    (third,) = rig.step()
    assert (blocks_of(third), third.last) == (DEVICE_BLOCKS[12:], True)
    for piece in (first, second, third):
        rows, expected = rows_of(rig, piece)
        assert rows == expected
    assert len({first.job_id, first.piece_id, second.piece_id, third.piece_id}) == 4
    assert len(rig.manager.primary_tier._readers) == BLOCKS, "all rows are pinned until the end"
    rig.report(first.job_id)
    rig.require_nothing_left()


def test_a_load_does_not_begin_before_a_quarter_has_arrived(rig: Rig):
    rig.ask()
    rig.step()
    rig.tier.arrive(0, 3)
    rig.step()
    rig.tier.arrive(4, 9)
    assert rig.ask() == (None, False), "what lies behind a gap does not count"


def test_a_load_does_not_begin_while_the_rest_is_far(rig: Rig):
    rate = rig.manager._gates[rig.tier].load_rate
    rate.add(1e9, 1e6, 0.0)  # some kilobytes a second from here on
    rig.ask()
    rig.step()
    rig.tier.arrive(0, 8)
    assert rig.ask() == (None, False)


def test_a_chunk_that_does_not_arrive_is_recomputed_and_those_before_it_are_not(rig: Rig):
    (first,) = rig.begin()
    rig.tier.end(failed=[12])
    (rest,) = rig.step()
    assert blocks_of(rest) == DEVICE_BLOCKS[8:12]
    assert (rest.last, rest.lost_blocks) == (True, DEVICE_BLOCKS[12:])
    rig.report(first.job_id, failed=True)
    rig.require_nothing_left()
    assert rig.ask() == (0, False), "not offered again"


def test_a_request_that_goes_away_leaves_nothing_behind(rig: Rig):
    (first,) = rig.begin()
    rig.request.status = RequestStatus.FINISHED_STOPPED
    rig.scheduler.request_finished(rig.request)
    (end,) = rig.step(finished=["r"])
    assert (blocks_of(end), end.last, end.lost_blocks) == ([], True, [])
    rig.report(first.job_id)
    rig.tier.end()
    rig.step()
    rig.require_nothing_left()
    assert not rig.scheduler._req_status


def test_a_copy_that_fails_after_its_request_has_gone_leaves_nothing_behind(rig: Rig):
    (first,) = rig.begin()
    rig.request.status = RequestStatus.FINISHED_STOPPED
    rig.scheduler.request_finished(rig.request)
    rig.step(finished=["r"])
    rig.report(first.job_id, failed=True)
    rig.tier.end()
    rig.step()
    rig.require_nothing_left()
    assert not rig.scheduler._recompute_only


def test_a_reset_ends_a_load_that_had_begun(rig: Rig):
    rig.begin()
    rig.tier.end()
    rig.scheduler.reset_cache()
    (end,) = rig.step()
    assert (blocks_of(end), end.last, end.lost_blocks) == ([], True, DEVICE_BLOCKS[8:])
    rig.report(end.job_id, failed=True)
    rig.step()
    rig.require_nothing_left()


def test_another_request_for_the_same_blocks_waits_for_the_load(rig: Rig):
    (first,) = rig.begin()
    other = request_of("other", rig.request.block_hashes, tokens=TOKENS + 1, block_tokens=BLOCK_TOKENS)
    rig.scheduler.on_new_request(other)
    assert rig.scheduler.get_num_new_matched_tokens(other, 0) == (None, False)
    rig.tier.end()
    rig.step()
    rig.report(first.job_id)
    assert rig.scheduler.get_num_new_matched_tokens(other, 0) == (TOKENS, True)
