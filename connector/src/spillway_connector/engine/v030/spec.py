"""The class vLLM builds from `kv_connector_extra_config`: `spec_name: SpillwayOffloadingSpec`.

It puts vLLM's tiering machinery together with our host memory, copiers and shared tiers. One spec is built in the
scheduler's process and one in each worker's.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingMetricMetadata, OffloadingSpec, OffloadingWorker
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

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
from spillway_connector.engine.transports import OpenTransport, open_transport
from spillway_connector.engine.v030.cpu_tier import make_cpu_tier
from spillway_connector.engine.v030.offload_worker import CopyWorker
from spillway_connector.engine.v030.stats import metric_definitions
from spillway_connector.engine.v030.tier_adapter import register_tiers
from spillway_connector.engine.v030.tiering import SpillwayTieringManager
from spillway_connector.errors import ConfigError
from spillway_connector.namespace import Namespace
from spillway_connector.plan.geometry import ROW_ALIGNMENT_BYTES, ChunkGeometry

logger = logging.getLogger(__name__)

register_tiers()


class SpillwayOffloadingSpec(OffloadingSpec):
    """Device -> CPU tier -> shared tiers.

    The attributes named as in vLLM's tiering spec (`num_chunks`, `kv_bytes_per_chunk`, ...) are read by its tier
    classes, so that these work beside Spillway's.
    """

    BLOCK_SIZE_ALIGNMENT = ROW_ALIGNMENT_BYTES

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """vLLM's contract: every metric that the manager, its tiers or the workers may report. Any process."""
        definitions: dict[str, OffloadingMetricMetadata] = TieringOffloadingSpec.build_metric_definitions(extra_config)
        return definitions | metric_definitions()

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self.settings = ConnectorConfig.parse(self.extra_config)
        self.offload_prompt_only = self.settings.generated_tokens == "off"
        self.secondary_tier_configs = self.extra_config.get("secondary_tiers", [])
        if not isinstance(self.secondary_tier_configs, list):
            raise ConfigError(f"secondary_tiers: {self.secondary_tier_configs!r} is not a list of tiers")
        self.geometry = ChunkGeometry(
            # Of all layers that share the device's blocks: a KVCacheTensor's size is that of the whole allocation.
            rank_block_bytes=config.worker_kv_bytes_per_block,
            blocks_per_chunk=self.blocks_per_chunk,
            num_ranks=config.parallel.world_size,
        )
        self.num_chunks = self.settings.num_cpu_blocks or self.geometry.rows_in(self.settings.cpu_bytes_to_use or 0)
        self.kv_bytes_per_chunk = self.geometry.row_bytes
        self.cpu_page_size_per_worker = self.geometry.rank_cell_bytes
        self.eviction_policy = self.settings.eviction_policy
        self._engine: tuple[VllmConfig, KVCacheConfig] | None = None
        self._manager: SpillwayTieringManager | None = None
        self._layouts: list[dict[str, Any]] = []  # in the scheduler's process, of every rank
        # In a worker, before its caches are registered: how they lie in memory.
        self.registered_layout: Mapping[str, Any] | None = None
        self.transport: OpenTransport | None = None  # in a worker, once its caches are registered
        self._worker: CopyWorker | None = None

    def attach(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        """What the namespace of shared chunks is made of, which an OffloadingConfig leaves out. By the connector."""
        self._engine = vllm_config, kv_cache_config

    @property
    def vllm_config(self) -> VllmConfig:
        return self._attached()[0]

    @property
    def kv_cache_config(self) -> KVCacheConfig:
        return self._attached()[1]

    def _attached(self) -> tuple[VllmConfig, KVCacheConfig]:
        if self._engine is None:
            raise ConfigError(
                "SpillwayOffloadingSpec needs SpillwayConnector; set kv_connector to it, with kv_connector_module_path "
                "spillway_connector.engine.connector (in another connector, use Spillway's tiers as secondary_tiers)"
            )
        return self._engine

    @cached_property
    def namespace(self) -> Namespace:
        """Of the chunks this engine shares. Raises ConfigError where sharing them would be unsafe or useless."""
        require_shareable_hashes(self.vllm_config)
        require_shareable_scales(self.vllm_config)
        facts = namespace_facts(
            self.vllm_config,
            self.kv_cache_config,
            self.geometry,
            hash_block_size=self.tokens_per_hash,
            layouts=self._layouts,
            weights_version=self.settings.weights_version,
        )
        return Namespace.of(facts)

    def get_manager(self) -> SpillwayTieringManager:
        """vLLM's contract. EngineCore process, after every worker has mapped the region; the same object each time."""
        if self._manager is None:
            region = self._open_region()
            # vLLM builds the scheduler's connector after all workers registered their caches: all have mapped
            # the file, so its name is removed and a killed engine leaves nothing in shared memory.
            region.unlink_name()
            enable_events = self.kv_events_config.enable_kv_cache_events
            primary = make_cpu_tier(self.num_chunks, region, self.eviction_policy, enable_events)
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
                self.num_chunks,
                self.settings,
                chunk_tokens=self.tokens_per_block[0] * self.blocks_per_chunk,
                chunk_bytes=self.geometry.payload_bytes,
            )
            logger.info(
                "Spillway: CPU tier of %d chunks of %d bytes; shared tiers: %s",
                self.num_chunks,
                self.geometry.row_bytes,
                ", ".join(tier.tier_type for tier in tiers) or "none",
            )
        return self._manager

    def _create_tier(self, config: dict[str, object], view: memoryview) -> SecondaryTierManager:
        tier: SecondaryTierManager = SecondaryTierFactory.create_secondary_tier(config, view, self)
        return tier

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """vLLM's contract. Each rank's process, once the caches exist; the same object each time.

        Raises ConfigError where the platform's transport cannot be opened.
        """
        if self._worker is None:
            region = self._open_region()
            region.populate(0, region.size_bytes)
            rank = self.config.parallel.rank
            if self.registered_layout is not None and self.secondary_tier_configs:
                cell_bytes = self.geometry.rank_cell_bytes
                rows = region.create_kv_memoryview().cast("B")
                write_layout(rows, rank * cell_bytes, cell_bytes, self.registered_layout)
                rows.release()
            layout = copy_layout(kv_caches, region, self.geometry, rank)
            self.transport = self._open_transport(region)
            copier = self.transport.copier
            self._worker = CopyWorker(layout, copier(Direction.STORE), copier(Direction.LOAD))
            self._region = region  # keeps the mapping for the life of the worker
        return self._worker

    def _open_transport(self, region: HostRegion) -> OpenTransport:
        return open_transport(self.settings, region)

    def _open_region(self) -> HostRegion:
        # engine_id differs between data-parallel replicas.
        return HostRegion(region_path(self.config.engine_id), self.num_chunks, self.geometry.row_bytes)
