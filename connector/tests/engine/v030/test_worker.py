"""Failures of copies end as recomputes, jobs run once, completions outlive the step that began them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata, TransferJob
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import GPULoadStoreSpec, TransferResult
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from spillway_connector import metrics
from spillway_connector.engine.ipc.messages import LoadPiece, SpillwayConnectorMetadata, SpillwayWorkerMetadata
from spillway_connector.engine.ipc.process_settings import ProcessSettings
from spillway_connector.engine.ipc.samples import sample_key
from spillway_connector.engine.v030.connector import SpillwayConnector
from spillway_connector.engine.v030.offload_worker import StepWorker
from spillway_connector.engine.v030.worker import SpillwayConnectorWorker
from spillway_connector.engine.worker import half
from spillway_connector.plan.copy_table import BATCH

FULL = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
WINDOW = SlidingWindowSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.bfloat16, sliding_window=32)


class ScriptedWorker(StepWorker):
    """Takes jobs, and ends them when and how the test chooses."""

    def __init__(self) -> None:
        self.submitted: list[int] = []
        self.together: list[int] = []
        self.refuse: set[int] = set()
        self.ending: list[tuple[int, bool]] = []
        self.waited: list[set[int]] = []

    def submit_store(self, job_id, src_spec, dst_spec):
        return self._submit(job_id, src_spec, dst_spec)

    def submit_stores(self, copy_id, stores):
        self.together.append(len(stores))
        return self._submit(copy_id, *stores[0])

    def submit_load(self, job_id, src_spec, dst_spec):
        return self._submit(job_id, dst_spec, src_spec)

    def _submit(self, job_id, device, host):
        assert isinstance(device, GPULoadStoreSpec)
        assert isinstance(host, CPULoadStoreSpec)
        if job_id in self.refuse:
            return False
        self.submitted.append(job_id)
        return True

    def get_finished(self):
        ended, self.ending = self.ending, []
        return [TransferResult(job_id, success, 100, 0.5) for job_id, success in ended]

    def wait(self, job_ids):
        self.waited.append(set(job_ids))


def make(*specs) -> tuple[SpillwayConnectorWorker, ScriptedWorker]:
    groups = [KVCacheGroupSpec([f"l{number}"], spec) for number, spec in enumerate(specs)]
    spec = SimpleNamespace(replicated_layout=False, config=None)
    worker = SpillwayConnectorWorker(spec, VllmConfig(), KVCacheConfig(4, [], groups))
    worker.worker = ScriptedWorker()
    return worker, worker.worker


def load_job(request: str, blocks: list[int]) -> TransferJob:
    device = GPULoadStoreSpec(blocks, group_sizes=[len(blocks)], block_indices=[0])
    return TransferJob(request, CPULoadStoreSpec(list(range(len(blocks)))), device)


def store_job(request: str, blocks: list[int]) -> TransferJob:
    job = load_job(request, blocks)
    return TransferJob(request, job.dst_spec, job.src_spec)


def metadata(loads=None, stores=None, flush=None) -> OffloadingConnectorMetadata:
    return OffloadingConnectorMetadata(load_jobs=loads or {}, store_jobs=stores or {}, jobs_to_flush=flush)


def test_metadata_seen_twice_launches_once():
    worker, scripted = make(FULL)
    meta = metadata(loads={1: load_job("a", [5])}, stores={2: store_job("b", [6])})
    for _ in range(3):
        worker.handle_preemptions(meta)
        worker.start_kv_transfers(meta)
        worker.prepare_store_kv(meta)
    worker.handle_preemptions(metadata())
    assert scripted.submitted == [1, 2]


def test_loads_begin_before_the_forward_pass_unless_blocks_are_zeroed_in_it():
    worker, scripted = make(FULL)
    worker.handle_preemptions(metadata(loads={1: load_job("a", [5])}))
    assert scripted.submitted == [1]
    int8 = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.int8)
    worker, scripted = make(FULL, int8)  # of mixed precision: vLLM zeroes what it allocates
    meta = metadata(loads={1: load_job("a", [5])})
    worker.handle_preemptions(meta)
    assert scripted.submitted == []
    worker.start_kv_transfers(meta)
    assert scripted.submitted == [1]


@pytest.mark.parametrize("refused", [True, False])
def test_a_failed_load_of_one_list_of_blocks_names_them(refused):
    worker, scripted = make(FULL)
    scripted.refuse = {1} if refused else set()
    worker.start_kv_transfers(metadata(loads={1: load_job("a", [5, 6]), 2: load_job("b", [7])}))
    scripted.ending = [(2, True)] if refused else [(1, False), (2, True)]
    results = worker.get_transfer_results()
    assert (results.finished_recving, results.failed_recving) == ({"a", "b"}, set())
    assert worker.take_invalid_blocks() == {5, 6}
    assert worker.take_invalid_blocks() == set()
    meta = worker.build_connector_worker_meta()
    assert (meta.completed_jobs, meta.failed_jobs) == ({1: 1, 2: 1}, {1})
    assert worker.build_connector_worker_meta() is None


def test_the_connector_reports_of_every_step():
    """vLLM drops a report of None in a step without a forward pass, and the scheduler's half never hears of its end."""
    connector = SpillwayConnector.__new__(SpillwayConnector)
    connector.connector_worker, scripted = make(FULL)
    assert connector.connector_worker.build_connector_worker_meta() is None
    empty = connector.build_connector_worker_meta()
    assert isinstance(empty, SpillwayWorkerMetadata)
    assert not (empty.completed_jobs or empty.failed_jobs or empty.adapters or empty.samples)
    connector.connector_worker.start_kv_transfers(metadata(loads={1: load_job("a", [5])}))
    scripted.ending = [(1, True)]
    connector.connector_worker.get_finished(set())
    assert connector.build_connector_worker_meta().completed_jobs == {1: 1}


