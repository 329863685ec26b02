"""The connector in vLLM 0.23: its scheduler half (EngineCore process) or worker half (each rank)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.lora.request import LoRARequest
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from spillway_connector.engine.adapters import AdapterRegistry, install_adapter_hooks
from spillway_connector.engine.engine_logging import join_engine_logging
from spillway_connector.engine.generation import require
from spillway_connector.engine.kv_layout import LayerCache, layout_facts
from spillway_connector.engine.v023.failed_loads import install_full_recompute
from spillway_connector.engine.v023.group_hits import install_group_hit_hold
from spillway_connector.engine.v023.scheduler import SpillwayConnectorScheduler
from spillway_connector.engine.v023.seams import SEAMS
from spillway_connector.engine.v023.spec import SpillwayOffloadingSpec
from spillway_connector.engine.v023.stats import SpillwayPromMetrics, SpillwayStats
from spillway_connector.engine.v023.worker import SpillwayConnectorWorker
from spillway_connector.engine.weights import install_weight_change_hook
from spillway_connector.errors import ConfigError


class SpillwayConnector(OffloadingConnector):
    """vLLM's offloading connector with Spillway's scheduler half (EngineCore process) or worker half (each rank).

    Methods without a docstring keep the contract of KVConnectorBase_V1 and delegate to that half.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        join_engine_logging()
        require(SEAMS)
        assert vllm_config.kv_transfer_config is not None
        policy = vllm_config.kv_transfer_config.kv_load_failure_policy
        if policy != "recompute":
            raise ConfigError(
                f"kv_load_failure_policy: {policy!r} fails a request when its cache cannot be loaded; "
                "set it to 'recompute'"
            )
        # Not upstream's constructor, which builds upstream's halves.
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        spec = self._spec = OffloadingSpecFactory.create_spec(vllm_config, kv_cache_config)
        self.connector_scheduler = SpillwayConnectorScheduler(spec) if role == KVConnectorRole.SCHEDULER else None
        if self.connector_scheduler is not None:
            self.adapters: AdapterRegistry = self.connector_scheduler.adapters
            install_adapter_hooks()
            install_weight_change_hook()
            install_full_recompute()
            install_group_hit_hold()
        self.connector_worker = SpillwayConnectorWorker(spec) if role == KVConnectorRole.WORKER else None

    def weights_changing(self, cause: str) -> None:
        """See engine/weights.py. EngineCore process, scheduler thread, between steps."""
        assert isinstance(self.connector_scheduler, SpillwayConnectorScheduler)
        self.connector_scheduler.weights_changing(cause)

    @contextmanager
    def adapter_loading(self, request: LoRARequest) -> Iterator[None]:
        """See engine/adapters.py. EngineCore process, scheduler thread, between steps."""
        assert isinstance(self.connector_scheduler, SpillwayConnectorScheduler)
        with self.adapters.loading(request):
            yield
        self.connector_scheduler.fail_stores_of_replaced_adapters()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._note_layout(kv_caches)
        super().register_kv_caches(kv_caches)

    def register_cross_layers_kv_cache(self, kv_cache: torch.Tensor, attn_backend: type[AttentionBackend]) -> None:
        self._note_layout({f"all layers, {attn_backend.get_name()}": kv_cache})
        super().register_cross_layers_kv_cache(kv_cache, attn_backend)

    def _note_layout(self, kv_caches: Mapping[str, LayerCache]) -> None:
        """Called before the caches are registered, which turns them into plain bytes."""
        spec = self._spec
        if isinstance(spec, SpillwayOffloadingSpec):
            spec.registered_layout = layout_facts(kv_caches, spec.vllm_config, spec.kv_cache_config.num_blocks)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        assert isinstance(self.connector_scheduler, SpillwayConnectorScheduler)
        self.connector_scheduler.device_blocks = gpu_block_pool

    def reset_cache(self) -> bool:
        """False, and nothing is reset, where vLLM could not reset the device's prefix cache; upstream always resets."""
        assert isinstance(self.connector_scheduler, SpillwayConnectorScheduler)
        return self.connector_scheduler.reset_with_device()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        assert self.connector_worker is not None
        if self.has_connector_metadata():
            assert isinstance(self._connector_metadata, OffloadingConnectorMetadata)
            self.connector_worker.prepare_store_kv(self._connector_metadata)
        return self.connector_worker.get_finished(finished_req_ids)

    def get_block_ids_with_load_errors(self) -> set[int]:
        assert isinstance(self.connector_worker, SpillwayConnectorWorker)
        return self.connector_worker.take_invalid_blocks()

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
