"""The base of all generations' specs: vLLM's tiering machinery with our host memory, copiers and tiers.

One spec is built in the scheduler's process and one in each worker's. What a generation's interfaces call things
differs (where a setting is, the worker's class); its room completes the class.
"""

from __future__ import annotations

import logging
import os
from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import override
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingSpec
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from spillway_connector.config import ConnectorConfig
from spillway_connector.device.host_region import HostRegion, region_path
from spillway_connector.device.memory_nodes import has_several_memory_nodes
from spillway_connector.engine.cpu_tier.arc_rows import ArcRows
from spillway_connector.engine.cpu_tier.lru_rows import LruRows
from spillway_connector.engine.cpu_tier.tier import CpuTier
from spillway_connector.engine.ipc.process_settings import (
    ProcessSettings,
    device_name,
    memory_lock_limit,
    worker_process,
)
from spillway_connector.engine.layouts.copy_layout import copy_layout
from spillway_connector.engine.layouts.kv_layout import read_layouts, write_layout
from spillway_connector.engine.layouts.stages import StageFacts, agree, without_agreed
from spillway_connector.engine.manager.tiering import TieringManager
from spillway_connector.engine.namespace.fields import (
    namespace_facts,
    require_shareable_hashes,
    require_shareable_scales,
)
from spillway_connector.engine.node_tier.row_checks import RowChecks
from spillway_connector.engine.node_tier.rows import NodeRows
from spillway_connector.engine.patches.patching import in_force
from spillway_connector.engine.worker.transports import OpenTransport, copy_path, open_transport, transport_name
from spillway_connector.errors import ConfigError, WeightsUnknown
from spillway_connector.namespace import NAMESPACE_DIGEST_BYTES, Namespace
from spillway_connector.node.region import KEEPER_SECONDS, NodeRegion, agreed_region
from spillway_connector.plan.copies import CopyLayout
from spillway_connector.plan.geometry import ROW_ALIGNMENT_BYTES, ChunkGeometry

logger = logging.getLogger(__name__)