@pytest.mark.parametrize("specs", [(FULL, WINDOW), (WINDOW,)], ids=["several groups", "windows alone"])
@pytest.mark.parametrize("refused", [True, False])
def test_a_failed_load_of_another_model_names_the_request_alone(specs, refused):
    """vLLM 0.32 ends the engine when blocks of one of several groups are named."""
    worker, scripted = make(*specs)
    scripted.refuse = {1} if refused else set()
    worker.start_kv_transfers(metadata(loads={1: load_job("a", [5, 6]), 2: load_job("b", [7])}))
    scripted.ending = [(2, True)] if refused else [(1, False), (2, True)]
    results = worker.get_transfer_results()
    assert (results.finished_recving, results.failed_recving) == ({"a", "b"}, {"a"})
    assert worker.take_invalid_blocks() == set()
    assert worker.build_connector_worker_meta().failed_jobs == {1}


def piece(job: int, number: int, blocks: list[int], *, last: bool = False, lost: Sequence[int] = ()) -> LoadPiece:
    job_of_blocks = load_job("a", blocks)
    spec = (job_of_blocks.src_spec, job_of_blocks.dst_spec) if blocks else None
    return LoadPiece(job, number, "a", spec, last, list(lost))


def in_pieces(*pieces: LoadPiece) -> SpillwayConnectorMetadata:
    return SpillwayConnectorMetadata({}, {}, None, list(pieces))


def test_a_step_that_awaits_copies_ends_with_the_first_load(monkeypatch):
    worker, scripted = make(FULL)
    worker.idle_step_seconds_max = math.inf
    ends = [[(2, True)], [], [(1, True)]]  # at each look: that of a store, nothing, that of the load
    monkeypatch.setattr(half.time, "sleep", lambda _: setattr(scripted, "ending", ends.pop(0)))
    worker.prepare_store_kv(metadata(stores={2: store_job("b", [6])}))
    worker.start_kv_transfers(metadata(loads={1: load_job("a", [5])}))
    assert worker.get_finished(set())[1] == set(), "the step computes something"
    worker.start_kv_transfers(SpillwayConnectorMetadata({}, {}, awaits_copies=True))
    assert worker.get_finished(set())[1] == {"a"}
    assert worker.build_connector_worker_meta().completed_jobs == {1: 1, 2: 1}
    worker.start_kv_transfers(SpillwayConnectorMetadata({}, {}, awaits_copies=True))
    assert worker.get_finished(set())[1] == set(), "no load moves"


