"""The spec in vLLM 0.23: vLLM's tiering machinery with our host memory, copiers and shared tiers.

One spec is built in the scheduler's process and one in each worker's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, LoadStoreSpec, OffloadingSpec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.worker.worker import OffloadingHandler

from spillway_connector.config import ConnectorConfig
from spillway_connector.device.copier import Direction
from spillway_connector.device.host_region import HostRegion, region_path
from spillway_connector.engine.copy_layout import copy_layout
from spillway_connector.engine.kv_layout import read_layouts, write_layout
from spillway_connector.engine.namespace_fields import (
    namespace_facts,
    require_shareable_hashes,
    require_shareable_scales,
)
from spillway_connector.engine.prefix_tier import TIER_TYPES
from spillway_connector.engine.transports import OpenTransport, open_transport
from spillway_connector.engine.v023.cpu_tier import make_cpu_tier
from spillway_connector.engine.v023.handlers import CopyHandler
from spillway_connector.engine.v023.tiering import SpillwayTieringManager
from spillway_connector.errors import ConfigError
from spillway_connector.namespace import Namespace
from spillway_connector.plan.geometry import ROW_ALIGNMENT_BYTES, ChunkGeometry

logger = logging.getLogger(__name__)

for _tier_type in TIER_TYPES:
    if _tier_type not in SecondaryTierFactory._registry:
        SecondaryTierFactory.register_tier(
            _tier_type, "spillway_connector.engine.v023.tier_adapter", "SharedTierAdapter"
        )


class SpillwayOffloadingSpec(OffloadingSpec):
    """Device -> CPU tier -> shared tiers.

    The attributes named as in vLLM's tiering spec (`num_blocks`, `kv_bytes_per_offloaded_block`, ...) are read by
    its tier classes, so that these work beside Spillway's.
    """

    BLOCK_SIZE_ALIGNMENT = ROW_ALIGNMENT_BYTES

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, kv_cache_config)
        self.config = ConnectorConfig.parse(self.extra_config)
        self.secondary_tier_configs = self.extra_config.get("secondary_tiers", [])
        if not isinstance(self.secondary_tier_configs, list):
            raise ConfigError(f"secondary_tiers: {self.secondary_tier_configs!r} is not a list of tiers")
        self.block_size_factor = self.config.blocks_per_chunk
        self.offload_prompt_only = self.config.generated_tokens == "off"
        device_bytes = sum(tensor.size for tensor in kv_cache_config.kv_cache_tensors)
        self.geometry = ChunkGeometry(
            rank_block_bytes=device_bytes // kv_cache_config.num_blocks,
            blocks_per_chunk=self.config.blocks_per_chunk,
            num_ranks=vllm_config.parallel_config.world_size,
        )
        self.num_blocks = self.config.num_cpu_blocks or self.geometry.rows_in(self.config.cpu_bytes_to_use or 0)
        self.kv_bytes_per_offloaded_block = self.geometry.row_bytes
        self.cpu_page_size_per_worker = self.geometry.rank_cell_bytes
        self.eviction_policy = self.config.eviction_policy
        self._manager: SpillwayTieringManager | None = None
        self._layouts: list[dict[str, Any]] = []  # in the scheduler's process, of every rank
        # In a worker, before its caches are registered: how they lie in memory.
        self.registered_layout: Mapping[str, Any] | None = None
        self.transport: OpenTransport | None = None  # in a worker, once its caches are registered
        self._handlers: list[tuple[type[LoadStoreSpec], type[LoadStoreSpec], OffloadingHandler]] = []

    @cached_property
    def namespace(self) -> Namespace:
        """Of the chunks this engine shares. Raises ConfigError where sharing them would be unsafe or useless."""
        require_shareable_hashes(self.vllm_config)
        require_shareable_scales(self.vllm_config)
        facts = namespace_facts(
            self.vllm_config,
            self.kv_cache_config,
            self.geometry,
            hash_block_size=self.hash_block_size,
            layouts=self._layouts,
            weights_version=self.config.weights_version,
        )
        return Namespace.of(facts)

    def get_manager(self) -> SpillwayTieringManager:
        """vLLM's contract. EngineCore process, after every worker has mapped the region; the same object each time."""
        if self._manager is None:
            region = self._open_region()
            # vLLM builds the scheduler's connector after all workers registered their caches: all have mapped
            # the file, so its name is removed and a killed engine leaves nothing in shared memory.
            region.unlink_name()
            events = self.vllm_config.kv_events_config
            enable_events = events is not None and events.enable_kv_cache_events
            primary = make_cpu_tier(self.num_blocks, region, self.eviction_policy, enable_events)
            view = primary.get_kv_memoryview()
            if self.secondary_tier_configs:
                self._layouts = read_layouts(view.cast("B"), self.geometry.rank_cell_bytes, self.geometry.num_ranks)
            tiers = [self._create_tier(config, view) for config in self.secondary_tier_configs]
            if tiers:
                # Their threads fill rows in this process: 94 MB of rows never touched took 35 ms longer than others.
                region.populate_behind()
            self._manager = SpillwayTieringManager(
                primary,
                tiers,
                self.num_blocks,
                self.config,
                chunk_tokens=self.gpu_block_size[0] * self.config.blocks_per_chunk,
                chunk_bytes=self.geometry.payload_bytes,
            )
            logger.info(
                "Spillway: CPU tier of %d chunks of %d bytes; shared tiers: %s",
                self.num_blocks,
                self.geometry.row_bytes,
                ", ".join(tier.tier_type for tier in tiers) or "none",
            )
        return self._manager

    def _create_tier(self, config: dict[str, object], view: memoryview) -> SecondaryTierManager:
        tier: SecondaryTierManager = SecondaryTierFactory.create_secondary_tier(config, view, self)
        return tier

    def get_handlers(
        self, kv_caches: CanonicalKVCaches
    ) -> Iterator[tuple[type[LoadStoreSpec], type[LoadStoreSpec], OffloadingHandler]]:
        """vLLM's contract: (source, destination, handler) per direction. Each rank's process, once the caches exist.

        Raises ConfigError where the platform's transport cannot be opened.
        """
        if not self._handlers:
            region = self._open_region()
            region.populate(0, region.size_bytes)
            rank = self.vllm_config.parallel_config.rank
            if self.registered_layout is not None and self.secondary_tier_configs:
                cell_bytes = self.geometry.rank_cell_bytes
                rows = region.create_kv_memoryview().cast("B")
                write_layout(rows, rank * cell_bytes, cell_bytes, self.registered_layout)
                rows.release()
            layout = copy_layout(kv_caches, region, self.geometry, rank)
            self.transport = self._open_transport(region)
            copier = self.transport.copier
            store = CopyHandler(Direction.STORE, layout, copier(Direction.STORE))
            load = CopyHandler(Direction.LOAD, layout, copier(Direction.LOAD))
            self._handlers = [(GPULoadStoreSpec, CPULoadStoreSpec, store), (CPULoadStoreSpec, GPULoadStoreSpec, load)]
            self._region = region  # keeps the mapping for the life of the worker
        yield from self._handlers

    def _open_transport(self, region: HostRegion) -> OpenTransport:
        return open_transport(self.config, region)

    def _open_region(self) -> HostRegion:
        # instance_id is shared by data-parallel replicas, the rows are not.
        replica = self.vllm_config.parallel_config.data_parallel_rank
        path = region_path(f"{self.vllm_config.instance_id}_{replica}")
        return HostRegion(path, self.num_blocks, self.geometry.row_bytes)
