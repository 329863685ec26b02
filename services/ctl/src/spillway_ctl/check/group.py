"""A group of engines as the rules see it: its settings, device, model shape, memory and pod. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from spillway_ctl.check.chart_facts import Cluster, facts
from spillway_ctl.check.finding import Finding
from spillway_ctl.check.model_facts import ModelFacts, model_facts
from spillway_ctl.check.pod_memory import PodMemory, pod_memory
from spillway_engine.platform_facts import BLOCK_TOKENS_MULTIPLE
from spillway_settings.shared_names import FOLDERS
from spillway_settings.values.engine import Engine, ranks_of_pod
from spillway_settings.values.offload import tier_types
from spillway_settings.values.release import Values

_HCCL = {
    "base_port": "HCCL_IF_BASE_PORT",
    "device_ports": "HCCL_NPU_SOCKET_PORT_RANGE",
    "connect_timeout_seconds": "HCCL_CONNECT_TIMEOUT",
    "execute_timeout_seconds": "HCCL_EXEC_TIMEOUT",
    "buffer_mib": "HCCL_BUFFSIZE",
}
ON_VOLUME = ("existingClaim", "hostPath", "nfs")
NAME_CHARACTERS_MAX = 52  # Kubernetes appends 11 to a StatefulSet's name in a label


class Device(msgspec.Struct, frozen=True):
    """The accelerator's preset with what the values say over it."""

    platform: str
    block_tokens_multiple: int
    resource_name: str
    count: int
    visible_devices: str
    needs_count: bool
    cpus_per_device: int
    pod_security_context: dict[str, Any]
    security_context: dict[str, Any]


class Mount(msgspec.Struct, frozen=True):
    name: str
    path: str
    read_only: bool = False


class Group(msgspec.Struct, frozen=True):
    """One entry of `engines`, or `engine` alone.

    Attributes:
        key: in `engines`; empty for `engine` alone.
        path: the path of its settings, for messages.
        name: the name of its StatefulSet, Deployment or LeaderWorkerSet.
        redis_url: the shared tier's URL; that of the embedded server if it is used.
        secret_files: names of the Secrets that are files in its pod.
    """

    key: str
    path: str
    name: str
    engine: Engine
    device: Device
    model: ModelFacts
    memory: PodMemory
    redis_url: str
    secret_files: tuple[str, ...]

    @property
    def platform(self) -> str:
        return self.device.platform

    @property
    def cores(self) -> int:
        """Engine cores of one pod, or the one that spans several."""
        return ranks_of_pod(self.engine.data_parallel_size, 1, self.engine.nodes_per_replica)[0]

    @property
    def ranks(self) -> int:
        return all_ranks(self.engine)

    @property
    def served_name(self) -> str:
        return self.engine.model.served_name or base_name(self.engine.model.path)

    @property
    def pods(self) -> int:
        scaling = self.engine.autoscaling
        return scaling.max_replicas if scaling.enabled else self.engine.replicas

    @property
    def headless(self) -> str:
        return fitting(f"{self.name}-pods", 63)

    @property
    def has_own_image(self) -> bool:
        return bool(self.engine.image.tag or self.engine.image.digest)

    @property
    def is_chart_image(self) -> bool:
        return not self.has_own_image and self.engine.image.repository == "spillway-engine"

    @property
    def uses_nvme(self) -> bool:
        return self.engine.offload.enabled and "nvme" in tier_types(self.engine.offload.shared_tier)

    @property
    def uses_hub(self) -> bool:
        paths = [self.engine.model.path, *(adapter.path for adapter in self.engine.lora.adapters)]
        return any(not path.startswith("/") for path in paths)

    @property
    def event_ports(self) -> dict[str, int]:
        """Name of a port of the first pod's container -> the port: of each data parallel rank two."""
        events = self.engine.kv_events
        ports: dict[str, int] = {}
        if events.enabled:
            for rank in range(self.cores):
                end = f"-{rank}" if rank else ""
                ports |= {f"kv-events{end}": events.port + rank, f"kv-replay{end}": events.replay_port + rank}
        return ports

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of variables that the values give."""
        return (*self.engine.extra_env, *(variable.name for variable in self.engine.extra_env_vars))

    def mounts(self) -> tuple[Mount, ...]:
        """The mounts that the chart adds to the engine's container."""
        engine = self.engine
        found = [
            Mount("config", FOLDERS["config"], True),
            Mount("shared-memory", "/dev/shm"),  # noqa: S108 - a mount of the pod
            Mount("scratch", "/tmp"),  # noqa: S108
            Mount("scratch", FOLDERS["home"]),
        ]
        if engine.model.path.startswith("/") and engine.model.volume.type in ON_VOLUME:
            found.append(Mount("model", engine.model.volume.mount_path, True))
        if self.uses_hub:
            found.append(Mount("hub", FOLDERS["hub"]))
        if (engine.lora.adapters or engine.lora.runtime_updating) and engine.lora.volume.type in ON_VOLUME:
            found.append(Mount("adapters", engine.lora.volume.mount_path, True))
        if self.uses_nvme:
            found.append(Mount("kv", engine.offload.shared_tier.nvme.path))
        if engine.offload.enabled and engine.offload.node_tier.enabled:
            found.append(Mount("node", FOLDERS["node"]))
        if self.secret_files:
            found.append(Mount("secrets", FOLDERS["secrets"], True))
        if engine.huge_pages.amount is not None:
            found.append(Mount("hugepages", engine.huge_pages.mount_path))
        return (*found, *(Mount(each["name"], each["path"], True) for each in driver_mounts(engine)))


