"""The settings of every component's pods, in Kubernetes' terms."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType

from spillway_settings.values import kubernetes
from spillway_settings.values.kinds import (
    Annotations,
    Digest,
    Disruption,
    EnvironmentName,
    LabelKey,
    Labels,
    ObjectName,
    PullPolicy,
    Registry,
    Repository,
    SecretEntry,
    SecretName,
    Section,
    Tag,
    WholeSeconds,
)


class Image(Section, frozen=True):
    repository: Repository = ""
    registry: Registry | None = None
    tag: Tag = ""
    digest: Digest = ""
    pull_policy: PullPolicy | None = None


class CertificateSecret(Section, frozen=True):
    name: SecretName = ""
    certificate_key: SecretEntry = "tls.crt"
    private_key_key: SecretEntry = "tls.key"


class PodDisruptionBudget(Section, frozen=True):
    enabled: bool = True
    max_unavailable: Disruption = 1


class TopologySpread(Section, frozen=True):
    enabled: bool = True
    topology_key: LabelKey = "kubernetes.io/hostname"
    max_skew: Annotated[int, Meta(ge=1, le=2_147_483_647)] = 1
    when_unsatisfiable: Literal["ScheduleAnyway", "DoNotSchedule"] = "ScheduleAnyway"


class ServiceAccount(Section, frozen=True):
    create: bool = True
    name: ObjectName = ""
    annotations: Annotations = {}


class EnvironmentVariable(Section, frozen=True):
    name: EnvironmentName
    value: str | UnsetType = UNSET
    value_from: kubernetes.EnvVarSource | UnsetType = UNSET


class SecretReference(Section, frozen=True):
    name: SecretName = ""
    key: SecretEntry = ""


class StartupProbe(Section, frozen=True):
    period_seconds: WholeSeconds = 10
    timeout_seconds: WholeSeconds = 5


class Probe(Section, frozen=True):
    period_seconds: WholeSeconds = 10
    timeout_seconds: WholeSeconds = 10
    failure_threshold: Annotated[int, Meta(ge=1, le=2_147_483_647)] = 6


class Probes(Section, frozen=True):
    startup: StartupProbe = StartupProbe()
    readiness: Probe = Probe(period_seconds=2, timeout_seconds=5, failure_threshold=3)
    liveness: Probe = Probe()


def restricted_pod() -> kubernetes.PodSecurityContext:
    """The pod security context of pods that need no privilege, by Kubernetes' restricted standard."""
    return {
        "runAsNonRoot": True,
        "runAsUser": 10001,
        "runAsGroup": 10001,
        "fsGroup": 10001,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def restricted_container() -> kubernetes.SecurityContext:
    """The security context of their containers."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


class PodSettings(Section, frozen=True):
    """The settings that the pods of engines, gateways and the Redis for trials share."""

    priority_class_name: ObjectName = ""
    node_selector: Labels = {}
    tolerations: list[kubernetes.Toleration] = []
    affinity: kubernetes.Affinity = {}
    service_account: ServiceAccount = ServiceAccount()
    pod_labels: Labels = {}
    pod_annotations: Annotations = {}
    secrets_revision: str = ""
    extra_env_vars: list[EnvironmentVariable] = []
    env_from: list[kubernetes.EnvFromSource] = []
    dns_config: kubernetes.PodDNSConfig = {}
    host_aliases: list[kubernetes.HostAlias] = []
    extra_volumes: list[kubernetes.Volume] = []
    extra_volume_mounts: list[kubernetes.VolumeMount] = []
    init_containers: list[kubernetes.Container] = []
    sidecars: list[kubernetes.Container] = []
