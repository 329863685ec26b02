"""The settings of an engine pod: the chart's values under `engine:`, with their types, bounds and defaults.

Those of `offload` are the connector's own.
"""

from __future__ import annotations

import itertools
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from spillway_connector.config import ConnectorConfig, check_node_tier
from spillway_connector.errors import ConfigError
from spillway_connector.native_keys import BATCH_MEMCPY_VARIABLE
from spillway_connector.setting_names import PLAIN_NAMES, SettingNames
from spillway_engine.chart_keys import camel_case_keys
from spillway_engine.errors import SettingsError
from spillway_engine.extra_arguments import argument_value, check_extra_arguments
from spillway_engine.kv_transfer import KvTransferSettings, check_kv_transfer
from spillway_engine.lora_settings import LoraSettings, check_lora
from spillway_engine.tier_settings import SectionNames, SharedTierSettings, check_shared_tier, refuse_credentials
from spillway_settings.typed import LARGEST, CamelSection, Count, NotNegative, Port
from spillway_settings.values.engine import (
    DATA_PARALLEL_RANKS_MAX,
    LEADER_PORTS,
    Engine,
    KvCacheDtype,
    ranks_of_pod,
)
from spillway_settings.values.kinds import Dtype, MediaDomain

_CHART = Engine()
PORT_MAX = 65_535
LAYER_PARTITION_VARIABLE = "VLLM_PP_LAYER_PARTITION"  # of vLLM: layers of each pipeline stage

# Characters of lifecycle.selfCheckText: long enough to be measured, and shorter than a block of 128 tokens.
TEXT_CHARACTERS_MIN, TEXT_CHARACTERS_MAX = 16, 400
AtLeastASecond = Annotated[float, Meta(ge=1, le=LARGEST)]

# Methods differ by version and platform, so vLLM judges the name. The chart's pattern in Python's own words: `$` would
# let a line break pass.
QuantizationName = Annotated[
    str, Meta(pattern=r"^[a-z0-9][a-z0-9_-]*\Z", description="a method of vLLM, such as awq, fp8 or ascend")
]


class ModelSettings(CamelSection, frozen=True):
    path: str  # a folder with config.json, or a hub name
    served_name: str = ""  # empty: the last part of `path`
    dtype: Dtype = _CHART.model.dtype
    kv_cache_dtype: KvCacheDtype = _CHART.model.kv_cache_dtype  # auto: dtype
    quantization: QuantizationName | None = None  # vLLM's name of the method; None: as the checkpoint says
    max_length: Count = 8192  # tokens, prompt and answer together
    seed: int = 0


class KvEventsSettings(CamelSection, frozen=True):
    enabled: bool = True
    port: Port = _CHART.kv_events.port
    replay_port: Port = _CHART.kv_events.replay_port


@camel_case_keys
class OffloadSettings(ConnectorConfig, frozen=True):
    enabled: bool = True
    shared_tier: SharedTierSettings = SharedTierSettings()
    extra_tiers: tuple[dict[str, Any], ...] = ()  # further secondary tiers of vLLM, passed on unread


class LifecycleSettings(CamelSection, frozen=True):
    # between "not ready" and refusing work: time for routers to notice
    drain_delay_seconds: NotNegative = _CHART.lifecycle.drain_delay_seconds
    drain_timeout_seconds: NotNegative = 60.0  # then time for running requests
    # then time for vLLM to end before the whole process group is killed
    stop_timeout_seconds: AtLeastASecond = _CHART.lifecycle.stop_timeout_seconds
    self_check: Literal["auto", "off"] = "auto"
    self_check_text: str = ""  # sentences that the model predicts well; empty: the built-in ones, in English
    self_check_timeout_seconds: AtLeastASecond = _CHART.lifecycle.self_check_timeout_seconds