class Release(msgspec.Struct, frozen=True):
    """Everything that a rule may look at."""

    values: Values
    groups: tuple[Group, ...]
    cluster: Cluster
    tree: dict[str, Any]  # the values laid out, untyped
    given: dict[str, Any]

    @property
    def full_name(self) -> str:
        return full_name(self.values, self.cluster)

    def name(self, suffix: str) -> str:
        return fitting(f"{self.full_name}-{suffix}", NAME_CHARACTERS_MAX)

    def sections(self) -> tuple[tuple[str, Any], ...]:
        """(path, settings) of every component that has pods."""
        engines = tuple((group.path, group.engine) for group in self.groups)
        return (("gateway", self.values.gateway), ("redis", self.values.redis), *engines)


def all_ranks(engine: Engine) -> int:
    """Workers of one pod; each has a device of its own."""
    ranks = engine.tensor_parallel_size * engine.pipeline_parallel_size * engine.data_parallel_size
    return max(1, ranks // engine.nodes_per_replica)


def base_name(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1]


def fitting(text: str, characters_max: int) -> str:
    """Return the text, cut to this length. Eight digits of a hash replace the rest, so that names stay distinct."""
    if len(text) <= characters_max:
        return text
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{text[: characters_max - 9].removesuffix('-')}-{digest}"


def full_name(values: Values, cluster: Cluster) -> str:
    name = values.name_override or "spillway"
    release = cluster.release if name in cluster.release else f"{cluster.release}-{name}"
    return fitting(values.fullname_override or release, 40)


def driver_mounts(engine: Engine) -> list[Mapping[str, str]]:
    known = facts("driver-mounts.yaml")
    accelerator = engine.accelerator
    found = [
        each
        for each in known["driver"]
        if accelerator.driver_mounts and (each["name"] != "npu-smi" or accelerator.npu_smi_path)
    ]
    return [*found, *(known["roce"] if accelerator.roce_mounts else [])]


def hccl_environment(engine: Engine) -> list[str]:
    """Names of the variables that the settings of HCCL become."""
    return [name for field, name in _HCCL.items() if getattr(engine.accelerator.hccl, field)]


def device_of(engine: Engine) -> Device:
    given = engine.accelerator
    preset = facts("accelerators.yaml")[given.preset]
    own = dict(preset["securityContext"])
    if given.lock_memory:
        capabilities = own.get("capabilities") or {}
        own["capabilities"] = {
            "drop": capabilities.get("drop") or [],
            "add": [*(capabilities.get("add") or []), "IPC_LOCK"],
        }
    if given.privileged:
        own = {"runAsUser": 0, "privileged": True}
    return Device(
        platform=preset["platform"],
        block_tokens_multiple=BLOCK_TOKENS_MULTIPLE[preset["platform"]],
        resource_name=given.resource_name or preset["resourceName"],
        count=all_ranks(engine) if given.count is None else given.count,
        visible_devices=given.visible_devices.mode or preset["visibleDevices"],
        needs_count=preset["needsCount"],
        cpus_per_device=preset.get("cpusPerDevice", 0),
        pod_security_context=engine.pod_security_context or preset["podSecurityContext"],
        security_context=engine.security_context or own,
    )


def group_of(key: str, engine: Engine, values: Values, cluster: Cluster) -> tuple[Group, list[Finding]]:
    """The group, and what is wrong with its model's shape and its memory."""
    path = f"engines.{key}" if key else "engine"
    suffix = "engine" if key in ("", "default") else f"engine-{key}"
    name = fitting(f"{full_name(values, cluster)}-{suffix}", NAME_CHARACTERS_MAX)
    if engine.nodes_per_replica > 1:
        name = fitting(name, NAME_CHARACTERS_MAX - 5)  # StatefulSets of further pods append the replica's number
    device = device_of(engine)
    model, wrong_shape = model_facts(engine, path)
    memory, wrong_memory = pod_memory(engine, path, device.platform, model)
    group = Group(
        key,
        path,
        name,
        engine,
        device,
        model,
        memory,
        _redis_url(engine, values, cluster),
        _secret_files(engine, values),
    )
    return group, [*wrong_shape, *wrong_memory]


def _redis_url(engine: Engine, values: Values, cluster: Cluster) -> str:
    url = engine.offload.shared_tier.redis.url
    if url or not values.redis.enabled:
        return url
    host = fitting(f"{full_name(values, cluster)}-redis", NAME_CHARACTERS_MAX)
    namespace = values.namespace_override or cluster.namespace
    return f"redis://{host}.{namespace}.svc.{values.cluster_domain}:{values.redis.port}/0"


def _secret_files(engine: Engine, values: Values) -> tuple[str, ...]:
    tier = engine.offload.shared_tier
    found = []
    if not engine.offload.enabled or tier.type == "none":
        return ()
    types = tier_types(tier)
    if "redis" in types:
        secret = tier.redis.existing_secret.name
        if not secret and not tier.redis.url and values.redis.enabled:
            secret = values.redis.existing_secret.name
        if secret and tier.redis.existing_secret.password_as == "file":  # noqa: S105 - the way it is given
            found.append(secret)
        found += [each.name for each in (tier.redis.tls.ca_secret, tier.redis.tls.client_secret) if each.name]
    if "s3" in types and tier.s3.ca_secret.name:
        found.append(tier.s3.ca_secret.name)
    if tier.encryption.enabled:
        found.append(tier.encryption.key_secret_name)
    return tuple(found)


def user_of(pod: Mapping[str, Any], container: Mapping[str, Any]) -> int:
    """The user that a container runs as; 0 if neither says it."""
    return int(container.get("runAsUser") or pod.get("runAsUser") or 0)