def test_a_step_that_awaits_copies_ends_without_a_load_in_time(monkeypatch):
    worker, scripted = make(FULL)
    worker.idle_step_seconds_max = 0.0
    monkeypatch.setattr(half.time, "sleep", lambda _: pytest.fail("it waited"))
    meta = SpillwayConnectorMetadata({1: load_job("a", [5])}, {}, awaits_copies=True)
    worker.start_kv_transfers(meta)
    assert worker.get_finished(set())[1] == set()
    scripted.ending = [(1, True)]
    assert worker.get_finished(set())[1] == {"a"}


def test_a_load_in_pieces_is_received_when_the_last_of_them_has_ended():
    worker, scripted = make(FULL)
    meta = in_pieces(piece(1, 10, [5, 6]))
    for _ in range(2):
        worker.handle_preemptions(meta)
        worker.start_kv_transfers(meta)
    scripted.ending = [(10, True)]
    assert worker.get_transfer_results().finished_recving == set(), "more is to come"
    worker.handle_preemptions(in_pieces(piece(1, 11, [7]), piece(1, 12, [8], last=True, lost=[9])))
    scripted.ending = [(12, True)]
    assert worker.get_transfer_results().finished_recving == set()
    worker.handle_preemptions(metadata(flush={1}))
    assert scripted.waited[-1] >= {11}, "waiting for a load waits for its pieces"
    scripted.ending = [(11, True)]
    assert worker.get_transfer_results().finished_recving == {"a"}
    assert scripted.submitted == [10, 11, 12]
    assert worker.take_invalid_blocks() == {9}
    assert worker.build_connector_worker_meta().completed_jobs == {1: 1}


@pytest.mark.parametrize("refused", [True, False])
def test_a_failed_store_is_completed_as_failed_and_harms_no_request(refused):
    worker, scripted = make(FULL)
    scripted.refuse = {3} if refused else set()
    worker.prepare_store_kv(metadata(stores={3: store_job("a", [5])}))
    worker.start_kv_transfers(metadata())
    scripted.ending = [] if refused else [(3, False)]
    results = worker.get_transfer_results()
    assert (results.finished_recving, results.failed_recving) == (set(), set())
    assert worker.take_invalid_blocks() == set()
    meta = worker.build_connector_worker_meta()
    assert (meta.completed_jobs, meta.failed_jobs) == ({3: 1}, {3})


def test_a_flush_submits_waiting_stores_and_those_that_come_with_it():
    worker, scripted = make(FULL)
    worker.prepare_store_kv(metadata(stores={4: store_job("a", [5])}))
    meta = metadata(stores={6: store_job("b", [6]), 7: store_job("c", [7])}, flush={4, 6})
    worker.handle_preemptions(meta)
    assert (scripted.submitted, scripted.together) == ([4], [2])
    assert scripted.waited == [{4, 6}]
    worker.prepare_store_kv(meta)
    worker.handle_preemptions(metadata())
    assert (scripted.submitted, scripted.together) == ([4, 7], [2, 1])


def test_one_failing_rank_fails_the_job_and_all_ranks_are_counted():
    here, there = SpillwayWorkerMetadata({1: 1, 2: 1}), SpillwayWorkerMetadata({1: 1}, failed_jobs={1})
    for rank in (here, there):
        rank.samples.add(metrics.DEVICE_COPY_BYTES, 100, "load")
        rank.transfer_stats.load.record(100, 0.5)
    both = here.aggregate(there)
    assert (both.completed_jobs, both.failed_jobs) == ({1: 2, 2: 1}, {1})
    assert both.samples.samples() == {sample_key(metrics.DEVICE_COPY_BYTES, "load"): 200}
    assert both.transfer_stats.load.bytes == 200


def test_copies_are_counted_for_vllm_and_for_spillway():
    worker, scripted = make(FULL)
    worker.start_kv_transfers(metadata(loads={1: load_job("a", [5]), 2: load_job("b", [6])}))
    worker.prepare_store_kv(metadata(stores={3: store_job("c", [7])}))
    worker.handle_preemptions(metadata())
    scripted.ending = [(1, True), (2, False), (3, True)]
    worker.get_transfer_results()
    meta = worker.build_connector_worker_meta()
    assert (meta.transfer_stats.load.sizes, meta.transfer_stats.store.sizes) == ([100], [100])
    assert meta.samples.samples()[sample_key(metrics.DEVICE_COPY_FAILURES, "load")] == 1
    assert meta.samples.samples()[sample_key(metrics.DEVICE_COPY_BYTES, "store")] == 100


