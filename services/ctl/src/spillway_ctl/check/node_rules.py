"""Rules of the CPU tier that the engines of a node share. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from spillway_ctl.check.finding import Finding, bytes_text, number, size
from spillway_ctl.check.group import Group, Release, user_of
from spillway_ctl.check.shared_rules import system_folder
from spillway_settings.values.offload import NODE_TIER_NEEDS, Offload

_KEYS = {field.name: field.encode_name for field in msgspec.structs.fields(Offload)}
# What groups that share a folder of the node must have in common: one DaemonSet keeps it on the nodes of all of them.
_EQUAL: dict[str, Callable[[Group], Any]] = {
    "offload.nodeTier.bytes": lambda group: size(group.engine.offload.node_tier.bytes),
    "offload.nodeTier.floor": lambda group: group.engine.offload.node_tier.floor,
    "offload.nodeTier.port": lambda group: group.engine.offload.node_tier.port,
    "nodeSelector": lambda group: group.engine.node_selector,
    "tolerations": lambda group: group.engine.tolerations,
    "affinity": lambda group: group.engine.affinity,
    "accelerator.preset": lambda group: group.engine.accelerator.preset,
    "podSecurityContext": lambda group: user_of(group.device.pod_security_context, group.device.security_context),
}


def node_findings(release: Release) -> Iterator[Finding]:
    keepers: dict[str, Group] = {}
    for group in release.groups:
        offload = group.engine.offload
        at = f"{group.path}.offload.nodeTier"
        if not offload.node_tier.enabled:
            continue
        if not offload.enabled:
            yield Finding(f"{at}.enabled", "true, but offload.enabled is false", "set one of them to the other")
            continue
        yield from _of_group(group, release, at)
        first = keepers.setdefault(offload.node_tier.host_path, group)
        for setting, value_of in _EQUAL.items():
            if value_of(group) != value_of(first):
                yield Finding(
                    f"{group.path}.{setting}",
                    f"differs from that of {first.path}, which has the same offload.nodeTier.hostPath, and one "
                    "DaemonSet makes the rows of both",
                    f"set both alike, or give {group.path} another hostPath, such as "
                    f"{offload.node_tier.host_path}-{group.key or 'other'}",
                )


def _of_group(group: Group, release: Release, at: str) -> Iterator[Finding]:
    engine = group.engine
    offload, tier = engine.offload, engine.offload.node_tier
    for name, needed, why in NODE_TIER_NEEDS:
        if (given := getattr(offload, name)) not in (needed, "auto"):
            setting = f"{group.path}.offload.{_KEYS[name]}"
            yield Finding(setting, f"{given} with nodeTier: {why}", f'set it to "{needed}"')
    if size(tier.bytes) < group.memory.row:
        yield Finding(
            f"{at}.bytes",
            f"{number(tier.bytes)} given, which holds no chunk of {bytes_text(group.memory.row)}",
            f"set it to {group.memory.row} or more (with a unit, such as 64GiB), or lower blocksPerChunk",
        )
    yield from system_folder(
        f"{at}.hostPath",
        tier.host_path,
        "name a folder below /dev/shm, or one on a tmpfs that you mount, such as /mnt/spillway",
    )
    if tier.fallback == "refuse" and (own := _own_size(group, release)):
        yield Finding(
            f"{group.path}.offload.{own}",
            "is given, but with nodeTier.fallback: refuse no engine has a CPU tier of its own",
            "remove it, or set fallback: private",
        )
    if not engine.node_selector and not (engine.affinity or {}).get("nodeAffinity"):
        yield Finding(
            f"{at}.enabled",
            f"true, but these engines may run on any node, and on each a pod asks for {bytes_text(size(tier.bytes))}",
            f"set {group.path}.nodeSelector, if the cluster has nodes without such engines",
            is_note=True,
        )


def _own_size(group: Group, release: Release) -> str | None:
    """The setting of the engines' own tier that was written, rather than left at its default."""
    sections = [release.given.get("engine")]
    if group.key:
        sections.append((release.given.get("engines") or {}).get(group.key))
    for section in sections:
        offload = (section or {}).get("offload") or {}
        for key in ("numCpuBlocks", "cpuBytes"):
            if offload.get(key) is not None:
                return key
    return None
