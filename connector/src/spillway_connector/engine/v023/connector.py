"""The connector in vLLM 0.23: its scheduler half (EngineCore process) or worker half (each rank)."""

from __future__ import annotations

import logging
from typing import Any

import torch
from typing_extensions import override
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from spillway_connector.engine.connector_base import ConnectorBase
from spillway_connector.engine.patches.patching import Needed, apply
from spillway_connector.engine.patches.v023 import PATCHES
from spillway_connector.engine.v023.layerwise import loads_within_steps, why_not_within_steps
from spillway_connector.engine.v023.layerwise_scheduler import LayerwiseConnectorScheduler
from spillway_connector.engine.v023.scheduler import SpillwayConnectorScheduler
from spillway_connector.engine.v023.scheduler_control import SchedulerControlV023
from spillway_connector.engine.v023.seams import SEAMS
from spillway_connector.engine.v023.stats import SpillwayPromMetrics, SpillwayStats
from spillway_connector.engine.v023.worker import SpillwayConnectorWorker

logger = logging.getLogger(__name__)


class SpillwayConnector(ConnectorBase):
    """vLLM's offloading connector with Spillway's scheduler half (EngineCore process) or worker half (each rank).

    Methods without a docstring keep the contract of KVConnectorBase_V1 and delegate to that half.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        self._check(SEAMS, vllm_config)
        # Not upstream's constructor, which builds upstream's halves.
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        self._spec = spec = OffloadingSpecFactory.create_spec(vllm_config, kv_cache_config)
        settings = getattr(spec, "settings", None)
        self._layerwise = settings is not None and loads_within_steps(settings, vllm_config, kv_cache_config)
        compute_while_loading = settings is not None and settings.compute_while_loading == "on"
        if role == KVConnectorRole.SCHEDULER:
            needs = {Needed.ENGINE_CORE}
            if compute_while_loading:
                needs.add(Needed.COMPUTE_WHILE_LOADING)
            if settings is not None and settings.fair_steps == "on":
                needs.add(Needed.FAIR_STEPS)
            if self._layerwise:
                needs.add(Needed.LAYERWISE_LOADS)
            apply(PATCHES, needs)
        elif getattr(vllm_config, "lora_config", None) is not None:
            apply(PATCHES, {Needed.LORA_WORKER})
        half = LayerwiseConnectorScheduler if self._layerwise else SpillwayConnectorScheduler
        self.connector_scheduler = half(spec) if role == KVConnectorRole.SCHEDULER else None
        if self.connector_scheduler is not None:
            self._watch_the_engine()
            if compute_while_loading:
                self.connector_scheduler.begin_meetings(SchedulerControlV023())
            if not self._layerwise and settings is not None and settings.layerwise_loads == "on":
                reason = why_not_within_steps(vllm_config, kv_cache_config)
                logger.warning("layerwise_loads: on changes nothing for this engine: %s", reason)
        self.connector_worker = SpillwayConnectorWorker(spec) if role == KVConnectorRole.WORKER else None

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