def test_the_state_of_the_device_is_reported_once():
    """Every step without a copy would send metadata if it were reported each time."""
    worker, _ = make(FULL)
    device = SimpleNamespace(
        path=SimpleNamespace(name=BATCH), pin=SimpleNamespace(pinned=True, method=SimpleNamespace(value="any"))
    )
    worker.spec.transport = SimpleNamespace(device=device)
    reported = worker.build_connector_worker_meta()
    assert reported.samples.samples()[sample_key(metrics.HOST_MEMORY_PINNED, "any")] == 1
    assert worker.build_connector_worker_meta() is None


def test_the_settings_of_the_process_go_with_the_reports_of_jobs_and_replace_none():
    worker, scripted = make(FULL)
    worker.spec.process_settings = ProcessSettings("worker-0", {"transport": "cpu"})
    key = sample_key(metrics.PROCESS_SETTING, "worker-0", "transport", "cpu")
    worker.start_kv_transfers(metadata(loads={1: load_job("a", [5])}))
    scripted.ending = [(1, True)]
    worker.get_transfer_results()
    first = worker.build_connector_worker_meta()
    assert (first.completed_jobs, first.failed_jobs) == ({1: 1}, set())
    assert first.samples.samples()[key] == 1
    assert first.samples.samples()[sample_key(metrics.DEVICE_COPY_BYTES, "load")] == 100
    worker.start_kv_transfers(metadata(loads={2: load_job("b", [6])}))
    scripted.ending = [(2, False)]
    worker.get_transfer_results()
    second = worker.build_connector_worker_meta()
    assert (second.completed_jobs, second.failed_jobs) == ({2: 1}, {2})
    assert key not in second.samples.samples()
    assert worker.build_connector_worker_meta() is None


@pytest.mark.skipif(not hasattr(KVConnectorBase_V1, "unregister_kv_caches"), reason="vLLM 0.33's contract of sleeps")
@pytest.mark.parametrize("level", [1, 2])
def test_no_copy_touches_the_device_once_a_sleep_takes_its_memory(monkeypatch, level):
    """The sleep is that of vLLM's own worker class."""
    from vllm.v1.worker import gpu_worker

    worker, copies = make(FULL)
    worker.start_kv_transfers(OffloadingConnectorMetadata({1: load_job("loads", [1])}, {}, set()))
    worker.prepare_store_kv(OffloadingConnectorMetadata({}, {2: store_job("stores", [2])}, set()))
    connector = SpillwayConnector.__new__(SpillwayConnector)
    connector.connector_worker = worker
    monkeypatch.setattr(gpu_worker, "has_kv_transfer_group", lambda: True)
    monkeypatch.setattr(gpu_worker, "get_kv_transfer_group", lambda: connector)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (1, 2))
    moving: list[set[int]] = []
    backend = SimpleNamespace(
        suspend=lambda _: moving.append({1, 2}.difference(*copies.waited)), resume=lambda tags: moving.append(set())
    )
    model = SimpleNamespace(named_buffers=lambda: [])
    engine = SimpleNamespace(
        model_runner=SimpleNamespace(model=model),
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(enable_nccl_comm_suspend=False)),
        sleep_mode_backend=backend,
        get_draft_model=lambda: None,
        synchronize_device=lambda: None,
        _save_sleep_parameters=lambda _: None,
        _sleep_saved_parameters={},
        _sleep_saved_buffers={},
        _sleep_saved_draft_buffers={},
    )

    assert SpillwayConnector.supports_sleep_mode(None)
    gpu_worker.Worker.sleep(engine, level)
    gpu_worker.Worker.wake_up(engine)

    assert copies.submitted == [1, 2] and moving == [set(), set()]
    copies.ending = [(1, True), (2, True)]
    assert worker.get_transfer_results().finished_recving == {"loads"}
    assert worker.build_connector_worker_meta().completed_jobs == {1: 1, 2: 1}
