"""The settings of an engine pod: the chart's values under `engine:`, with their types, bounds and defaults.

Those of `offload` are the connector's own.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from spillway_connector.config import ConnectorConfig
from spillway_connector.setting_names import PLAIN_NAMES, SettingNames
from spillway_engine.chart_keys import camel_case_keys
from spillway_engine.kv_transfer import KvTransferSettings
from spillway_engine.lora_settings import LoraSettings
from spillway_engine.tier_settings import SharedTierSettings
from spillway_settings.typed import LARGEST, CamelSection, Count, NotNegative, Port
from spillway_settings.values.engine import (
    DATA_PARALLEL_RANKS_MAX,
    Engine,
    KvCacheDtype,
    ranks_of_pod,
)
from spillway_settings.values.kinds import Dtype, MediaDomain

_CHART = Engine()

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
    # The answer to a driver, CANN or torch_npu that does not fit the image's vllm-ascend.
    version_check: Literal["refuse", "warn"] = _CHART.accelerator.version_check
    cpu_binding: Literal["on", "off"] | None = None  # of vllm-ascend; None: it decides
    kv_events: KvEventsSettings = KvEventsSettings()
    offload: OffloadSettings = OffloadSettings()
    kv_transfer: KvTransferSettings | None = None
    lifecycle: LifecycleSettings = LifecycleSettings()
    extra_args: tuple[str, ...] = ()
    extra_env: dict[str, str] = msgspec.field(default_factory=dict)
    # The names under which a person set these settings, for messages. The chart and the local stack write them.
    names: SettingNames = msgspec.field(default=PLAIN_NAMES, name="settingNames")

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
