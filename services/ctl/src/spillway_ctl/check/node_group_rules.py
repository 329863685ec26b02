"""Rules of replicas over several pods (`nodesPerReplica`). Pure."""

from __future__ import annotations

from collections.abc import Iterator

from spillway_ctl.check.finding import Finding, quoted
from spillway_ctl.check.group import Group, Release
from spillway_engine.extra_arguments import argument_value
from spillway_settings.values.engine import LEADER_PORTS

_KIND = "leaderworkerset.x-k8s.io/v1/LeaderWorkerSet"


def node_group_findings(group: Group, release: Release) -> Iterator[Finding]:
    engine, path, nodes = group.engine, group.path, group.engine.nodes_per_replica
    if nodes == 1:
        return
    setting, cores = f"{path}.nodesPerReplica", engine.data_parallel_size
    ranks = engine.tensor_parallel_size * engine.pipeline_parallel_size
    if _KIND not in release.cluster.kinds:
        yield Finding(
            setting,
            f"{nodes} needs the kind LeaderWorkerSet (leaderworkerset.x-k8s.io/v1), which this cluster does not have",
            "install the LeaderWorkerSet controller with its CRD, or set 1",
        )
    if cores > 1 and cores % nodes:
        yield Finding(
            setting,
            f"{nodes} does not divide dataParallelSize: {cores}, of which every pod has an equal part",
            "make one a multiple of the other, so that no engine core spans pods",
        )
    if cores == 1 and ranks % nodes:
        yield Finding(
            setting,
            f"{nodes} does not divide tensorParallelSize: {engine.tensor_parallel_size} x pipelineParallelSize: "
            f"{engine.pipeline_parallel_size}, of whose {ranks} ranks every pod has an equal part",
            "correct one of them",
        )
    if cores == 1 and engine.offload.enabled:
        yield Finding(
            f"{path}.offload.enabled",
            f"true, but nodesPerReplica: {nodes} spreads one engine core over pods, and its scheduler, which reads and "
            "writes the CPU tier and the shared tier, sees those of its own pod alone",
            f"set it to false, or dataParallelSize to a multiple of {nodes}",
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
    if engine.kv_transfer.connector:
        yield Finding(
            f"{path}.kvTransfer",
            f"{engine.kv_transfer.connector} is not proven with nodesPerReplica: {nodes}",
            "remove it, or set nodesPerReplica: 1",
        )
    executor = argument_value(engine.extra_args, "--distributed-executor-backend")
    if executor not in (None, "mp"):
        yield Finding(
            f"{path}.extraArgs",
            f"--distributed-executor-backend: {quoted(executor)} cannot run nodesPerReplica: {nodes}, for which vLLM "
            "needs mp",
            "remove it, and vLLM takes mp",
        )
    ports = {"port": (engine.port, 1)}
    if engine.kv_events.enabled:
        ports["kvEvents.port"] = (engine.kv_events.port, group.cores)
        ports["kvEvents.replayPort"] = (engine.kv_events.replay_port, group.cores)
    for key, (first, count) in ports.items():
        for own in LEADER_PORTS:
            if first <= own < first + count:
                yield Finding(
                    f"{path}.{key}",
                    f"{first} takes {own}, where the pods of nodesPerReplica: {nodes} meet",
                    "choose another",
                )
