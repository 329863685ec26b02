"""`engine` and each entry of `engines`: one group of equal vLLM pods."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from spillway_settings.typed import Count, Port, Positive, Text
from spillway_settings.values import kubernetes
from spillway_settings.values.kinds import (
    Address,
    Anything,
    AutoOff,
    AutoOnOff,
    Cores,
    Digest,
    Dtype,
    EnvironmentName,
    Folder,
    LongSeconds,
    MediaDomain,
    ObjectName,
    OptionalFolder,
    OptionalServedName,
    Pods,
    PullPolicy,
    Registry,
    Repository,
    ResourceAmount,
    ResourceName,
    Seconds,
    SecondsOrNone,
    Section,
    ServedName,
    ServerFolder,
    Size,
    SomePods,
    Tag,
    WholeSecondsOrNone,
)
from spillway_settings.values.offload import Offload
from spillway_settings.values.pods import PodDisruptionBudget, PodSettings, Probes, SecretReference, TopologySpread

DATA_PARALLEL_RANKS_MAX = 64  # of one pod: each has a device of its own, and two ports
RENDEZVOUS_PORT = 29_500  # of the first pod of a replica over several: where the ranks of all pods meet
LINES_PORT = 29_490  # of that pod: by which its parent process learns that another pod is lost
LEADER_PORTS = (RENDEZVOUS_PORT, LINES_PORT)
# Types whose size in memory is known before the start (the engine service's model_shape.KV_DTYPE_BYTES).
KvCacheDtype = Literal[
    "auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head", "int8_per_token_head"
]
LoraRank = Literal[1, 8, 16, 32, 64, 128, 256, 320, 512]  # those that vLLM has kernels for


def ranks_of_pod(cores: int, ranks: int, nodes: int) -> tuple[int, int]:
    """Return one pod's share of a replica over `nodes` pods with so many engine cores of so many ranks each.

    Returns:
        Engine cores of the pod, or 1 if one core spans several pods; and such a core's ranks in this pod.
    """
    cores_here = max(1, cores // nodes)
    return cores_here, max(1, ranks * cores // nodes // cores_here)


class ModelShape(Section, frozen=True):
    preset: str | None = None
    layers: Count | None = None
    sliding_layers: Annotated[int, Meta(ge=0)] | None = None
    kv_heads: Count | None = None
    head_dim: Count | None = None
    latent_dim: Count | None = None
    draft_layers: Annotated[int, Meta(ge=0)] | None = None
    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    weight_bytes: Size | None = None


class Nfs(Section, frozen=True):
    server: Address = ""
    path: ServerFolder = ""


class ModelVolume(Section, frozen=True):
    type: Literal["none", "existingClaim", "hostPath", "nfs", "image"] = "none"
    mount_path: Folder = "/models"
    claim_name: ObjectName = ""
    host_path: OptionalFolder = ""
    nfs: Nfs = Nfs()


class ModelCache(Section, frozen=True):
    type: Literal["emptyDir", "existingClaim", "hostPath"] = "emptyDir"
    size_limit: Size | None = None
    claim_name: ObjectName = ""
    host_path: OptionalFolder = ""


class Model(Section, frozen=True):
    path: Text = "Qwen/Qwen3-8B"
    served_name: OptionalServedName = ""
    aliases: list[ServedName] = []
    dtype: Dtype = "auto"
    kv_cache_dtype: KvCacheDtype = "auto"
    quantization: (
        Annotated[
            str, Meta(pattern=r"^[a-z0-9][a-z0-9_-]*$", description="a method of vLLM, such as awq, fp8 or ascend")
        ]
        | None
    ) = None
    max_length: Count = 32768
    seed: Annotated[int, Meta(ge=0, le=4294967295)] = 0
    shape: ModelShape = ModelShape()
    volume: ModelVolume = ModelVolume()
    cache: ModelCache = ModelCache()
    hub_token_secret: SecretReference = SecretReference(key="token")
    tokenizer: str = "none"


class LoraAdapter(Section, frozen=True):
    name: ServedName
    path: Text


class LoraAlias(Section, frozen=True):
    name: ServedName
    adapter: ServedName


class LoraVolume(Section, frozen=True):
    type: Literal["none", "existingClaim", "hostPath", "nfs", "image", "modelVolume"] = "none"
    mount_path: Folder = "/adapters"
    claim_name: ObjectName = ""
    host_path: OptionalFolder = ""
    nfs: Nfs = Nfs()


class Lora(Section, frozen=True):
    adapters: list[LoraAdapter] = []
    aliases: list[LoraAlias] = []
    runtime_updating: bool = False
    resolver_folder: OptionalFolder = ""
    resolver_names: list[
        Annotated[str, Meta(min_length=1, pattern=r"^[^/]*$", description="a shell pattern of names, without a slash")]
    ] = msgspec.field(default_factory=lambda: ["*"])
    max_rank: LoraRank = 16
    max_active: Count = 1
    max_in_memory: Count | None = None
    volume: LoraVolume = LoraVolume()


class VisibleDevices(Section, frozen=True):
    mode: Literal["plugin", "copy", "unset", "literal"] | None = None
    value: str = ""


class Hccl(Section, frozen=True):
    base_port: Annotated[int, Meta(ge=1024, le=65504)] | None = None
    device_ports: (
        Annotated[
            str, Meta(pattern=r"^[1-9][0-9]{3,4}-[1-9][0-9]{3,4}$", description="a range of ports, such as 16666-16697")
        ]
        | None
    ) = None
    connect_timeout_seconds: Annotated[int, Meta(ge=120, le=7200)] | None = None
    execute_timeout_seconds: Annotated[int, Meta(ge=1, le=17340)] | None = None
    buffer_mib: Count | None = msgspec.field(default=None, name="bufferMiB")


class Accelerator(Section, frozen=True):
    preset: Literal["mindcluster", "cce", "hami", "custom", "a5", "cuda", "cpu"] = "mindcluster"
    resource_name: (
        Annotated[
            str,
            Meta(
                pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$",
                description="the resource of a device plugin, such as huawei.com/Ascend910",
            ),
        ]
        | None
    ) = None
    count: Count | None = None
    visible_devices: VisibleDevices = VisibleDevices()
    driver_mounts: bool = False
    npu_smi_path: Annotated[str, Meta(pattern=r"^(/.*[^/])?$", description='the absolute path of a file, or ""')] = (
        "/usr/local/bin/npu-smi"
    )
    version_check: Literal["refuse", "warn"] = "refuse"
    cpu_binding: AutoOnOff = "auto"
    hccl: Hccl = Hccl()
    memory_mib: Count | None = msgspec.field(default=None, name="memoryMiB")
    extra_resources: dict[ResourceName, ResourceAmount] = {}
    roce_mounts: bool = False
    from_claims: bool = False
    lock_memory: bool = False
    privileged: bool = False


class KvTransfer(Section, frozen=True):
    connector: Annotated[
        str,
        Meta(pattern=r"^([A-Za-z_][A-Za-z0-9_]*)?$", description="vLLM's name of a connector, such as NixlConnector"),
    ] = ""
    module_path: (
        Annotated[
            str,
            Meta(
                pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$",
                description="a Python module such as lmcache.connector",
            ),
        ]
        | None
    ) = None
    role: Literal["kv_both", "kv_producer", "kv_consumer"] = "kv_both"
    extra_config: Anything = {}


class EngineMemory(Section, frozen=True):
    limit: Size | None = None
    shared_memory: Size | None = None
    process_per_rank: Size | None = None
    page_cache: Size = "2GiB"
    margin_percent: Annotated[int, Meta(ge=0, le=200)] = 15
    force: bool = False


class EngineCores(Section, frozen=True):
    request: Cores | None = "8"
    limit: Cores | None = None


class EngineLifecycle(Section, frozen=True):
    startup_timeout_seconds: Seconds = 1800
    pre_stop_seconds: WholeSecondsOrNone = 2
    drain_delay_seconds: SecondsOrNone = 5
    drain_timeout_seconds: SecondsOrNone = 300
    stop_timeout_seconds: LongSeconds = 20
    self_check: AutoOff = "auto"
    self_check_text: Annotated[
        str,
        Meta(
            max_length=400,
            pattern=r"^$|^[^\s][\s\S]{14,}[^\s]\s*$",
            description="16 to 400 characters of text, or an empty one",
        ),
    ] = ""
    self_check_timeout_seconds: LongSeconds = 120


class EphemeralStorage(Section, frozen=True):
    request: Size | None = None
    limit: Size | None = None


class HugePages(Section, frozen=True):
    amount: Size | None = None
    page_size: Literal["64Ki", "2Mi", "32Mi", "512Mi", "1Gi", "16Gi"] = "2Mi"
    mount_path: Folder = "/dev/hugepages"


class KvEvents(Section, frozen=True):
    enabled: bool = True
    port: Port = 8200
    replay_port: Port = 8300


class EngineImage(Section, frozen=True):
    registry: Registry | None = None
    repository: Repository = "spillway-engine"
    vllm: str | float = "0.23"
    tag: Tag = ""
    variant: Literal["", "a3", "310p", "a5", "openeuler", "a3-openeuler", "310p-openeuler", "a5-openeuler"] = ""
    digest: Digest = ""
    pull_policy: PullPolicy | None = None


class EngineAutoscaling(Section, frozen=True):
    enabled: bool = False
    min_replicas: Annotated[int, Meta(ge=0)] = 1
    max_replicas: SomePods = 4
    trigger: Literal["engines", "gateway"] = "engines"
    waiting_per_replica: Positive = 4
    requests_per_replica: Positive = 32
    wake_timeout_seconds: Seconds | None = None
    prometheus_address: Annotated[str, Meta(description="http://HOST:PORT, without credentials")] = (
        "http://prometheus-operated.monitoring.svc:9090"
    )
    cooldown_seconds: WholeSecondsOrNone = 600
    behavior: kubernetes.HorizontalPodAutoscalerBehavior = {}


class UpdateStrategy(Section, frozen=True):
    partition: Annotated[int, Meta(ge=0, le=10_000)] = 0


class Engine(PodSettings, frozen=True):
    replicas: Pods = 2
    role: Literal["both", "prefill", "decode"] = "both"
    model: Model = Model()
    lora: Lora = Lora()
    tensor_parallel_size: Annotated[int, Meta(ge=1, le=1024)] = 1
    pipeline_parallel_size: Annotated[int, Meta(ge=1, le=1024)] = 1
    data_parallel_size: Annotated[int, Meta(ge=1, le=DATA_PARALLEL_RANKS_MAX)] = 1
    nodes_per_replica: Annotated[int, Meta(ge=1, le=DATA_PARALLEL_RANKS_MAX)] = 1
    accelerator: Accelerator = Accelerator()
    block_size: Annotated[int, Meta(ge=16, multiple_of=16)] = 128
    device_blocks: Annotated[int, Meta(ge=2)] | None = None
    offload: Offload = Offload()
    kv_transfer: KvTransfer = KvTransfer()
    memory: EngineMemory = EngineMemory()
    cpu: EngineCores = EngineCores()
    lifecycle: EngineLifecycle = EngineLifecycle()
    ephemeral_storage: EphemeralStorage = EphemeralStorage()
    huge_pages: HugePages = HugePages()
    resource_claims: list[kubernetes.PodResourceClaim] = []
    probes: Probes = Probes()
    allowed_media_domains: list[MediaDomain] = []
    host_network: bool = False
    dns_policy: Literal["Default", "ClusterFirst", "ClusterFirstWithHostNet"] | None = None
    port: Port = 8100
    kv_events: KvEvents = KvEvents()
    api_key_secret: SecretReference = SecretReference(key="api-key")
    image: EngineImage = EngineImage()
    controller: Literal["StatefulSet", "Deployment"] = "StatefulSet"
    autoscaling: EngineAutoscaling = EngineAutoscaling()
    pod_disruption_budget: PodDisruptionBudget = PodDisruptionBudget()
    update_strategy: UpdateStrategy = UpdateStrategy()
    topology_spread: TopologySpread = TopologySpread(enabled=False)
    topology_spread_constraints: list[kubernetes.TopologySpreadConstraint] = []
    scheduler_name: ObjectName | None = None
    runtime_class_name: ObjectName = ""
    pod_security_context: kubernetes.PodSecurityContext | None = None
    security_context: kubernetes.SecurityContext | None = None
    extra_args: list[str] = []
    extra_env: dict[EnvironmentName, str] = {}
