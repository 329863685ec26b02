"""Failures of copies end as recomputes, jobs run once, completions outlive the step that began them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata, TransferJob
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.worker.worker import TransferResult

from spillway_connector import metrics
from spillway_connector.engine.ipc.messages import LoadPiece, SpillwayConnectorMetadata, SpillwayWorkerMetadata
from spillway_connector.engine.ipc.process_settings import ProcessSettings
from spillway_connector.engine.ipc.samples import sample_key
from spillway_connector.engine.layouts.kv_parts import PlacedKVCaches
from spillway_connector.engine.v023.handlers import StepHandler
from spillway_connector.engine.v023.worker import SpillwayConnectorWorker
from spillway_connector.engine.worker import half


class ScriptedHandler(StepHandler):
    """Takes jobs, and ends them when and how the test chooses."""

    def __init__(self) -> None:
        self.submitted: list[int] = []
        self.together: list[int] = []
        self.refuse: set[int] = set()
        self.ending: list[tuple[int, bool]] = []
        self.waited: list[set[int]] = []

    def transfer_async(self, job_id, spec):
        if job_id in self.refuse:
            raise RuntimeError("the transport is full")
        self.submitted.append(job_id)
        return True

    def transfer_together(self, copy_id, specs):
        assert all(isinstance(source, GPULoadStoreSpec) for source, _ in specs)
        self.together.append(len(specs))
        self.transfer_async(copy_id, specs[0])

    def get_finished(self):
        ended, self.ending = self.ending, []
        return [
            TransferResult(job_id, success, transfer_size=100, transfer_time=0.5, transfer_type=("CPU", "GPU"))
            for job_id, success in ended
        ]

    def wait(self, job_ids):
        self.waited.append(set(job_ids))


@pytest.fixture
def worker_and_handler():
    worker = SpillwayConnectorWorker(SimpleNamespace())
    handler = ScriptedHandler()
    worker.worker.register_handler(CPULoadStoreSpec, GPULoadStoreSpec, handler)
    worker.worker.register_handler(GPULoadStoreSpec, CPULoadStoreSpec, handler)
    return worker, handler


def load_job(request: str, device_blocks: list[int]) -> TransferJob:
    device = GPULoadStoreSpec(device_blocks, group_sizes=[len(device_blocks)], block_indices=[0])
    return TransferJob(request, (CPULoadStoreSpec(list(range(len(device_blocks)))), device))


def store_job(request: str, device_blocks: list[int]) -> TransferJob:
    device = GPULoadStoreSpec(device_blocks, group_sizes=[len(device_blocks)], block_indices=[0])
    return TransferJob(request, (device, CPULoadStoreSpec(list(range(len(device_blocks))))))


def metadata(loads=None, stores=None, flush=None) -> OffloadingConnectorMetadata:
    return OffloadingConnectorMetadata(load_jobs=loads or {}, store_jobs=stores or {}, jobs_to_flush=flush)


def test_metadata_seen_twice_launches_once(worker_and_handler):
    worker, handler = worker_and_handler
    meta = metadata(loads={1: load_job("a", [5])}, stores={2: store_job("b", [6])})
    for _ in range(3):
        worker.start_kv_transfers(meta)
        worker.prepare_store_kv(meta)
    worker.start_kv_transfers(metadata())
    assert handler.submitted == [1, 2]


def test_a_failed_load_is_received_with_its_blocks_invalid(worker_and_handler):
    worker, handler = worker_and_handler
    worker.start_kv_transfers(metadata(loads={1: load_job("a", [5, 6]), 2: load_job("b", [7])}))
    assert worker.get_finished(set()) == (set(), set())
    handler.ending = [(1, False), (2, True)]
    assert worker.get_finished(set()) == (set(), {"a", "b"})  # steps later, no metadata bound
    assert worker.take_invalid_blocks() == {5, 6}
    assert worker.take_invalid_blocks() == set()
    meta = worker.build_connector_worker_meta()
    assert (meta.completed_jobs, meta.failed_jobs) == ({1: 1, 2: 1}, {1})
    assert worker.build_connector_worker_meta() is None


def test_a_refused_load_is_received_once_with_its_blocks_invalid(worker_and_handler):
    worker, handler = worker_and_handler
    handler.refuse = {1}
    worker.start_kv_transfers(metadata(loads={1: load_job("a", [5])}))
    assert worker.get_finished(set()) == (set(), {"a"})
    assert worker.take_invalid_blocks() == {5}
    assert worker.get_finished(set()) == (set(), set())
    assert worker.build_connector_worker_meta().failed_jobs == {1}


def piece(job: int, number: int, blocks: list[int], *, last: bool = False, lost: Sequence[int] = ()) -> LoadPiece:
    spec = load_job("a", blocks).transfer_spec if blocks else None
    return LoadPiece(job, number, "a", spec, last, list(lost))


def in_pieces(*pieces: LoadPiece) -> SpillwayConnectorMetadata:
    return SpillwayConnectorMetadata({}, {}, None, list(pieces))


def test_a_step_that_awaits_copies_ends_with_the_first_load(worker_and_handler, monkeypatch):
    worker, handler = worker_and_handler
    worker.idle_step_seconds_max = math.inf
    ends = [[(2, True)], [], [(1, True)]]  # at each look: that of a store, nothing, that of the load
    monkeypatch.setattr(half.time, "sleep", lambda _: setattr(handler, "ending", ends.pop(0)))
    worker.prepare_store_kv(metadata(stores={2: store_job("b", [6])}))
    worker.start_kv_transfers(metadata(loads={1: load_job("a", [5])}))
    assert worker.get_finished(set())[1] == set(), "the step computes something"
    worker.start_kv_transfers(SpillwayConnectorMetadata({}, {}, awaits_copies=True))
    assert worker.get_finished(set())[1] == {"a"}
    assert worker.build_connector_worker_meta().completed_jobs == {1: 1, 2: 1}
    worker.start_kv_transfers(SpillwayConnectorMetadata({}, {}, awaits_copies=True))
    assert worker.get_finished(set())[1] == set(), "no load moves"


def test_a_step_that_awaits_copies_ends_without_a_load_in_time(worker_and_handler, monkeypatch):
    worker, handler = worker_and_handler
    worker.idle_step_seconds_max = 0.0
    monkeypatch.setattr(half.time, "sleep", lambda _: pytest.fail("it waited"))
    meta = SpillwayConnectorMetadata({1: load_job("a", [5])}, {}, awaits_copies=True)
    worker.start_kv_transfers(meta)
    assert worker.get_finished(set())[1] == set()
    handler.ending = [(1, True)]
    assert worker.get_finished(set())[1] == {"a"}


def test_a_load_in_pieces_is_received_when_the_last_of_them_has_ended(worker_and_handler):
    worker, handler = worker_and_handler
    meta = in_pieces(piece(1, 10, [5, 6]))
    for _ in range(2):
        worker.start_kv_transfers(meta)
    handler.ending = [(10, True)]
    assert worker.get_finished(set()) == (set(), set()), "more is to come"
    worker.start_kv_transfers(in_pieces(piece(1, 11, [7]), piece(1, 12, [8], last=True)))
    handler.ending = [(12, True)]
    assert worker.get_finished(set()) == (set(), set())
    worker.handle_preemptions(metadata(flush={1}))
    assert handler.waited[-1] >= {11}, "waiting for a load waits for its pieces"
    handler.ending = [(11, True)]
    assert worker.get_finished(set()) == (set(), {"a"})
    assert handler.submitted == [10, 11, 12]
    meta = worker.build_connector_worker_meta()
    assert (meta.completed_jobs, meta.failed_jobs, worker.take_invalid_blocks()) == ({1: 1}, set(), set())


def test_what_a_load_in_pieces_lost_is_invalid(worker_and_handler):
    worker, handler = worker_and_handler
    handler.refuse = {11}
    worker.start_kv_transfers(in_pieces(piece(1, 10, [5]), piece(1, 11, [6]), piece(1, 12, [7])))
    handler.ending = [(10, True), (12, False)]
    assert worker.get_finished(set()) == (set(), set())
    worker.start_kv_transfers(in_pieces(piece(1, 13, [], last=True, lost=[8, 9])))
    assert worker.get_finished(set()) == (set(), {"a"})
    assert worker.take_invalid_blocks() == {6, 7, 8, 9}
    meta = worker.build_connector_worker_meta()
    assert (meta.completed_jobs, meta.failed_jobs) == ({1: 1}, {1})
    assert worker.get_finished(set()) == (set(), set())


@pytest.mark.parametrize("refused", [True, False])
def test_a_failed_store_is_completed_as_failed_and_harms_no_request(worker_and_handler, refused):
    worker, handler = worker_and_handler
    handler.refuse = {3} if refused else set()
    worker.prepare_store_kv(metadata(stores={3: store_job("a", [5])}))
    worker.start_kv_transfers(metadata())
    handler.ending = [] if refused else [(3, False)]
    assert worker.get_finished(set()) == (set(), set())
    assert worker.take_invalid_blocks() == set()
    meta = worker.build_connector_worker_meta()
    assert (meta.completed_jobs, meta.failed_jobs) == ({3: 1}, {3})


def test_preemption_submits_waiting_stores_before_it_waits(worker_and_handler):
    worker, handler = worker_and_handler
    worker.prepare_store_kv(metadata(stores={4: store_job("a", [5])}))
    worker.handle_preemptions(metadata(flush={4}))
    assert handler.submitted == [4]
    assert {4} in handler.waited


def test_stores_of_a_step_go_together_and_a_flush_of_one_waits_for_their_copy(worker_and_handler):
    worker, handler = worker_and_handler
    worker.prepare_store_kv(metadata(stores={4: store_job("a", [5]), 5: store_job("b", [6])}))
    worker.handle_preemptions(metadata(flush={5}))
    assert (handler.submitted, handler.together) == ([4], [2])
    assert 4 in handler.waited[-1]
    handler.ending = [(4, True)]
    worker.get_finished(set())
    assert worker.build_connector_worker_meta().completed_jobs == {4: 1, 5: 1}


def test_one_failing_rank_fails_the_job():
    here = SpillwayWorkerMetadata(completed_jobs={1: 1, 2: 1})
    there = SpillwayWorkerMetadata(completed_jobs={1: 1}, failed_jobs={1})
    both = here.aggregate(there)
    assert (both.completed_jobs, both.failed_jobs) == ({1: 2, 2: 1}, {1})


def test_ascend_layouts_are_not_given_to_vllms_check():
    """vLLM 0.23 asserts one tensor a layer; a tuple never reaches that assertion."""
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
    config = KVCacheConfig(
        num_blocks=4,
        kv_cache_tensors=[KVCacheTensor(size=4 * spec.page_size_bytes, shared_by=["l0"])],
        kv_cache_groups=[KVCacheGroupSpec(["l0"], spec)],
    )
    given = []
    worker = SpillwayConnectorWorker(
        SimpleNamespace(kv_cache_config=config, get_handlers=lambda caches: given.append(caches) or [])
    )
    pair = tuple(torch.zeros(4, 16, 1, 8, dtype=torch.bfloat16) for _ in range(2))
    worker.register_kv_caches({"l0": pair})
    worker.register_kv_caches({"l0": torch.zeros(4, 512, dtype=torch.int8)})
    assert [type(caches) for caches in given] == [PlacedKVCaches, CanonicalKVCaches]
    assert [tensor.tensor.data_ptr() for tensor in given[0].tensors] == [view.data_ptr() for view in pair]


def test_stats_are_always_there_and_count_copies(worker_and_handler):
    worker, handler = worker_and_handler
    assert worker.get_kv_connector_stats() is not None
    worker.start_kv_transfers(metadata(loads={1: load_job("a", [5]), 2: load_job("b", [6])}))
    handler.ending = [(1, True), (2, False)]
    worker.get_finished(set())
    reduced = worker.get_kv_connector_stats().reduce()
    assert reduced["CPU_to_GPU_total_bytes"] == 100
    assert reduced["device_copy_bytes|load"] == 100
    assert reduced["device_copy_failures|load"] == 1


def test_the_settings_of_the_process_go_with_the_statistics_and_not_into_the_log_line(worker_and_handler):
    worker, handler = worker_and_handler
    worker.spec.process_settings = ProcessSettings("worker-0", {"transport": "cpu"})
    worker.start_kv_transfers(metadata(loads={1: load_job("a", [5])}))
    handler.ending = [(1, True)]
    worker.get_finished(set())
    key = sample_key(metrics.PROCESS_SETTING, "worker-0", "transport", "cpu")
    stats = worker.get_kv_connector_stats()
    assert stats.samples()[key] == 1
    assert stats.reduce()["device_copy_bytes|load"] == 100
    assert not any("process_setting" in name for name in stats.reduce())
    assert key not in worker.get_kv_connector_stats().samples()
    assert worker.build_connector_worker_meta().completed_jobs == {1: 1}