class EngineSettings(CamelSection, frozen=True):
    model: ModelSettings
    name: str = "engine-0"
    host: str = "127.0.0.1"
    port: Port = _CHART.port
    block_size: Annotated[int, Meta(ge=16)] = _CHART.block_size  # tokens
    device_blocks: Annotated[int, Meta(ge=2)] | None = None
    tensor_parallel_size: Count = 1
    pipeline_parallel_size: Count = 1  # stages of layers, of tensor_parallel_size ranks each
    # Engine cores behind one address, each with a KV cache, a CPU tier and the workers of the two sizes above.
    data_parallel_size: Annotated[int, Meta(ge=1, le=DATA_PARALLEL_RANKS_MAX)] = 1
    nodes_per_replica: Annotated[int, Meta(ge=1, le=DATA_PARALLEL_RANKS_MAX)] = 1  # pods with equal parts of the ranks
    node_rank: Annotated[int, Meta(ge=0)] = 0  # of this pod among them; 0 leads: it has the server
    leader: str = ""  # the host of that pod
    lora: LoraSettings = LoraSettings()
    # Hosts that vLLM fetches media of prompts from; empty: any host.
    allowed_media_domains: tuple[MediaDomain, ...] = ()
    platform: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    # For a driver, CANN or torch_npu that does not fit the image's vllm-ascend.
    version_check: Literal["refuse", "warn"] = _CHART.accelerator.version_check
    cpu_binding: Literal["on", "off"] | None = None  # of vllm-ascend; None: it decides
    kv_events: KvEventsSettings = KvEventsSettings()
    offload: OffloadSettings = OffloadSettings()
    kv_transfer: KvTransferSettings | None = None
    lifecycle: LifecycleSettings = LifecycleSettings()
    extra_args: tuple[str, ...] = ()
    extra_env: dict[str, str] = msgspec.field(default_factory=dict)
    # What all of these are called where a person set them: written by the chart and the local stack.
    names: SettingNames = msgspec.field(default=PLAIN_NAMES, name="door")

    @property
    def ranks(self) -> int:
        """Workers of one engine core; each has a device of its own."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def cores_here(self) -> int:
        """Engine cores that are in this pod, or have a part of their workers in it."""
        return ranks_of_pod(self.data_parallel_size, self.ranks, self.nodes_per_replica)[0]

    @property
    def ranks_here(self) -> int:
        """Workers in this pod of one such core."""
        return ranks_of_pod(self.data_parallel_size, self.ranks, self.nodes_per_replica)[1]

    @property
    def served_name(self) -> str:
        return self.model.served_name or self.model.path.rstrip("/").rsplit("/", 1)[-1]


def check_settings(settings: EngineSettings) -> EngineSettings:
    """Refuse contradictions that need no look at the machine. Returns the settings unchanged.

    Raises SettingsError with what to change.
    """
    if settings.block_size % 16:
        raise SettingsError(
            f"{settings.names.given('blockSize', settings.block_size)} is not a multiple of 16, as attention kernels "
            "need; 128 suits every platform"
        )
    if not settings.model.path:
        raise SettingsError(f"{settings.names.name('model.path')} is empty; set it to a model folder or a hub name")
    _check_ports(settings)
    _check_text(settings)
    offload, names = settings.offload, settings.names
    check_extra_arguments(settings.extra_args, names)
    _check_cpu_binding(settings)
    _check_pipeline(settings)
    _check_data_parallel(settings)
    _check_nodes(settings)
    if BATCH_MEMCPY_VARIABLE in settings.extra_env:
        raise SettingsError(
            f"{names.name('extraEnv')}: {BATCH_MEMCPY_VARIABLE} is read when vllm-ascend is built and does nothing "
            f"here; remove it, and set {names.name('offload.batchMemcpy')}: auto, on or off"
        )
    check_lora(settings.lora, settings.served_name, names)
    refuse_credentials(offload.shared_tier, offload.extra_tiers, names)
    if settings.kv_transfer is not None:
        check_kv_transfer(settings.kv_transfer, offload, names)
    if offload.enabled:
        if offload.num_cpu_blocks is not None and offload.cpu_bytes_to_use is not None:
            raise SettingsError(
                f"{names.given('offload.numCpuBlocks', offload.num_cpu_blocks)} and "
                f"{names.given('offload.cpuBytes', offload.cpu_bytes_to_use)} are both set, and each is the "
                "size of the CPU tier; remove one"
            )
        if offload.num_cpu_blocks is None and offload.cpu_bytes_to_use is None:
            raise SettingsError(
                f"{names.given('offload.enabled', True)} needs the size of the CPU tier; set "
                f"{names.name('offload.numCpuBlocks')} (or {names.name('offload.cpuBytes')}), "
                f"or {names.given('offload.enabled', False)}"
            )
        check_shared_tier(offload.shared_tier, names)
        try:
            check_node_tier(offload, SectionNames(names, "offload."))
        except ConfigError as error:
            raise SettingsError(str(error)) from error
    return settings


def _check_text(settings: EngineSettings) -> None:
    text, names = settings.lifecycle.self_check_text, settings.names
    if text and not TEXT_CHARACTERS_MIN <= len(text) <= TEXT_CHARACTERS_MAX:
        raise SettingsError(
            f"{names.name('lifecycle.selfCheckText')} has {len(text)} characters; give {TEXT_CHARACTERS_MIN} to "
            f"{TEXT_CHARACTERS_MAX}: one or two sentences that the model predicts well"
        )


def _changes_of_steps(offload: OffloadSettings) -> list[str]:
    """Names of what is on and changes steps of the scheduler."""
    modes = {
        "offload.layerwiseLoads": offload.layerwise_loads,
        "offload.computeWhileLoading": offload.compute_while_loading,
        "offload.fairSteps": offload.fair_steps,
    }
    return [key for key, mode in modes.items() if offload.enabled and mode == "on"]


def _check_pipeline(settings: EngineSettings) -> None:
    stages, offload, names = settings.pipeline_parallel_size, settings.offload, settings.names
    if stages == 1:
        return
    pipeline = names.given("pipelineParallelSize", stages)
    for key in _changes_of_steps(offload):
        raise SettingsError(
            f"{names.given(key, 'on')} changes one step at a time, but {pipeline} keeps several steps under "
            f"way; set {names.given(key, 'off')} or {names.given('pipelineParallelSize', 1)}"
        )
    if LAYER_PARTITION_VARIABLE in settings.extra_env:
        raise SettingsError(
            f"{names.name('extraEnv')}: {LAYER_PARTITION_VARIABLE} gives stages other layers than memory is reckoned "
            f"with; remove it: vLLM spreads the layers evenly over the stages of {pipeline}"
        )
    executor = argument_value(settings.extra_args, "--distributed-executor-backend")
    if executor not in (None, "mp"):
        raise SettingsError(
            f"{names.name('extraArgs')}: --distributed-executor-backend: {executor!r} cannot run {pipeline} in one "
            "pod; remove it, and vLLM takes mp"
        )


def _check_data_parallel(settings: EngineSettings) -> None:
    ranks, stages, offload, names = (
        settings.data_parallel_size,
        settings.pipeline_parallel_size,
        settings.offload,
        settings.names,
    )
    if ranks == 1:
        return
    given, one = names.given("dataParallelSize", ranks), names.given("dataParallelSize", 1)
    if stages > 1:
        raise SettingsError(
            f"{names.given('pipelineParallelSize', stages)} and {given}: stages are not proven with data parallel "
            f"ranks; set {names.given('pipelineParallelSize', 1)} or {one}"
        )
    for key in _changes_of_steps(offload):
        raise SettingsError(
            f"{names.given(key, 'on')} changes the steps of one rank, but the ranks of {given} step together "
            f"if the model is a mixture of experts; set {names.given(key, 'off')} or {one}"
        )
    if settings.kv_transfer is not None:
        raise SettingsError(
            f"{names.name('kvTransfer')}: {settings.kv_transfer.connector} is not proven with {given}; remove it, or "
            f"set {one}"
        )


def _check_nodes(settings: EngineSettings) -> None:
    nodes, cores, names = settings.nodes_per_replica, settings.data_parallel_size, settings.names
    if nodes == 1:
        return
    given = names.given("nodesPerReplica", nodes)
    if cores % nodes if cores > 1 else settings.ranks % nodes:
        parts = names.given("dataParallelSize", cores) if cores > 1 else f"{settings.ranks} ranks"
        raise SettingsError(
            f"{given} does not divide {parts}, of which every pod has an equal part; correct one of them"
        )
    if cores == 1 and settings.offload.enabled:
        raise SettingsError(
            f"{given} spreads one engine core over pods, and its scheduler sees the CPU tier of its own pod alone; set "
            f"{names.given('offload.enabled', False)}, or {names.name('dataParallelSize')} to a multiple of {nodes}"
        )
    if settings.kv_transfer is not None:
        raise SettingsError(
            f"{names.name('kvTransfer')}: {settings.kv_transfer.connector} is not proven with {given}; remove it, or "
            f"set {names.given('nodesPerReplica', 1)}"
        )
    executor = argument_value(settings.extra_args, "--distributed-executor-backend")
    if executor not in (None, "mp"):
        raise SettingsError(
            f"{names.name('extraArgs')}: --distributed-executor-backend: {executor!r} cannot run {given}, for which "
            "vLLM needs mp; remove it, and vLLM takes mp"
        )


def _check_cpu_binding(settings: EngineSettings) -> None:
    if settings.cpu_binding is not None and argument_value(settings.extra_args, "--additional-config") is not None:
        names, is_on = settings.names, settings.cpu_binding == "on"
        raise SettingsError(
            f"{names.given('cpuBinding', settings.cpu_binding)} is given to vLLM as --additional-config, which "
            f"{names.name('extraArgs')} has too, and vLLM takes the last one; write "
            f'"enable_cpu_binding": {str(is_on).lower()} there, and remove {names.name("cpuBinding")}'
        )


def _check_ports(settings: EngineSettings) -> None:
    """vLLM publishes the events of data parallel rank r at the port + r, and answers their replays so too."""
    names, ranks = settings.names, settings.data_parallel_size
    ports = {"port": range(settings.port, settings.port + 1)}
    if settings.kv_events.enabled:
        for key, first in {
            "kvEvents.port": settings.kv_events.port,
            "kvEvents.replayPort": settings.kv_events.replay_port,
        }.items():
            ports[key] = range(first, first + ranks)
            if ports[key][-1] > PORT_MAX:
                raise SettingsError(
                    f"{names.given(key, first)} with {names.given('dataParallelSize', ranks)}, whose last rank would "
                    f"use {ports[key][-1]}; set it to {PORT_MAX - ranks + 1} or less"
                )
    for (key, taken), (other, others) in itertools.combinations(ports.items(), 2):
        if taken[0] == others[0]:
            raise SettingsError(f"{names.given(other, others[0])} is also {names.name(key)}; give each its own port")
        if taken[0] <= others[-1] and others[0] <= taken[-1]:
            raise SettingsError(
                f"{names.given(key, taken[0])} and {names.given(other, others[0])} are too near: rank r of "
                f"{names.given('dataParallelSize', ranks)} uses both ports of kvEvents + r; keep them {ranks} or more "
                "apart, and other ports out of these"
            )
    for key, taken in ports.items():
        for own in LEADER_PORTS if settings.nodes_per_replica > 1 else ():
            if own in taken[: settings.cores_here]:
                raise SettingsError(
                    f"{names.given(key, taken[0])} takes {own}, where the pods of "
                    f"{names.given('nodesPerReplica', settings.nodes_per_replica)} meet; choose another"
                )
