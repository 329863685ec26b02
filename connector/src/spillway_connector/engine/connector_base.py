"""The base of all generations' connectors: it passes vLLM's calls to the scheduler or the worker half."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any, ClassVar

import torch
import vllm
from typing_extensions import override
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import OffloadingSpec
from vllm.v1.request import Request

from spillway_connector.engine.features.feature import Feature
from spillway_connector.engine.features.hints import HintOutcome
from spillway_connector.engine.generation import Seams, require
from spillway_connector.engine.ipc.process_settings import ENGINE_CORE, ProcessSettings
from spillway_connector.engine.ipc.statistics_due import StatisticsDue
from spillway_connector.engine.layouts.kv_layout import LayerCache, layout_facts
from spillway_connector.engine.namespace.adapters import AdapterRegistry, lora_mixes_weights
from spillway_connector.engine.namespace.weights import WeightsNamed
from spillway_connector.engine.patches.patching import Needed, Patch, apply, in_force
from spillway_connector.engine.requests.transfer_params import filtering_transfer_params
from spillway_connector.engine.scheduler.half import SchedulerHalf
from spillway_connector.engine.scheduler.settling import Unsettled
from spillway_connector.engine.scheduler.step_loads import StepLoadingHalf
from spillway_connector.engine.spec_base import SpecBase
from spillway_connector.engine.worker.half import WorkerHalf
from spillway_connector.engine.worker.step_loads import loads_within_steps, why_not_within_steps
from spillway_connector.errors import ConfigError, WeightsUnknown
from spillway_connector.namespace import Namespace
from spillway_settings.vllm_salts import why_salts_are_dropped

logger = logging.getLogger(__name__)


def join_engine_logging() -> None:
    """Send every `spillway_connector.*` record to vLLM's handlers, at vLLM's level. Idempotent."""
    ours, engines = logging.getLogger("spillway_connector"), logging.getLogger("vllm")
    ours.handlers = list(engines.handlers)
    ours.setLevel(engines.level)
    ours.propagate = engines.propagate


def filtering_preprocess(preprocess: Any) -> Callable[..., Any]:
    """Wrap EngineCore.preprocess_add_request of engines with Spillway's connector."""
    return filtering_transfer_params(ConnectorBase, preprocess)


def refuses_recompute() -> bool:
    """Whether the platform may refuse `kv_load_failure_policy: recompute` when vLLM reads its arguments.

    vllm-ascend does so for hybrid models, whose failed loads Spillway has recomputed from the first token.
    """
    return bool(current_platform.device_type == "npu")


_START = ""  # no version was named: the weights that the engine was started with