class SpecBase(OffloadingSpec):
    """Device -> CPU tier -> shared tiers.

    transport and process_settings: in a worker, once its caches are registered. not_shared: in the scheduler's process,
    once its manager is there: why the shared tiers are not used, in a sentence.
    """

    BLOCK_SIZE_ALIGNMENT = ROW_ALIGNMENT_BYTES

    # The generation's.
    _manager_class: ClassVar[type[TieringManager]]
    _lru_tier: ClassVar[type[LruRows]]
    _arc_tier: ClassVar[type[ArcRows]]
    _node_tier: ClassVar[type[NodeRows]]

    _registered_layout: Mapping[str, Any] | None = None
    transport: OpenTransport | None = None
    process_settings: ProcessSettings | None = None
    not_shared: str | None = None

    def _begin(
        self,
        *,
        region_id: str,
        rank_block_bytes: int,
        num_ranks: int,
        num_stages: int,
        ranks_hold_the_same: bool,
        tokens_per_block: int,
        tokens_per_hash: int,
        enable_events: bool,
    ) -> None:
        """The rest of the constructor, after the constructor of vLLM's class.

        Args:
            region_id: The name of the rows' region: the same in all processes of one replica, and in those of no other.
            rank_block_bytes: The bytes of a device block of one rank in a row, all of its layers together;
                NOT_KNOWN_HERE if only the workers can tell (layouts/packed_blocks.py).
            num_ranks: The number of ranks of all pipeline stages.
            num_stages: The number of pipeline stages.
            ranks_hold_the_same: Whether the ranks of a stage hold equal KV, byte for byte, so that a row holds it once.
            tokens_per_block: The tokens of a block of the first KV group.
            tokens_per_hash: The tokens of a block hash.
            enable_events: Whether the CPU tier's changes are published.

        Raises:
            ConfigError: The settings cannot be used.
        """
        self.settings = ConnectorConfig.parse(self.extra_config)
        if self.settings.compute_while_loading == "on" and num_stages > 1:
            raise ConfigError(
                "compute_while_loading: 'on' takes requests out of the batch between two steps, and the "
                f"{num_stages} stages of a pipeline have several steps under way; set it to 'off'"
            )
        self.offload_prompt_only = self.settings.generated_tokens == "off"  # vLLM's name for it
        self.secondary_tier_configs = self.extra_config.get("secondary_tiers", [])
        if not isinstance(self.secondary_tier_configs, list):
            raise ConfigError(f"secondary_tiers: {self.secondary_tier_configs!r} is not a list of tiers")
        self._region_id = region_id
        self._stage_facts = agree(
            StageFacts(rank_block_bytes, ranks_hold_the_same), num_stages, region_path(self._region_id)
        )
        self.geometry = ChunkGeometry(
            rank_block_bytes=self._stage_facts.rank_block_bytes,
            blocks_per_chunk=self.settings.blocks_per_chunk,
            num_ranks=num_ranks,
            one_cell=self._stage_facts.ranks_hold_the_same,
            stages=num_stages,
        )
        self._node = self._open_node_region()
        if self._node is not None:
            self.num_rows = self._node.num_rows
        else:
            self.num_rows = self.settings.num_cpu_blocks or self.geometry.rows_in(self.settings.cpu_bytes_to_use or 0)
        # Read by vLLM's tier classes under these names, so that they work beside Spillway's.
        self.cpu_page_size_per_worker = self.geometry.rank_cell_bytes
        self.eviction_policy = self.settings.eviction_policy
        self._chunk_tokens = tokens_per_block * self.settings.blocks_per_chunk
        self._tokens_per_hash = tokens_per_hash
        self.announces_blocks = enable_events
        self._manager: TieringManager | None = None
        self._layouts: list[dict[str, Any]] = []  # in the scheduler's process, of every rank

    @abstractmethod
    def _engine(self) -> tuple[VllmConfig, KVCacheConfig]:
        """The properties that make the namespace of shared chunks. Raises ConfigError if it is unknown."""

    @property
    def _choice(self) -> Path:
        """The store through which the processes of a replica agree on whose rows they use."""
        return region_path(self._region_id).with_suffix(".node")

    def _open_node_region(self) -> NodeRegion | None:
        """The node's rows, if they are to be used and can be. Raises ConfigError, HostMemoryError."""
        wanted = self.settings.node_tier
        if wanted is None:
            return None
        row_bytes = self.geometry.row_bytes
        num_rows = wanted.bytes // row_bytes
        kept_seconds = KEEPER_SECONDS if wanted.maker == "keeper" else None
        if num_rows < 1:
            raise ConfigError(f"node_tier.bytes: {wanted.bytes} bytes hold no chunk of {row_bytes} bytes; raise it")
        return agreed_region(
            self._choice,
            lambda number: NodeRegion(Path(wanted.path), num_rows, row_bytes, number, kept_seconds=kept_seconds),
            may_be_private=wanted.fallback == "private",
        )

    @property
    def node_tier_use(self) -> str | None:
        """shared, or private if this engine could not use the node's rows; None: it was not to use them."""
        if self.settings.node_tier is None:
            return None
        return "private" if self._node is None else "shared"

    def _open_facts_region(self, region: HostRegion) -> HostRegion:
        """Open the memory in which each rank tells the scheduler's process of its caches: row 0, unless it holds
        others' chunks."""
        return region if self._node is None else HostRegion(region_path(self._region_id), 1, self.geometry.row_bytes)

    @property
    def _row_checks(self) -> RowChecks | None:
        return None if self._node is None else RowChecks(self._node)

    @cached_property
    def namespace(self) -> Namespace:
        """The namespace of the chunks shared here, of the weights that the engine was started with. Raises ConfigError
        if sharing them would be unsafe or useless."""
        return Namespace.of(self._namespace_facts)

    def namespace_named(self, version: str | None) -> Namespace:
        """The namespace of this version of the weights; None: of those that the engine was started with. Raises
        ConfigError, like `namespace`."""
        return (
            self.namespace if version is None else Namespace.of({**self._namespace_facts, "weights_version": version})
        )

    @cached_property
    def _namespace_facts(self) -> dict[str, Any]:
        vllm_config, kv_cache_config = self._engine()
        require_shareable_hashes(vllm_config)
        require_shareable_scales(vllm_config)
        return namespace_facts(
            vllm_config,
            kv_cache_config,
            self.geometry,
            hash_block_size=self._tokens_per_hash,
            layouts=self._layouts,
            weights_version=self.settings.weights_version,
        )

    @override
    def get_manager(self) -> TieringManager:
        """vLLM's contract. EngineCore process, after every worker has mapped the region; the same object each time."""
        if self._manager is None:
            region = self._open_region()
            self._read_layouts(region)
            primary: CpuTier
            if self._node is not None:
                primary = self._join_node(self._node)
            else:
                kind = self._lru_tier if self.eviction_policy == "lru" else self._arc_tier
                primary = kind(self.num_rows, region, enable_events=self.announces_blocks)
            view = primary.get_kv_memoryview()
            tiers = self._create_tiers(view)
            if tiers:
                # Their threads fill rows in this process: 94 MB of rows never touched took 35 ms longer than others.
                region.populate_behind()
            self._manager = self._manager_class(
                primary,
                tiers,
                self.num_rows,
                self.settings,
                chunk_tokens=self._chunk_tokens,
                chunk_bytes=self.geometry.payload_bytes,
            )
            logger.info(
                "Spillway: CPU tier of %d chunks of %d bytes; shared tiers: %s",
                self.num_rows,
                self.geometry.row_bytes,
                self._manager.settings()["shared_tiers"],
            )
        return self._manager

    def _read_layouts(self, region: HostRegion) -> None:
        """Read the layouts that the ranks wrote for this process, and remove the names of the files.

        vLLM builds the scheduler's connector after all workers registered their caches: all have mapped the files, so
        without names a killed engine leaves nothing in shared memory.
        """
        facts = self._open_facts_region(region)
        facts.unlink_name()
        if self.secondary_tier_configs or self._node is not None:
            rows = facts.create_kv_memoryview().cast("B")
            found = read_layouts(rows, self.geometry.layout_bytes, self.geometry.num_ranks, self.geometry.stages)
            self._layouts = [without_agreed(layout) for layout in found]
            rows.release()
        if self._node is not None:
            facts.cleanup()
        if self.settings.node_tier is not None:
            self._choice.unlink(missing_ok=True)

    def _join_node(self, node: NodeRegion) -> CpuTier:
        """Raises HostMemoryError."""
        try:
            namespace = self.namespace.digest16
        except WeightsUnknown as reason:
            namespace = os.urandom(NAMESPACE_DIGEST_BYTES)
            logger.error("Spillway: this engine shares no chunk of its node's CPU tier with others: %s", reason)
        wanted = self.settings.node_tier
        floor_share = 0.0 if wanted is None else wanted.floor
        return self._node_tier(node, namespace, floor_share=floor_share, enable_events=self.announces_blocks)

    def _create_tiers(self, view: memoryview) -> list[SecondaryTierManager]:
        """Empty if the model's weights cannot be distinguished from others'. The engine then serves without them."""
        tiers: list[SecondaryTierManager] = []
        try:
            for config in self.secondary_tier_configs:
                tiers.append(self._create_tier(config, view))
        except WeightsUnknown as reason:
            for tier in tiers:
                tier.shutdown()
            self.not_shared = str(reason)
            logger.error("Spillway: this engine serves without its shared tiers: %s", reason)
            return []
        return tiers

    def _create_tier(self, config: dict[str, object], view: memoryview) -> SecondaryTierManager:
        tier: SecondaryTierManager = SecondaryTierFactory.create_secondary_tier(config, view, self)
        return tier

    def note_layout(self, layout: Mapping[str, Any]) -> None:
        """Note how a worker's caches lie in memory; called before they are registered."""
        self._registered_layout = layout

    def _open_worker(self, kv_caches: CanonicalKVCaches, rank: int) -> tuple[CopyLayout, OpenTransport]:
        """The memory between which a worker copies, and its copiers. Each rank's process, once, when the caches exist.

        Raises ConfigError if the platform's transport cannot be opened.
        """
        region = self._open_region()
        if has_several_memory_nodes():
            region.claim(*self.geometry.own_pages(rank))
            region.claim_rest()
        else:
            region.claim_rest(patience_seconds=0)
        region.populate(0, region.size_bytes)
        if self._registered_layout is not None:
            self._facts = self._open_facts_region(region)  # mapped for the life of the worker
            layout_bytes = self.geometry.layout_bytes
            rows = self._facts.create_kv_memoryview().cast("B")
            agreed = self._stage_facts.as_layout()
            write_layout(rows, rank * layout_bytes, layout_bytes, self._registered_layout, agreed)
            rows.release()
        layout = copy_layout(kv_caches, region, self.geometry, rank)
        self.transport = self._open_transport(region)
        self._region = region  # keeps the mapping for the life of the worker
        self.process_settings = ProcessSettings(
            worker_process(rank),
            {
                "cpu_blocks": region.num_rows,
                "chunk_bytes": region.row_bytes,
                "transport": transport_name(self.transport),
                "copy_path": copy_path(self.transport),
                "device": device_name(),
                "memory_lock_bytes": memory_lock_limit(),
                "vllm_patches": in_force(),
            },
        )
        return layout, self.transport

    def _open_transport(self, region: HostRegion) -> OpenTransport:
        return open_transport(self.settings, region)

    def _open_region(self) -> HostRegion:
        if self._node is not None:
            return self._node.memory
        return HostRegion(region_path(self._region_id), self.num_rows, self.geometry.row_bytes)
