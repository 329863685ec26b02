"""All of values.yaml: images, the Redis for trials, the network, monitoring and `helm test`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from spillway_settings.typed import Count, Port, Share, Text
from spillway_settings.values import kubernetes
from spillway_settings.values.engine import Engine
from spillway_settings.values.gateway import Gateway
from spillway_settings.values.kinds import (
    Annotations,
    AnyObject,
    Cores,
    Domain,
    GroupName,
    Labels,
    NamePart,
    NamespaceName,
    PrometheusLabel,
    PullPolicy,
    Registry,
    Seconds,
    SecretEntry,
    SecretName,
    Section,
    Size,
    WholeSeconds,
)
from spillway_settings.values.pods import Image, PodSettings, SecretReference, restricted_container, restricted_pod


class PullSecret(Section, frozen=True):
    name: Text


class Images(Section, frozen=True):
    registry: Registry = ""
    pull_policy: PullPolicy = "IfNotPresent"
    pull_secrets: list[PullSecret] = []


class RedisCores(Section, frozen=True):
    request: Cores | None = "1"
    limit: Cores | None = None


class PasswordSecret(Section, frozen=True):
    name: SecretName = ""
    password_key: SecretEntry = "password"


class Redis(PodSettings, frozen=True):
    enabled: bool = False
    image: Image = Image(repository="valkey/valkey", tag="8.1.4")
    port: Port = 6379
    memory: Size = "8GiB"
    cpu: RedisCores = RedisCores()
    io_threads: Annotated[int, Meta(ge=1, le=64)] = 2
    existing_secret: PasswordSecret = PasswordSecret()
    pod_security_context: kubernetes.PodSecurityContext = msgspec.field(default_factory=restricted_pod)
    security_context: kubernetes.SecurityContext = msgspec.field(default_factory=restricted_container)


class EgressRule(Section, frozen=True):
    to: list[kubernetes.NetworkPolicyPeer] | UnsetType = UNSET
    ports: list[kubernetes.NetworkPolicyPort] | UnsetType = UNSET


class NetworkPolicy(Section, frozen=True):
    enabled: bool = True
    gateway_from: list[kubernetes.NetworkPolicyPeer] = []
    engine_from: list[kubernetes.NetworkPolicyPeer] = []
    prometheus_from: list[kubernetes.NetworkPolicyPeer] = msgspec.field(
        default_factory=lambda: [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    )
    restrict_egress: bool = False
    engine_egress: list[EgressRule] = []
    gateway_egress: list[EgressRule] = []


class Relabeling(Section, frozen=True):
    action: (
        Literal[
            "replace",
            "keep",
            "drop",
            "hashmod",
            "labelmap",
            "labeldrop",
            "labelkeep",
            "lowercase",
            "uppercase",
            "keepequal",
            "dropequal",
            "Replace",
            "Keep",
            "Drop",
            "HashMod",
            "LabelMap",
            "LabelDrop",
            "LabelKeep",
            "Lowercase",
            "Uppercase",
            "KeepEqual",
            "DropEqual",
        ]
        | UnsetType
    ) = UNSET
    source_labels: list[PrometheusLabel] | UnsetType = UNSET
    target_label: (
        Annotated[str, Meta(pattern=r"^([a-zA-Z_$][a-zA-Z0-9_${}]*)?$", description="a label's name in Prometheus")]
        | UnsetType
    ) = UNSET
    regex: str | UnsetType = UNSET
    replacement: str | UnsetType = UNSET
    separator: str | UnsetType = UNSET
    modulus: Count | UnsetType = UNSET


class Monitor(Section, frozen=True):
    enabled: bool = False
    interval_seconds: WholeSeconds = 15
    labels: Labels = {}
    relabelings: list[Relabeling] = []
    metric_relabelings: list[Relabeling] = []


class Alerts(Section, frozen=True):
    enabled: bool = False
    labels: Labels = {}
    runbook_base_url: Annotated[
        str,
        Meta(
            pattern=r"^$|^https?://[^/\s][^\s]*$",
            description="an address such as https://wiki.example/spillway, where docs/operations.md is served",
        ),
    ] = ""
    first_byte_seconds: Seconds = 10
    error_ratio: Share = 0.02
    disabled: Annotated[
        list[Annotated[str, Meta(pattern="^Spillway[A-Za-z]+$", description="the name of an alert")]],
        Meta(extra_json_schema={"uniqueItems": True}),
    ] = []


class Dashboards(Section, frozen=True):
    enabled: bool = False
    labels: Labels = msgspec.field(default_factory=lambda: {"grafana_dashboard": "1"})
    annotations: Annotations = {}


class Monitoring(Section, frozen=True):
    pod_monitor: Monitor = Monitor()
    service_monitor: Monitor = Monitor()
    alerts: Alerts = Alerts()
    dashboards: Dashboards = Dashboards()


class Tests(Section, frozen=True):
    enabled: bool = True
    timeout_seconds: WholeSeconds = 300
    api_key_secret: SecretReference = SecretReference(key="api-key")


class Checks(Section, frozen=True):
    hook: bool = True
    timeout_seconds: WholeSeconds = 240
    image: Image = Image(repository="spillway-tools")


class Values(Section, frozen=True):
    engine: Engine = Engine()
    name_override: NamePart = ""
    namespace_override: NamespaceName = ""
    fullname_override: NamePart = ""
    common_labels: Labels = {}
    common_annotations: Annotations = {}
    cluster_domain: Domain = "cluster.local"
    listen_address: Literal["0.0.0.0", "::"] = "0.0.0.0"
    image: Images = Images()
    engines: dict[GroupName, Engine] = {}
    gateway: Gateway = Gateway()
    redis: Redis = Redis()
    network_policy: NetworkPolicy = NetworkPolicy()
    monitoring: Monitoring = Monitoring()
    tests: Tests = Tests()
    checks: Checks = Checks()
    extra_objects: list[AnyObject] = []
