"""Kubernetes' own types in values, each by its name in kubernetes.json (tests/chart/kubernetes_types.py makes it)."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta


def _reference(name: str) -> Meta:
    return Meta(extra_json_schema={"$ref": f"#/definitions/{name}"})


Affinity = Annotated[dict[str, Any], _reference("Affinity")]
Container = Annotated[dict[str, Any], _reference("Container")]
EnvFromSource = Annotated[dict[str, Any], _reference("EnvFromSource")]
EnvVarSource = Annotated[dict[str, Any], _reference("EnvVarSource")]
HorizontalPodAutoscalerBehavior = Annotated[dict[str, Any], _reference("HorizontalPodAutoscalerBehavior")]
HostAlias = Annotated[dict[str, Any], _reference("HostAlias")]
MetricSpec = Annotated[dict[str, Any], _reference("MetricSpec")]
NetworkPolicyPeer = Annotated[dict[str, Any], _reference("NetworkPolicyPeer")]
NetworkPolicyPort = Annotated[dict[str, Any], _reference("NetworkPolicyPort")]
PodDNSConfig = Annotated[dict[str, Any], _reference("PodDNSConfig")]
PodResourceClaim = Annotated[dict[str, Any], _reference("PodResourceClaim")]
PodSecurityContext = Annotated[dict[str, Any], _reference("PodSecurityContext")]
SecurityContext = Annotated[dict[str, Any], _reference("SecurityContext")]
Toleration = Annotated[dict[str, Any], _reference("Toleration")]
TopologySpreadConstraint = Annotated[dict[str, Any], _reference("TopologySpreadConstraint")]
Volume = Annotated[dict[str, Any], _reference("Volume")]
VolumeMount = Annotated[dict[str, Any], _reference("VolumeMount")]
