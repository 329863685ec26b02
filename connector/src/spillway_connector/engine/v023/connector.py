"""The connector in vLLM 0.23: its scheduler half (EngineCore process) or worker half (each rank)."""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import override
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_offload.base import OffloadingSpec
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from spillway_connector.engine.connector_base import ConnectorBase
from spillway_connector.engine.patches.vllm_patches import V023
from spillway_connector.engine.scheduler.half import SchedulerHalf
from spillway_connector.engine.v023.scheduler import SpillwayConnectorScheduler, StepLoadingScheduler
from spillway_connector.engine.v023.seams import SEAMS
from spillway_connector.engine.v023.stats import SpillwayPromMetrics, SpillwayStats
from spillway_connector.engine.v023.worker import SpillwayConnectorWorker
from spillway_connector.engine.worker.half import WorkerHalf


class SpillwayConnector(ConnectorBase):
    """vLLM's offloading connector with Spillway's scheduler half (EngineCore process) or worker half (each rank).

    Methods without a docstring keep the contract of KVConnectorBase_V1 and delegate to that half.
    """

    _seams, _patches = SEAMS, V023

    @override
    def _make_spec(self) -> OffloadingSpec:
        return OffloadingSpecFactory.create_spec(self._vllm_config, self._kv_cache_config)

    @override
    def _make_scheduler_half(self) -> SchedulerHalf:
        scheduler = StepLoadingScheduler if self._layerwise else SpillwayConnectorScheduler
        return scheduler(self._spec)

    @override
    def _make_worker_half(self) -> WorkerHalf:
        return SpillwayConnectorWorker(self._spec)

    @property
    @override
    def prefer_cross_layer_blocks(self) -> bool:
        """Answer as vLLM does, except that a layer's blocks lie together if the layer is loaded on its own."""
        return not self._layerwise

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
        return self.connector_scheduler.manager.take_stats() if self._statistics_due.take() else None

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
