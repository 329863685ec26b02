"""Rules of groups that serve one model with prefill and decode apart. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from spillway_ctl.check.finding import Finding, shown_url
from spillway_ctl.check.group import Group, Release
from spillway_settings.roles import EngineRole, missing_role
from spillway_settings.values.offload import tier_types

# What two engines must have in common to load what the other one stored, or because a client meets either.
_EQUAL: dict[str, Callable[[Group], Any]] = {
    "model.path": lambda group: group.engine.model.path,
    "model.dtype": lambda group: group.engine.model.dtype,
    "model.kvCacheDtype": lambda group: group.engine.model.kv_cache_dtype,
    "model.quantization": lambda group: group.engine.model.quantization,
    "model.maxLength": lambda group: group.engine.model.max_length,
    "model.aliases": lambda group: group.engine.model.aliases,
    "model.tokenizer": lambda group: group.engine.model.tokenizer,
    "lora": lambda group: group.engine.lora,
    "image.vllm": lambda group: group.engine.image.vllm,
    "blockSize": lambda group: group.engine.block_size,
    "tensorParallelSize": lambda group: group.engine.tensor_parallel_size,
    "pipelineParallelSize": lambda group: group.engine.pipeline_parallel_size,
    "dataParallelSize": lambda group: group.engine.data_parallel_size,
    "offload.blocksPerChunk": lambda group: group.engine.offload.blocks_per_chunk,
    "offload.sharedTier.encryption": lambda group: group.engine.offload.shared_tier.encryption,
    "controller": lambda group: group.engine.controller,
}


def role_findings(release: Release) -> Iterator[Finding]:
    models: dict[str, list[Group]] = {}
    for group in release.groups:
        models.setdefault(group.served_name, []).append(group)
    for groups in models.values():
        if any(group.engine.role != "both" for group in groups):
            gateway = release.values.gateway
            place = _connector if gateway.disaggregation.hand_over == "connector" else _place
            yield from _of_model(groups, str(gateway.discovery.type), place)
            if not gateway.disaggregation.roles_bind:
                yield from _answering_producers(groups)
            if gateway.disaggregation.mode != "off" and groups[0].engine.model.tokenizer == "none":
                yield Finding(
                    f"{groups[0].path}.model.tokenizer",
                    "none, so only prompts that clients send as token ids are handed over between engines with roles",
                    "set volume",
                    is_note=True,
                )


def _of_model(
    groups: list[Group], discovery: str, place: Callable[[Group, Group], Iterator[Finding]]
) -> Iterator[Finding]:
    first = groups[0]
    lack = missing_role([EngineRole(group.engine.role) for group in groups])
    if lack is not None:
        found, _, remedy = lack.partition("; ")
        yield Finding(f"{first.path}.role", f"the model {first.served_name} {found}", remedy)
    if discovery == "dns":
        yield Finding(
            f"{first.path}.role",
            f"{first.engine.role}, but engines that DNS finds have no roles",
            "set gateway.discovery.type: kubernetes or static",
        )
    for group in groups:
        if not group.engine.kv_events.enabled:
            yield Finding(
                f"{group.path}.kvEvents.enabled",
                "false, but the gateway knows from KV events what has reached the shared tier of engines with roles",
                "set it to true",
            )
        if group.engine.autoscaling.enabled and group.engine.autoscaling.min_replicas == 0:
            yield Finding(
                f"{group.path}.autoscaling.minReplicas",
                "0, but no request wakes a group of engines whose model another group serves too",
                "set it to 1",
            )
        if group.engine.autoscaling.enabled and group.engine.autoscaling.trigger == "gateway":
            yield Finding(
                f"{group.path}.autoscaling.trigger",
                "gateway, which counts the requests of a model, but other groups of engines serve this one too",
                "set engines",
            )
        yield from place(group, first)
    for group in groups[1:]:
        for name, value in _EQUAL.items():
            if value(group) != value(first):
                yield Finding(
                    f"{group.path}.{name}",
                    f"not that of {first.path}, which serves the same model: neither would load what the other stored, "
                    "or clients would meet two models",
                    "make them equal",
                )


def _answering_producers(groups: list[Group]) -> Iterator[Finding]:
    for group in groups:
        transfer = group.engine.kv_transfer
        if group.engine.role == "prefill" and transfer.connector and transfer.role == "kv_producer":
            yield Finding(
                f"{group.path}.kvTransfer.role",
                "kv_producer, but prefill engines answer whole requests too, if that costs less",
                "set gateway.disaggregation.strictRoles: true, unless these engines answer as fast as others",
                is_note=True,
            )


def _connector(group: Group, first: Group) -> Iterator[Finding]:
    """Find engines that do not have one connector, which both must have."""
    given, other = (each.engine.kv_transfer.connector for each in (group, first))
    if not given:
        yield Finding(
            f"{group.path}.kvTransfer.connector",
            "none, but gateway.disaggregation.handOver: connector has the engines' own connectors hand prompts over",
            "set NixlConnector, MooncakeConnectorV1 with vllm-ascend, or handOver: store",
        )
    elif given != other and other:
        yield Finding(
            f"{group.path}.kvTransfer.connector",
            f"{given} given, but {first.path}, which serves the same model, has {other}",
            "make them equal",
        )


def _place(group: Group, first: Group) -> Iterator[Finding]:
    """Find engines that do not reach one store, which both must."""
    at, places, others = f"{group.path}.offload.sharedTier", _stores(group), _stores(first)
    if not places:
        yield Finding(
            f"{at}.type",
            "no store that another group could load from, but its engines have roles",
            "set redis, s3, or nvme with a volume of type hostPath or existingClaim; on one node, "
            f"{group.path}.offload.nodeTier.enabled: true will do",
        )
    elif others and places.isdisjoint(others):
        yield Finding(
            at,
            f"{_words(places)} given, but {first.path}, which serves the same model, has {_words(others)}",
            "give both the same store",
        )


def _words(places: set[tuple[str, ...]]) -> str:
    return " and ".join(sorted(" ".join(map(shown_url, place)) for place in places))


def _stores(group: Group) -> set[tuple[str, ...]]:
    """Places of shared tiers and of the node's CPU tier, without those of the group's own pods alone."""
    offload, found = group.engine.offload, set[tuple[str, ...]]()
    tier = offload.shared_tier
    if not offload.enabled:
        return found
    if offload.node_tier.enabled:
        found.add(("nodeTier", offload.node_tier.host_path.rstrip("/")))
    for each in tier_types(tier):
        match each:
            case "redis":
                found.add(("redis", group.redis_url))
            case "s3":
                found.add(("s3", tier.s3.endpoint, tier.s3.bucket, tier.s3.prefix))
            case "nvme" if tier.nvme.volume.type == "hostPath":
                found.add(("nvme", "hostPath", tier.nvme.volume.host_path.rstrip("/")))
            case "nvme" if tier.nvme.volume.type == "existingClaim":
                found.add(("nvme", "existingClaim", tier.nvme.volume.claim_name))
    return found
