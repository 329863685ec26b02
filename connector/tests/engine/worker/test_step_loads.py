"""A worker's part of a load within a step: the order of its copies, what the forward waits for, and its failures."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.config import CUDAGraphMode, ParallelConfig, VllmConfig
from vllm.forward_context import create_forward_context
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec
from vllm.v1.kv_offload.base import GPULoadStoreSpec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from spillway_connector.engine.ipc.messages import StepLoad
from spillway_connector.engine.worker.copy_jobs import CopyJobs, EndedCopy
from spillway_connector.engine.worker.step_loads import LayerwiseLoads, why_not_within_steps
from spillway_connector.errors import DeviceCopyError
from spillway_connector.testing.kv_caches import kv_cache_config, of_scheduler

EAGER, PIECEWISE, FULL = (
    create_forward_context({}, VllmConfig(), cudagraph_runtime_mode=mode)
    for mode in (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL)
)
NO_METADATA = create_forward_context(None, VllmConfig())


class ScriptedHandler:
    """A handler of three groups of two layers each."""

    def __init__(self) -> None:
        self.layers = SimpleNamespace(layouts=(0, 1, 2), group_of={f"layer.{n}": n // 2 for n in range(6)})
        self.submitted: list[tuple[int, int]] = []  # (copy, group)
        self.held: list[int] = []  # copies
        self.refuse: set[int] = set()  # groups
        self.broken: set[int] = set()  # groups whose copies were submitted in part

    def load_layers(self, copy_id, group, host, device):
        if group in self.refuse:
            raise DeviceCopyError("refused by the test")
        self.submitted.append((copy_id, group))

    def hold_computation(self, copy_id):
        self.held.append(copy_id)
        return DeviceCopyError("submitted in part") if dict(self.submitted)[copy_id] in self.broken else None

    def groups_held(self) -> list[int]:
        return [dict(self.submitted)[copy_id] for copy_id in self.held]


class Worker:
    def __init__(self) -> None:
        self.handler, self.jobs = ScriptedHandler(), CopyJobs(lambda copy_id, stores: True)
        self.loads = LayerwiseLoads(self.handler, self.jobs)

    def start(self, *loads: StepLoad, context=EAGER) -> None:
        self.loads.start(loads, context)

    def forward(self) -> None:
        for layer in range(6):
            self.loads.wait_for_layer(f"layer.{layer}")

    def end_step(self, *ended: int, success: bool = True):
        """(jobs completed, jobs failed, invalid blocks). ended: copies."""
        self.loads.end_step()
        received = self.jobs.finish([EndedCopy(copy_id, success, 100, 0.25) for copy_id in ended])
        assert not received.requests, "a load within its step parks no request"
        self.report = self.jobs.take_report()
        return self.report.completed, self.report.failed, self.jobs.take_invalid_blocks()

    def copies(self) -> list[int]:
        return [copy_id for copy_id, _ in self.handler.submitted]


@pytest.fixture
def worker() -> Worker:
    return Worker()


def load(job_id: int, blocks: list[int]) -> StepLoad:
    device = GPULoadStoreSpec(blocks, group_sizes=[len(blocks)], block_indices=[0])
    return StepLoad(job_id, f"request {job_id}", (CPULoadStoreSpec(list(range(len(blocks)))), device))


def test_the_first_layers_of_all_loads_come_first_and_each_layer_waits_for_its_own(worker):
    worker.start(load(1, [5, 6]), load(2, [7]))
    assert [group for _, group in worker.handler.submitted] == [0, 0, 1, 1, 2, 2]
    assert len(set(worker.copies())) == 6
    assert worker.handler.held == [], "before the forward nothing is waited for"
    worker.loads.wait_for_layer("layer.0")
    assert worker.handler.groups_held() == [0, 0]
    worker.forward()
    assert worker.end_step() == (set(), set(), set())
    assert worker.end_step(*worker.copies()) == ({1, 2}, set(), set())
    assert (worker.report.loaded_blocks, worker.report.loading_seconds) == (3, 1.5)
    assert worker.jobs.idle


@pytest.mark.parametrize("context", [FULL, NO_METADATA, None])
def test_a_forward_that_calls_no_hooks_waits_for_all_layers_before_it_begins(worker, context):
    worker.start(load(1, [5]), context=context)
    assert worker.handler.groups_held() == [0, 1, 2]
    assert worker.end_step(*worker.copies()) == ({1}, set(), set())


def test_piecewise_graphs_call_the_hooks(worker):
    worker.start(load(1, [5]), context=PIECEWISE)
    assert worker.handler.held == []


def test_a_layer_that_is_not_known_waits_for_all(worker):
    worker.start(load(1, [5]))
    worker.loads.wait_for_layer("shares.another.layer")
    assert worker.handler.groups_held() == [0, 1, 2]


@pytest.mark.parametrize("group", [0, 1, 2])
def test_a_copy_that_cannot_be_submitted_is_known_in_the_same_step(worker, group):
    worker.handler.refuse = {group}
    worker.start(load(1, [5, 6]))
    assert [at for _, at in worker.handler.submitted] == list(range(group))
    worker.forward()
    completed, failed, invalid = worker.end_step()
    assert (failed, invalid) == ({1}, {5, 6})
    assert completed == (set() if group else {1}), "the rows stay pinned while copies of the load are under way"
    if group:
        assert worker.end_step(*worker.copies()) == ({1}, set(), set())
    assert worker.jobs.idle


def test_a_copy_that_was_submitted_in_part_is_known_in_the_same_step(worker):
    worker.handler.broken = {1}
    worker.start(load(1, [5]), load(2, [6]))
    worker.forward()
    assert worker.end_step() == (set(), {1, 2}, {5, 6})
    assert worker.end_step(*worker.copies(), success=False) == ({1, 2}, set(), set())


def test_a_failure_behind_the_step_ends_the_engine(worker):
    worker.start(load(1, [5]))
    worker.forward()
    worker.end_step()
    with pytest.raises(DeviceCopyError, match="after request request 1 had computed with it"):
        worker.end_step(worker.copies()[1], success=False)


def test_layers_that_nobody_waited_for_were_read_too_early(worker):
    worker.start(load(1, [5]))
    worker.loads.wait_for_layer("layer.0")
    worker.loads.wait_for_layer("layer.5")
    assert worker.end_step(*worker.copies()) == ({1}, {1}, {5})
    worker.handler.held.clear()
    worker.start(load(2, [6]))
    assert worker.handler.groups_held() == [0, 1, 2], "from now on before the forward"
    assert worker.end_step(*worker.copies()[3:]) == ({2}, set(), set())


def test_flushing_a_load_waits_for_its_copies(worker):
    worker.start(load(1, [5]))
    assert worker.jobs.copies_of({1}) == {1, *worker.copies()}


def engine(**others):
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=None)
    groups = [KVCacheGroupSpec(["l0"], spec)] * others.pop("groups", 1)
    drafter = others.pop("drafter", None)
    config = VllmConfig(parallel_config=ParallelConfig(distributed_executor_backend="mp", **others))
    config.speculative_config = drafter
    return config, KVCacheConfig(1, [], groups)


def test_which_engines_load_within_steps():
    assert why_not_within_steps(*engine()) is None
    for others in (
        {"groups": 2},
        {"drafter": object()},
        {"pipeline_parallel_size": 2},
        {"data_parallel_size": 2},
        {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
    ):
        assert why_not_within_steps(*engine(**others)) is not None, others


def mla(head_size, **of_kernel):
    return MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=head_size, dtype=torch.uint8, **of_kernel)


def sparse(layer):
    """A layer of DeepSeek V3.2."""
    return {layer: mla(656, cache_dtype_str="fp8_ds_mla"), f"{layer}.indexer": mla(132)}


@pytest.mark.parametrize(
    ("specs", "loads"),
    [
        (sparse("l0") | sparse("l1"), False),
        ({"l0": mla(656), "l1": mla(656)}, True),
        (
            {
                f"l{n}": FullAttentionSpec(block_size=64, num_kv_heads=2 << n, head_size=128 >> n, dtype=torch.uint8)
                for n in (0, 1)
            },
            True,
        ),
    ],
)
def test_scheduler_and_workers_agree_whether_an_engine_loads_within_steps(specs, loads):
    """The scheduler's process has the spec of one layer alone."""
    of_worker = kv_cache_config(specs, 1 << 24)
    (vllm_config, _), of_process = engine(), (of_worker, of_scheduler(of_worker))
    assert [why_not_within_steps(vllm_config, each) is None for each in of_process] == [loads, loads]
