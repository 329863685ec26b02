"""SpillwayConnector for vLLM 0.30 and later; engine/connector.py chooses it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.lora.request import LoRARequest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from spillway_connector.engine.adapters import AdapterRegistry, install_adapter_hooks
from spillway_connector.engine.engine_logging import join_engine_logging
from spillway_connector.engine.generation import require
from spillway_connector.engine.kv_layout import layout_facts
from spillway_connector.engine.v030.scheduler import SpillwayConnectorScheduler
from spillway_connector.engine.v030.seams import SEAMS
from spillway_connector.engine.v030.spec import SpillwayOffloadingSpec
from spillway_connector.engine.v030.worker import SpillwayConnectorWorker
from spillway_connector.engine.weights import install_weight_change_hook
from spillway_connector.errors import ConfigError


class SpillwayConnector(OffloadingConnector):
    """vLLM's offloading connector with Spillway's scheduler half (EngineCore process) or worker half (each rank).

    Methods without a docstring keep the contract of KVConnectorBase_V1 and delegate to that half. What is not here is
    upstream's: the required layout (LBHNC), `requires_kv_delivery` (no: a lost store is a later miss), the sources of
    hits, and pending work, for which the engine keeps stepping.
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
        config = build_offloading_config(vllm_config, kv_cache_config)
        self._canonical_layout = config.canonical_layout
        spec = self._spec = OffloadingSpecFactory.create_spec(config)
        if isinstance(spec, SpillwayOffloadingSpec):
            spec.attach(vllm_config, kv_cache_config)
        self.connector_scheduler = self.connector_worker = None
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = SpillwayConnectorScheduler(spec, vllm_config, kv_cache_config)
            self.adapters: AdapterRegistry = self.connector_scheduler.adapters
            install_adapter_hooks()
            install_weight_change_hook()
        else:
            self.connector_worker = SpillwayConnectorWorker(spec, vllm_config, kv_cache_config)

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
        if isinstance(self._spec, SpillwayOffloadingSpec):
            # Before the caches are registered, which turns them into plain bytes.
            self._spec.registered_layout = layout_facts(kv_caches, self._vllm_config, self._kv_cache_config.num_blocks)
        super().register_kv_caches(kv_caches)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        assert isinstance(self.connector_scheduler, SpillwayConnectorScheduler)
        self.connector_scheduler.device_blocks = gpu_block_pool

    def reset_cache(self) -> bool:
        """False, and nothing is reset, where vLLM could not reset the device's prefix cache; upstream always resets."""
        assert isinstance(self.connector_scheduler, SpillwayConnectorScheduler)
        return self.connector_scheduler.reset_with_device()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert isinstance(self.connector_worker, SpillwayConnectorWorker)
        self._queue_stores()
        return self.connector_worker.get_transfer_results()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        assert self.connector_worker is not None
        self._queue_stores()
        return self.connector_worker.get_finished(finished_req_ids)

    def wait_for_save(self) -> None:
        self._queue_stores()

    def _queue_stores(self) -> None:
        """In every step once: 0.30 skips wait_for_save in steps without a forward pass, and metadata may be gone."""
        if self.has_connector_metadata():
            assert self.connector_worker is not None
            assert isinstance(self._connector_metadata, OffloadingConnectorMetadata)
            self.connector_worker.prepare_store_kv(self._connector_metadata)

    def get_block_ids_with_load_errors(self) -> set[int]:
        assert isinstance(self.connector_worker, SpillwayConnectorWorker)
        return self.connector_worker.take_invalid_blocks()
