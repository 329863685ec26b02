"""The spec in vLLM 0.30 and later: its configuration, its names, its worker."""

from __future__ import annotations

from typing import Any

from typing_extensions import override
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingMetricMetadata, OffloadingWorker
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from spillway_connector.device.copier import Direction
from spillway_connector.engine.layouts.kv_parts import PlacedKVCaches
from spillway_connector.engine.spec_base import SpecBase
from spillway_connector.engine.v030.cpu_tier import ArcCpuTier, LruCpuTier, NodeCpuTier
from spillway_connector.engine.v030.offload_worker import CopyWorker
from spillway_connector.engine.v030.stats import metric_definitions
from spillway_connector.engine.v030.tier_adapter import register_tiers
from spillway_connector.engine.v030.tiering import SpillwayTieringManager
from spillway_connector.engine.worker.step_loads import loads_within_steps
from spillway_connector.errors import ConfigError
from spillway_connector.plan.copies import CopyLayout
from spillway_connector.plan.layer_groups import LayerGroups, group_layers

register_tiers()


class SpillwayOffloadingSpec(SpecBase):
    """SpecBase with the names of vLLM's tiering spec, which its tier classes read: `num_chunks` and others."""

    _manager_class = SpillwayTieringManager
    _lru_tier, _arc_tier, _node_tier = LruCpuTier, ArcCpuTier, NodeCpuTier

    @classmethod
    @override
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        """vLLM's contract: every metric that the manager, its tiers or the workers may report. Any process."""
        definitions: dict[str, OffloadingMetricMetadata] = TieringOffloadingSpec.build_metric_definitions(extra_config)
        return definitions | metric_definitions()

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self._begin(
            region_id=config.engine_id,  # which differs between data-parallel replicas
            # vLLM counts all layers that share the device's blocks: a KVCacheTensor's size is the whole allocation's.
            # The connector has taken the padding of packed pages off.
            rank_block_bytes=config.worker_kv_bytes_per_block,
            num_ranks=config.parallel.world_size,
            num_stages=config.parallel.pp_size,
            ranks_hold_the_same=config.replicated_layout,  # MLA under tensor parallelism; see also the connector
            tokens_per_block=self.tokens_per_block[0],
            tokens_per_hash=self.tokens_per_hash,
            enable_events=self.kv_events_config.enable_kv_cache_events,
        )
        self.num_chunks = self.num_rows
        self.kv_bytes_per_chunk = self.geometry.row_bytes
        self._attached: tuple[VllmConfig, KVCacheConfig] | None = None
        self._worker: CopyWorker | None = None

    def attach(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        """Set the sources of the namespace that an OffloadingConfig leaves out. The connector calls it."""
        self._attached = vllm_config, kv_cache_config

    @override
    def _engine(self) -> tuple[VllmConfig, KVCacheConfig]:
        if self._attached is None:
            raise ConfigError(
                "SpillwayOffloadingSpec needs SpillwayConnector; set kv_connector to it, with kv_connector_module_path "
                "spillway_connector.engine.connector (in another connector, use Spillway's tiers as secondary_tiers)"
            )
        return self._attached

    @override
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """vLLM's contract. Each rank's process, once the caches exist; the same object each time.

        Raises ConfigError if the platform's transport cannot be opened.
        """
        if self._worker is None:
            rank = self.config.parallel.rank
            layout, transport = self._open_worker(kv_caches, rank)
            store, load = transport.copier(Direction.STORE), transport.copier(Direction.LOAD)
            layers = self._layers(kv_caches, layout)
            self._worker = CopyWorker(
                layout, store, load, self.geometry.store_share(rank), checks=self._row_checks, layers=layers
            )
        return self._worker

    def _layers(self, kv_caches: CanonicalKVCaches, layout: CopyLayout) -> LayerGroups | None:
        """Return which layers a step that reads what it loads waits for together; None if no step does."""
        if self._attached is None or not loads_within_steps(self.settings, *self._attached):
            return None
        assert isinstance(kv_caches, PlacedKVCaches)
        (group,) = self._attached[1].kv_cache_groups
        return group_layers(layout, group.layer_names, kv_caches.segments_of(group.layer_names))
