"""The connector in vLLM 0.23: its scheduler half (EngineCore process) or worker half (each rank)."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from spillway_connector.engine.connector_base import ConnectorBase
from spillway_connector.engine.v023.failed_loads import install_full_recompute
from spillway_connector.engine.v023.group_hits import install_group_hit_hold
from spillway_connector.engine.v023.scheduler import SpillwayConnectorScheduler
from spillway_connector.engine.v023.seams import SEAMS
from spillway_connector.engine.v023.stats import SpillwayPromMetrics, SpillwayStats
from spillway_connector.engine.v023.worker import SpillwayConnectorWorker


class SpillwayConnector(ConnectorBase):
    """vLLM's offloading connector with Spillway's scheduler half (EngineCore process) or worker half (each rank).

    Methods without a docstring keep the contract of KVConnectorBase_V1 and delegate to that half.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        self._check(SEAMS, vllm_config)
        # Not upstream's constructor, which builds upstream's halves.
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        self._spec = spec = OffloadingSpecFactory.create_spec(vllm_config, kv_cache_config)
        self.connector_scheduler = SpillwayConnectorScheduler(spec) if role == KVConnectorRole.SCHEDULER else None
        if self.connector_scheduler is not None:
            self._watch_the_engine()
            install_full_recompute()
            install_group_hit_hold()
        self.connector_worker = SpillwayConnectorWorker(spec) if role == KVConnectorRole.WORKER else None

    def register_cross_layers_kv_cache(self, kv_cache: torch.Tensor, attn_backend: type[AttentionBackend]) -> None:
        self._note_layout({f"all layers, {attn_backend.get_name()}": kv_cache})
        super().register_cross_layers_kv_cache(kv_cache, attn_backend)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        assert self.connector_worker is not None
        if self.has_connector_metadata():
            assert isinstance(self._connector_metadata, OffloadingConnectorMetadata)
            self.connector_worker.prepare_store_kv(self._connector_metadata)
        return self.connector_worker.get_finished(finished_req_ids)

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self.connector_worker is not None:
            return self.connector_worker.get_kv_connector_stats()
        assert isinstance(self.connector_scheduler, SpillwayConnectorScheduler)
        return self.connector_scheduler.manager.take_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return SpillwayStats(data=data) if data is not None else SpillwayStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        return SpillwayPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