class ConnectorBase(OffloadingConnector):
    """Methods without a docstring keep the contract of KVConnectorBase_V1 and delegate to a half."""

    _seams: ClassVar[Seams]  # the generation's
    _patches: ClassVar[Sequence[Patch]]
    _version_named: str = _START  # of the weights, since they changed last

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        self._check(self._seams, vllm_config)
        # vLLM's constructor is left out, because it builds vLLM's halves.
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        self._spec = self._make_spec()
        self._settings = self._spec.settings if isinstance(self._spec, SpecBase) else None
        apply(self._patches, self._patches_needed(role))
        self._statistics_due = StatisticsDue()
        self.connector_scheduler = self.connector_worker = None
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = half = self._make_scheduler_half()
            if self._settings is not None and self._settings.layerwise_loads == "on" and not self._layerwise:
                reason = why_not_within_steps(vllm_config, kv_cache_config)
                logger.warning("layerwise_loads: on changes nothing for this engine: %s", reason)
            half.manager.report_settings(self._process_settings())
            if lora_mixes_weights(vllm_config):
                logger.warning(
                    "LoRA on a CPU: vLLM computes requests of the base model with an adapter's weights if a batch "
                    "holds requests of both, so their KV is not offloaded; serve the base model by engines without LoRA"
                )
        else:
            self.connector_worker = self._make_worker_half()

    @abstractmethod
    def _make_spec(self) -> OffloadingSpec: ...

    @abstractmethod
    def _make_scheduler_half(self) -> SchedulerHalf: ...

    @abstractmethod
    def _make_worker_half(self) -> WorkerHalf: ...

    @staticmethod
    def _check(seams: Seams, vllm_config: VllmConfig) -> None:
        """Check the configuration before anything is built. Raises UnsupportedEngine or ConfigError."""
        join_engine_logging()
        require(seams)
        assert vllm_config.kv_transfer_config is not None
        transfer = vllm_config.kv_transfer_config
        if transfer.kv_load_failure_policy != "recompute":
            if not refuses_recompute():
                raise ConfigError(
                    f"kv_load_failure_policy: {transfer.kv_load_failure_policy!r} fails a request when its cache "
                    "cannot be loaded; set it to 'recompute'"
                )
            transfer.kv_load_failure_policy = "recompute"  # vLLM's scheduler reads it once it has its connector
        if getattr(vllm_config.attention_config, "hisparse_config", None) is not None:
            raise ConfigError(
                "attention_config.hisparse_config: HiSparse reads blocks that vLLM has freed, and begins loads steps "
                "after the look-up, when a chunk may have left the CPU tier; remove it and HiSparseConnector, or "
                "serve without Spillway's connector"
            )
        unsalted = why_salts_are_dropped(vllm_config, vllm.__version__)
        if unsalted is not None:
            raise ConfigError(unsalted)

    def _patches_needed(self, role: KVConnectorRole) -> set[Needed]:
        if role == KVConnectorRole.WORKER:
            return set() if self._vllm_config.lora_config is None else {Needed.LORA_WORKER}
        needs, settings = {Needed.ENGINE_CORE}, self._settings
        if settings is not None and settings.compute_while_loading == "on":
            needs.add(Needed.COMPUTE_WHILE_LOADING)
        if settings is not None and settings.fair_steps == "on":
            needs.add(Needed.FAIR_STEPS)
        if self._layerwise:
            needs.add(Needed.LAYERWISE_LOADS)
        return needs

    @cached_property
    def _layerwise(self) -> bool:
        """Whether steps of this engine may read what they load."""
        settings = self._settings
        return settings is not None and loads_within_steps(settings, self._vllm_config, self._kv_cache_config)

    def _process_settings(self) -> ProcessSettings:
        cache_config, spec = self._vllm_config.cache_config, self._spec
        facts = {
            **self._half.settings(),
            "block_tokens": cache_config.block_size,
            "max_model_len": self._vllm_config.model_config.max_model_len,
            "device_blocks": self._kv_cache_config.num_blocks,
            "vllm_patches": in_force(),
            "prefix_caching": "on" if cache_config.enable_prefix_caching else "off",
        }
        if isinstance(spec, SpecBase):
            special = {"not_shared": spec.not_shared, "node_tier": spec.node_tier_use}
            facts |= {name: value for name, value in special.items() if value is not None}
        return ProcessSettings(ENGINE_CORE, facts)

    @property
    def _half(self) -> SchedulerHalf:
        assert isinstance(self.connector_scheduler, SchedulerHalf)
        return self.connector_scheduler

    @property
    def adapters(self) -> AdapterRegistry:
        """The adapters that this engine has loaded. In the scheduler's process."""
        return self._half.adapters

    @property
    def scheduler_features(self) -> list[Feature]:
        """The features that the scheduler half informs about its requests (engine/features/feature.py)."""
        return self._half.features

    def weights_changing(self, cause: str) -> None:
        """See engine/namespace/weights.py. EngineCore process, scheduler thread, between steps."""
        self._half.weights_changing(cause)

    def weights_named(self) -> WeightsNamed:
        """See engine/namespace/weights.py."""
        half, version = self._half, None if self._settings is None else self._settings.weights_version
        if self._version_named != _START:
            version = self._version_named
        namespace = self._namespace_of(self._version_named)
        return WeightsNamed(version, half.weights_are_known, "" if namespace is None else namespace.hex)

    def name_weights(self, version: str | None, reset_device: Callable[[], bool]) -> str | None:
        """See engine/namespace/weights.py. EngineCore process, scheduler thread, between steps."""
        half, wanted = self._half, _START if version is None else version
        if half.weights_are_known and wanted == self._version_named:
            return None
        refused = half.name_weights(self._namespace_of(wanted), reset_device)
        if refused is None:
            self._version_named = wanted
            half.without_requests.introduce()
        return refused

    def _namespace_of(self, wanted: str) -> Namespace | None:
        """Return the namespace of this engine's chunks; None: it shares no chunks with others."""
        spec, manager = self._spec, self._half.manager
        shares = bool(manager.secondary_tiers) or manager.primary_tier.is_joined is not None
        if not shares or not isinstance(spec, SpecBase):
            return None
        try:
            return spec.namespace_named(None if wanted == _START else wanted)
        except WeightsUnknown:
            return None  # of a node's tier it uses rows that are its own

    @contextmanager
    def adapter_loading(self, request: LoRARequest) -> Iterator[None]:
        """See engine/namespace/adapters.py. EngineCore process, scheduler thread, between steps."""
        with self.adapters.loading(request):
            yield
        self._half.fail_stores_of_replaced_adapters()

    def hint_refused(self) -> HintOutcome | None:
        """See engine/features/hints.py. EngineCore process, scheduler thread, between steps, as the next one."""
        return self._half.ahead.hint_refused()

    def prefix_expected(self, request: Request, hashing_seconds: float) -> None:
        """See engine/features/hints.py."""
        self._half.prefix_expected(request, hashing_seconds)

    @override
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        self._statistics_due.planned(scheduler_output.total_num_scheduled_tokens)
        return super().build_connector_meta(scheduler_output)

    @override
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._note_layout(kv_caches)
        super().register_kv_caches(kv_caches)

    @override
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        if self._layerwise:
            assert isinstance(self.connector_worker, WorkerHalf)
            assert isinstance(self._connector_metadata, OffloadingConnectorMetadata)
            self.connector_worker.start_step_loads(self._connector_metadata, forward_context)

    @override
    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._layerwise:
            assert isinstance(self.connector_worker, WorkerHalf)
            self.connector_worker.wait_for_layer_load(layer_name)

    def _note_layout(self, kv_caches: Mapping[str, LayerCache]) -> None:
        """Note how the caches lie, before they are registered, which turns them into plain bytes."""
        if isinstance(self._spec, SpecBase):
            num_blocks = self._kv_cache_config.num_blocks
            self._spec.note_layout(layout_facts(kv_caches, self._vllm_config, num_blocks))

    @override
    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._half.bind_device_blocks(gpu_block_pool)

    def copies_under_way(self) -> bool:
        """Whether copies between the device and the CPU tier are under way. EngineCore process, scheduler thread."""
        return self._half.copies_under_way()

    def settle(self, seconds: float) -> Unsettled:
        """See engine/scheduler/settling.py. EngineCore process, scheduler thread, between steps."""
        return self._half.without_requests.settle(seconds)

    @property
    def steps_without_requests(self) -> bool:
        """See engine/scheduler/settling.py."""
        return self._half.without_requests.wanted

    def forced_reset(self, scheduler: Any) -> AbstractContextManager[None]:
        """See engine/scheduler/resets.py. EngineCore process, scheduler thread, between steps."""
        return self._half.forced_reset(scheduler)

    @override
    def reset_cache(self) -> bool:
        """Reset the CPU tier together with the device; if vLLM could not reset the device's prefix cache, reset
        nothing and return False. vLLM's own connector resets its tier in that case, too."""
        return self._half.reset_with_device()

    def loads_within_steps(self, block_ids: Set[int]) -> bool:
        """See engine/scheduler/invalid_blocks.py. EngineCore process, scheduler thread."""
        half = self._half
        return isinstance(half, StepLoadingHalf) and half.loads_within_steps(block_ids)

    @override
    def get_block_ids_with_load_errors(self) -> set[int]:
        assert isinstance(self.connector_worker, WorkerHalf)
        return self.connector_worker.take_invalid_blocks()
