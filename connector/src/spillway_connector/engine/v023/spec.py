"""The spec in vLLM 0.23: its arguments, its names, its handlers."""

from __future__ import annotations

from collections.abc import Iterator

from typing_extensions import override
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, LoadStoreSpec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.worker.worker import OffloadingHandler

from spillway_connector.device.copier import Direction
from spillway_connector.engine.layouts.equal_ranks import ranks_hold_the_same
from spillway_connector.engine.layouts.kv_parts import PlacedKVCaches
from spillway_connector.engine.layouts.packed_blocks import row_block_bytes
from spillway_connector.engine.spec_base import SpecBase
from spillway_connector.engine.v023.cpu_tier import ArcCpuTier, LruCpuTier, NodeCpuTier
from spillway_connector.engine.v023.handlers import CopyHandler
from spillway_connector.engine.v023.tiering import SpillwayTieringManager
from spillway_connector.engine.worker.step_loads import loads_within_steps
from spillway_connector.plan.layer_groups import group_layers
from spillway_settings.wire import STORE_TYPES

for _tier_type in STORE_TYPES:
    if _tier_type not in SecondaryTierFactory._registry:
        SecondaryTierFactory.register_tier(
            _tier_type, "spillway_connector.engine.v023.tier_adapter", "SharedTierAdapter"
        )


class SpillwayOffloadingSpec(SpecBase):
    """SpecBase with the names of vLLM 0.23's tiering spec, which its tier classes read: `num_blocks` and others."""

    _manager_class = SpillwayTieringManager
    _lru_tier, _arc_tier, _node_tier = LruCpuTier, ArcCpuTier, NodeCpuTier

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, kv_cache_config)
        parallel, events = vllm_config.parallel_config, vllm_config.kv_events_config
        self._begin(
            region_id=region_id(vllm_config),
            rank_block_bytes=row_block_bytes(kv_cache_config, group_block_bytes(kv_cache_config)),
            num_ranks=parallel.world_size,
            num_stages=parallel.pipeline_parallel_size,
            ranks_hold_the_same=ranks_hold_the_same(vllm_config, kv_cache_config),
            tokens_per_block=self.gpu_block_size[0],
            tokens_per_hash=self.hash_block_size,
            enable_events=events is not None and events.enable_kv_cache_events,
        )
        self.block_size_factor = self.settings.blocks_per_chunk
        self.num_blocks = self.num_rows
        self.kv_bytes_per_offloaded_block = self.geometry.row_bytes
        self._handlers: list[tuple[type[LoadStoreSpec], type[LoadStoreSpec], OffloadingHandler]] = []
        self.load_handler: CopyHandler | None = None  # in a worker, once the caches are registered

    @override
    def _engine(self) -> tuple[VllmConfig, KVCacheConfig]:
        return self.vllm_config, self.kv_cache_config

    @override
    def get_handlers(
        self, kv_caches: CanonicalKVCaches
    ) -> Iterator[tuple[type[LoadStoreSpec], type[LoadStoreSpec], OffloadingHandler]]:
        """vLLM's contract: (source, destination, handler) per direction. Each rank's process, once the caches exist.

        Raises ConfigError if the platform's transport cannot be opened.
        """
        if not self._handlers:
            rank = self.vllm_config.parallel_config.rank
            layout, transport = self._open_worker(kv_caches, rank)
            share = self.geometry.store_share(rank)
            store = CopyHandler(Direction.STORE, layout, transport.copier(Direction.STORE), share)
            layers = None
            if loads_within_steps(self.settings, self.vllm_config, self.kv_cache_config):
                (group,) = self.kv_cache_config.kv_cache_groups
                layers = group_layers(layout, group.layer_names, segments_of_layers(kv_caches, self.kv_cache_config))
            load = CopyHandler(
                Direction.LOAD, layout, transport.copier(Direction.LOAD), layers=layers, checks=self._row_checks
            )
            self.load_handler = load
            self._handlers = [(GPULoadStoreSpec, CPULoadStoreSpec, store), (CPULoadStoreSpec, GPULoadStoreSpec, load)]
        yield from self._handlers


def segments_of_layers(kv_caches: CanonicalKVCaches, config: KVCacheConfig) -> list[int]:
    """Count the group's references that each of its layers has, in the order of their names."""
    (group,) = config.kv_cache_groups
    if isinstance(kv_caches, PlacedKVCaches):
        return kv_caches.segments_of(group.layer_names)
    with_memory = {layer for tensor in config.kv_cache_tensors for layer in tensor.shared_by}
    return [int(layer in with_memory) for layer in group.layer_names]


def group_block_bytes(config: KVCacheConfig) -> int:
    """Bytes of a block of the group that needs most, pages with their padding. vLLM packs the layers of some models
    (DeepSeek V4) so that no group has a layer in every tensor."""
    groups = [set(group.layer_names) for group in config.kv_cache_groups]
    tensors = [(set(tensor.shared_by), tensor.size) for tensor in config.kv_cache_tensors]
    of_groups = [sum(size for layers, size in tensors if layers & group) for group in groups]
    return max(of_groups) // config.num_blocks


def region_id(vllm_config: VllmConfig) -> str:
    """The id of an engine core's rows. instance_id is shared by data parallel ranks, the rows are not. Those of a dense
    model differ in their index alone: vLLM gives each of them the data_parallel_rank 0."""
    return f"{vllm_config.instance_id}_{vllm_config.parallel_config.data_parallel_index}"
