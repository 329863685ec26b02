"""The connector in vLLM 0.23: its scheduler half (EngineCore process) or worker half (each rank)."""

from __future__ import annotations

import logging
from functools import cached_property
from typing import Any

import torch
from typing_extensions import override
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_offload.base import OffloadingSpec
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from spillway_connector.engine.connector_base import ConnectorBase
from spillway_connector.engine.patches.patching import Needed
from spillway_connector.engine.patches.vllm_patches import V023
from spillway_connector.engine.scheduler.half import SchedulerHalf
from spillway_connector.engine.v023.layerwise import loads_within_steps, why_not_within_steps
from spillway_connector.engine.v023.layerwise_scheduler import LayerwiseConnectorScheduler
from spillway_connector.engine.v023.scheduler import SpillwayConnectorScheduler
from spillway_connector.engine.v023.seams import SEAMS
from spillway_connector.engine.v023.stats import SpillwayPromMetrics, SpillwayStats
from spillway_connector.engine.v023.worker import SpillwayConnectorWorker
from spillway_connector.engine.worker.half import WorkerHalf

logger = logging.getLogger(__name__)


class SpillwayConnector(ConnectorBase):
    """vLLM's offloading connector with Spillway's scheduler half (EngineCore process) or worker half (each rank).

    Methods without a docstring keep the contract of KVConnectorBase_V1 and delegate to that half.
    """

    _seams, _patches = SEAMS, V023

    @override
    def _make_spec(self) -> OffloadingSpec:
        return OffloadingSpecFactory.create_spec(self._vllm_config, self._kv_cache_config)

    @cached_property
    def _layerwise(self) -> bool:
        settings = self._settings
        return settings is not None and loads_within_steps(settings, self._vllm_config, self._kv_cache_config)

    @override
    def _patches_needed(self, role: KVConnectorRole) -> set[Needed]:
        needs = super()._patches_needed(role)
        return needs | {Needed.LAYERWISE_LOADS} if self._layerwise and role == KVConnectorRole.SCHEDULER else needs

    @override
    def _make_scheduler_half(self) -> SchedulerHalf:
        if self._layerwise:
            return LayerwiseConnectorScheduler(self._spec)
        if self._settings is not None and self._settings.layerwise_loads == "on":
            reason = why_not_within_steps(self._vllm_config, self._kv_cache_config)
            logger.warning("layerwise_loads: on changes nothing for this engine: %s", reason)
        return SpillwayConnectorScheduler(self._spec)

    @override
    def _make_worker_half(self) -> WorkerHalf:
        return SpillwayConnectorWorker(self._spec)

    @property
    @override
    def prefer_cross_layer_blocks(self) -> bool:
        """Like vLLM's, except that a layer's blocks lie together if the layer is loaded on its own."""
        return not self._layerwise

    @override
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        if self._layerwise:
            assert isinstance(self.connector_worker, SpillwayConnectorWorker)
            assert isinstance(self._connector_metadata, OffloadingConnectorMetadata)
            self.connector_worker.start_step_loads(self._connector_metadata, forward_context)

    @override
    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._layerwise:
            assert isinstance(self.connector_worker, SpillwayConnectorWorker)
            self.connector_worker.wait_for_layer_load(layer_name)

    @override
    def register_cross_layers_kv_cache(self, kv_cache: torch.Tensor, attn_backend: type[AttentionBackend]) -> None:
        self._note_layout({f"all layers, {attn_backend.get_name()}": kv_cache})
        super().register_cross_layers_kv_cache(kv_cache, attn_backend)

    @override
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        assert self.connector_worker is not None
        if self.has_connector_metadata():
            assert isinstance(self._connector_metadata, OffloadingConnectorMetadata)
            self.connector_worker.prepare_store_kv(self._connector_metadata)
        return self.connector_worker.get_finished(finished_req_ids)

    @override
    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self.connector_worker is not None:
            return self.connector_worker.get_kv_connector_stats()
        assert isinstance(self.connector_scheduler, SpillwayConnectorScheduler)
        return self.connector_scheduler.manager.take_stats()

    @classmethod
    @override
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return SpillwayStats(data=data) if data is not None else SpillwayStats()

    @classmethod
    @override
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return SpillwayPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
