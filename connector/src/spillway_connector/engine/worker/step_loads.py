"""Loads that go layer by layer under the forward that reads them: when they may, and a worker's part of one.

vLLM calls `wait_for_layer_load` before the attention of each layer, except in a step that replays one graph of the
whole forward, and except for layers that no hook was written for. So a worker waits for all layers before a forward
that calls no hooks, and a load whose layers were not all waited for has failed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from vllm.config import CUDAGraphMode, VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec

from spillway_connector.config import ConnectorConfig
from spillway_connector.engine.ipc.messages import StepLoad
from spillway_connector.engine.layouts.packed_blocks import first_spec, pages_differ
from spillway_connector.engine.worker.copy_jobs import CopyJobs
from spillway_connector.plan.layer_groups import LayerGroups

logger = logging.getLogger(__name__)


def loads_within_steps(settings: ConnectorConfig, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> bool:
    """Whether this engine loads within steps. All of its processes get the same answer."""
    return settings.layerwise_loads == "on" and why_not_within_steps(vllm_config, kv_cache_config) is None


def why_not_within_steps(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str | None:
    """Return why this model or engine cannot load within a step; None if it can."""
    groups, parallel = kv_cache_config.kv_cache_groups, vllm_config.parallel_config
    if len(groups) != 1 or not isinstance(first_spec(groups[0]), FullAttentionSpec):
        return "its layers are not one group that attention reads whole"
    if pages_differ(kv_cache_config):  # as with an indexer's keys, which are read before the hook of their layer
        return "its layers have pages of several sizes"
    if vllm_config.speculative_config is not None:
        return "a drafter's layers run behind the step's end"
    if parallel.pipeline_parallel_size > 1 or parallel.data_parallel_size > 1:
        return "engines with pipeline or data parallelism run steps that cannot be taken back alone"
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "a block's tokens are spread over ranks"
    return None


class LayerLoader(Protocol):
    """The part of a generation's room that copies to the device. layers: None if it cannot copy single layers."""

    layers: LayerGroups | None

    def load_layers(self, copy_id: int, group: int, host: LoadStoreSpec, device: GPULoadStoreSpec) -> None:
        """Start the copies of one group of layers, which `hold_computation` is then called for.

        Raises PlanError or DeviceCopyError.
        """

    def hold_computation(self, copy_id: int) -> Exception | None:
        """See Copier."""


class LayerwiseLoads:
    """The loads of the step that runs. Each rank's process, model-runner thread."""

    def __init__(self, loader: LayerLoader, jobs: CopyJobs) -> None:
        assert loader.layers is not None
        self._loader, self._jobs = loader, jobs
        self._group_of = loader.layers.group_of
        self._copies: list[list[int]] = [[] for _ in loader.layers.layouts]  # by group of layers, of this step
        self._held: set[int] = set()  # groups that the computation waits for
        self._copy_id = 0  # negative, as the scheduler's job ids are not
        self._hooks_missing = False  # known from an earlier step

    def start(self, loads: Sequence[StepLoad], forward_context: Any) -> None:
        """Submit every copy, those of the first layers first. Before the forward."""
        refused: set[int] = set()
        for group, copies in enumerate(self._copies):
            for load in loads:
                if load.job_id in refused:
                    continue
                host, device = load.transfer_spec
                assert isinstance(device, GPULoadStoreSpec)
                self._copy_id -= 1
                submit = partial(self._submit, self._copy_id, group, host, device)
                accepted = self._jobs.start_piece(
                    self._copy_id,
                    load.job_id,
                    load.request_id,
                    (device.block_ids, submit),
                    last=True,
                    lost_blocks=(),
                    in_step=True,
                )
                if accepted:
                    copies.append(self._copy_id)
                else:
                    refused.add(load.job_id)
        if loads and (self._hooks_missing or not _calls_hooks(forward_context)):
            self._hold_all()

    def _submit(self, copy_id: int, group: int, host: LoadStoreSpec, device: GPULoadStoreSpec) -> bool:
        try:
            self._loader.load_layers(copy_id, group, host, device)
        except Exception as error:  # of any kind: the request recomputes
            logger.warning("Spillway: a load within a step was refused: %r", error)
            return False
        return True

    def wait_for_layer(self, layer: str) -> None:
        """Wait before the attention of a layer, on the thread and stream that it runs on."""
        group = self._group_of.get(layer)
        if group is not None:
            self._hold(group)
        elif any(self._copies):
            self._hold_all()

    def end_step(self) -> None:
        """End the step's loads, after the forward and before ended jobs are processed."""
        missed = [group for group, copies in enumerate(self._copies) if copies and group not in self._held]
        for group in missed:
            self._hold(group)
            for copy_id in self._copies[group]:
                self._jobs.fail_piece(copy_id)
        if missed and not self._hooks_missing:
            self._hooks_missing = True
            logger.warning(
                "Spillway: the forward did not wait for %d of %d groups of layers; their requests recompute, and from "
                "now on every forward waits for its loads before it begins",
                len(missed),
                len(self._copies),
            )
        self._held.clear()
        for copies in self._copies:
            copies.clear()

    def _hold_all(self) -> None:
        for group in range(len(self._copies)):
            self._hold(group)

    def _hold(self, group: int) -> None:
        self._held.add(group)
        for copy_id in self._copies[group]:
            # Again for each of the group's layers: parts of a batch may run on streams of their own.
            if self._loader.hold_computation(copy_id) is not None:
                self._jobs.fail_piece(copy_id)


def _calls_hooks(forward_context: Any) -> bool:
    """Whether the forward that follows runs attention as a call of its own, with metadata."""
    return (
        forward_context is not None
        and forward_context.attn_metadata is not None
        and forward_context.cudagraph_runtime_mode is not CUDAGraphMode.FULL
    )
