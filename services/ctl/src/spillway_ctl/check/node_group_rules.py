"""Rules of replicas over several pods (`nodesPerReplica`). Pure."""

from __future__ import annotations

from collections.abc import Iterator

from spillway_ctl.check.finding import Finding
from spillway_ctl.check.group import Group, Release

_KIND = "leaderworkerset.x-k8s.io/v1/LeaderWorkerSet"


def node_group_findings(group: Group, release: Release) -> Iterator[Finding]:
    engine, path, nodes = group.engine, group.path, group.engine.nodes_per_replica
    if nodes == 1:
        return
    setting, cores = f"{path}.nodesPerReplica", engine.data_parallel_size
    if _KIND not in release.cluster.kinds:
        yield Finding(
            setting,
            f"{nodes} needs the kind LeaderWorkerSet (leaderworkerset.x-k8s.io/v1), which this cluster does not have",
            "install the LeaderWorkerSet controller with its CRD, or set 1",
        )
    if cores > 1 and engine.kv_events.enabled and release.values.gateway.discovery.type == "dns":
        yield Finding(
            setting,
            f"{nodes}, but gateway.discovery.type: dns finds no names of pods, and the ranks of further pods publish "
            "their KV events there",
            "set gateway.discovery.type: kubernetes or static",
        )
    if engine.controller == "Deployment":
        yield Finding(
            f"{path}.controller",
            f"Deployment given, but replicas of nodesPerReplica: {nodes} are those of a LeaderWorkerSet",
            "remove it",
        )
