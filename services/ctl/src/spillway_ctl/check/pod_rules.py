"""Rules of pods: what Kubernetes would refuse only after an install began, and what nodes never run. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from spillway_ctl.check.finding import Finding, milli_cores, number, quoted, size
from spillway_ctl.check.group import Group, Release
from spillway_ctl.check.shared_rules import distinct_folders, labels_of, not_above, repeated
from spillway_settings.byte_sizes import parse_byte_count
from spillway_settings.shared_names import FOLDERS

# Folders of the chart's own in any of its pods.
OWN_FOLDERS = (
    FOLDERS["config"],
    "/dev/shm",  # noqa: S108 - a mount of the pod
    "/tmp",  # noqa: S108
    FOLDERS["home"],
    FOLDERS["hub"],
    FOLDERS["node"],
    FOLDERS["secrets"],
    FOLDERS["valkey"],
)
_MILLI_CORES_MAX = 1_000_000
_CORES_EXAMPLE = {"engine": "8", "redis": "1"}


def pod_findings(release: Release) -> Iterator[Finding]:
    for path, section in release.sections():
        yield from _volumes(path, section)
        yield from _tolerations(path, section, release)
        yield from _spread(path, section)
        yield from _contexts(path, *_contexts_of(path, release))
        yield from _budget(path, section)
    yield from _accounts(release)
    yield from _cores(release)
    yield from _low_ports(release)
    for group in release.groups:
        yield from _resources(group)
        yield from _kernel(group)
        yield from _storage(group)


def _contexts_of(path: str, release: Release) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Security contexts of a component's pod and of its container."""
    for group in release.groups:
        if group.path == path:
            return group.device.pod_security_context, group.device.security_context
    section = release.values.gateway if path == "gateway" else release.values.redis
    return section.pod_security_context, section.security_context


def _volumes(path: str, section: Any) -> Iterator[Finding]:
    for name in repeated(volume["name"] for volume in section.extra_volumes):
        yield Finding(f"{path}.extraVolumes", f"{name} is listed twice", "give each volume its own name")
    for volume in section.extra_volumes:
        name = volume["name"]
        sources = sorted(key for key, source in volume.items() if key != "name" and source is not None)
        if not sources:
            yield Finding(
                f"{path}.extraVolumes",
                f"{name} has no source",
                "add one, e.g. emptyDir: {} or hostPath: {path: /data}",
            )
        if len(sources) > 1:
            yield Finding(
                f"{path}.extraVolumes",
                f"{name} has several sources ({', '.join(sources)}), and a volume has one",
                "remove the others",
            )
        for source in ("secret", "configMap", "projected", "downwardAPI"):
            mode = (volume.get(source) or {}).get("defaultMode")
            if mode in (400, 440, 444, 500):
                yield Finding(
                    f"{path}.extraVolumes",
                    f"{source}.defaultMode: {mode} of {name} is a decimal number, {mode:04o} in octal",
                    f"write 0{mode} for what it looks like",
                )
    yield from distinct_folders(f"{path}.extraVolumeMounts", section.extra_volume_mounts)
    for mount in section.extra_volume_mounts:
        folder = mount["mountPath"].removesuffix("/")
        if folder in OWN_FOLDERS:
            yield Finding(
                f"{path}.extraVolumeMounts",
                f"{mount['mountPath']} is a folder of the chart's own",
                f"mount {mount['name']} elsewhere",
            )


def _tolerations(path: str, section: Any, release: Release) -> Iterator[Finding]:
    yield from labels_of(section.tolerations, f"{path}.tolerations")
    yield from labels_of(section.affinity, f"{path}.affinity")
    yield from labels_of(getattr(section, "topology_spread_constraints", ()), f"{path}.topologySpreadConstraints")
    for index, toleration in enumerate(section.tolerations):
        at = f"{path}.tolerations[{index}]"
        operator, value = toleration.get("operator") or "Equal", toleration.get("value")
        if operator == "Exists" and value:
            yield Finding(
                f"{at}.value",
                f"{quoted(value)} given, but operator: Exists takes none",
                "remove it, or set operator: Equal",
            )
        if operator != "Exists" and not toleration.get("key"):
            yield Finding(
                f"{at}.key",
                f"nothing given, a taint's key needed by operator: {operator}",
                "add it, or set operator: Exists for all taints",
            )
        if operator in ("Lt", "Gt") and re.fullmatch("-?[0-9]+", str(value)) is None:
            yield Finding(
                f"{at}.value",
                f"{quoted(str(value or ''))} given, a whole number needed by operator: {operator}",
                "write one, or set operator: Equal",
            )
        if operator in ("Lt", "Gt") and release.cluster.is_before("1.35"):
            yield Finding(
                f"{at}.operator",
                f"{operator} given, but Kubernetes {release.cluster.version} does not have it, which came with 1.35",
                "set Exists or Equal",
            )
        if toleration.get("tolerationSeconds") is not None and toleration.get("effect") != "NoExecute":
            yield Finding(
                f"{at}.tolerationSeconds",
                f"{toleration['tolerationSeconds']} given, but only effect: NoExecute has them",
                "set that effect, or remove them",
            )


def _spread(path: str, section: Any) -> Iterator[Finding]:
    own = getattr(section, "topology_spread", None)
    taken = {}
    if own is not None and own.enabled:
        taken[own.topology_key, own.when_unsatisfiable] = f"{path}.topologySpread"
    for index, constraint in enumerate(getattr(section, "topology_spread_constraints", ())):
        pair = (constraint["topologyKey"], constraint["whenUnsatisfiable"])
        if pair in taken:
            yield Finding(
                f"{path}.topologySpreadConstraints[{index}]",
                f"topologyKey and whenUnsatisfiable are those of {taken[pair]}, and Kubernetes takes such a pair once",
                "remove one",
            )
        taken[pair] = f"topologySpreadConstraints[{index}]"


def _contexts(path: str, pod: Mapping[str, Any], container: Mapping[str, Any]) -> Iterator[Finding]:
    user = container.get("runAsUser", pod.get("runAsUser"))
    if container.get("runAsNonRoot", pod.get("runAsNonRoot")) and user == 0:
        yield Finding(
            f"{path}.podSecurityContext",
            "runAsNonRoot: true, but runAsUser: 0 is root, so kubelet would start no container",
            "set another user, or runAsNonRoot: false",
        )
    if container.get("allowPrivilegeEscalation") is False:
        added = (container.get("capabilities") or {}).get("add") or []
        if container.get("privileged"):
            yield Finding(
                f"{path}.securityContext",
                "privileged: true with allowPrivilegeEscalation: false is refused by Kubernetes",
                "set allowPrivilegeEscalation: true, or remove privileged",
            )
        elif "SYS_ADMIN" in added:
            yield Finding(
                f"{path}.securityContext",
                "capability SYS_ADMIN with allowPrivilegeEscalation: false is refused by Kubernetes",
                "set allowPrivilegeEscalation: true, or remove SYS_ADMIN",
            )


def _budget(path: str, section: Any) -> Iterator[Finding]:
    budget = getattr(section, "pod_disruption_budget", None)
    if budget is None or not budget.enabled:
        return
    scaling, given = section.autoscaling, budget.max_unavailable
    most = scaling.max_replicas if scaling.enabled else section.replicas
    # Kubernetes rounds a share of the pods up.
    taken = -(-int(given.removesuffix("%")) * most // 100) if isinstance(given, str) else given
    if taken >= most > 1:
        yield Finding(
            f"{path}.podDisruptionBudget.maxUnavailable",
            f"{number(given)} given, but there are at most {most} pods, so that a drain may take all at once",
            "set 1, or enabled: false",
        )


def _accounts(release: Release) -> Iterator[Finding]:
    names = {"gateway": release.name("gateway"), "redis": release.name("redis")}
    names |= {group.path: group.name for group in release.groups}
    made: dict[str, str] = {}
    # The chart's own names come first, so that the message is about the one that was given.
    for is_given in (False, True):
        for path, section in release.sections():
            account = section.service_account
            exists = account.create and (path != "redis" or release.values.redis.enabled)
            if not exists or is_given != bool(account.name):
                continue
            name = account.name or names[path]
            if name == "default":
                yield Finding(
                    f"{path}.serviceAccount.name",
                    "default is there in every namespace, and the chart cannot make it again",
                    "set create: false, or choose another name",
                )
            if name in made:
                yield Finding(
                    f"{path}.serviceAccount.name",
                    f"{name} is made by {made[name]} too, and one object cannot be made twice",
                    "set create: false here",
                )
            made[name] = path


def _cores(release: Release) -> Iterator[Finding]:
    gateway = release.values.gateway.resources
    requests, limits = ("requests.cpu", gateway.requests.cpu), ("limits.cpu", gateway.limits.cpu)
    pairs = [("gateway.resources", requests, limits)]
    sections: list[tuple[str, Any]] = [
        ("redis", release.values.redis.cpu),
        *((group.path, group.engine.cpu) for group in release.groups),
    ]
    for path, cpu in sections:
        pairs.append((f"{path}.cpu", ("request", cpu.request), ("limit", cpu.limit)))
        for key, given in (("request", cpu.request), ("limit", cpu.limit)):
            if given and milli_cores(given) >= _MILLI_CORES_MAX:
                yield Finding(
                    f"{path}.cpu.{key}",
                    f"{number(given)} cores given, and no node has so many",
                    f"thousandths of a core have the unit m: write {number(given)}m for {milli_cores(given) / 1e6:g}",
                )
            if given and milli_cores(given) < 20:
                example = _CORES_EXAMPLE.get(path, "8")
                yield Finding(
                    f"{path}.cpu.{key}",
                    f"{number(given)} given, at least 20m needed",
                    f'whole cores have no unit: write "{example}"',
                )
    for path, request, limit in pairs:
        yield from not_above(path, request, limit, milli_cores)


def _low_ports(release: Release) -> Iterator[Finding]:
    gateway, redis = release.values.gateway, release.values.redis
    ports = [
        ("gateway", "gateway.port", gateway.port, "gateway.service.port may stay below"),
        ("gateway", "gateway.opsPort", gateway.ops_port or 1024, "e.g. 8001"),
        *([("gateway", "gateway.picker.port", gateway.picker.port, "e.g. 9002")] if gateway.picker.enabled else []),
        *([("redis", "redis.port", redis.port, "e.g. 6379")] if redis.enabled else []),
        *((group.path, f"{group.path}.port", group.engine.port, "e.g. 8100") for group in release.groups),
    ]
    for path, setting, port, example in ports:
        if port < 1024 and not _opens_low_ports(*_contexts_of(path, release)):
            yield Finding(
                setting,
                f"{port} is below 1024, which a process that is not root may not open on every node",
                f"set 1024 or more ({example})",
            )


def _opens_low_ports(pod: Mapping[str, Any], container: Mapping[str, Any]) -> bool:
    added = (container.get("capabilities") or {}).get("add") or []
    user = container.get("runAsUser") or pod.get("runAsUser") or 0
    return bool(user == 0 or pod.get("sysctls") or container.get("privileged") or "NET_BIND_SERVICE" in added)


def _resources(group: Group) -> Iterator[Finding]:
    engine, path = group.engine, f"{group.path}.accelerator.extraResources"
    resources, accelerator = engine.accelerator.extra_resources, engine.accelerator
    if group.device.resource_name in resources:
        yield Finding(
            path,
            f"{group.device.resource_name} is resourceName, whose amount is accelerator.count",
            "remove it here",
        )
    if accelerator.memory_mib and f"{group.device.resource_name}-memory" in resources:
        yield Finding(
            path,
            f"{group.device.resource_name}-memory is what memoryMiB: {accelerator.memory_mib} asks for",
            "remove one of the two",
        )
    pages = engine.huge_pages
    if pages.amount is not None:
        amount, page = size(pages.amount), size(pages.page_size)
        if amount % page:
            yield Finding(
                f"{group.path}.hugePages.amount",
                f"{number(pages.amount)} is no whole number of pages of {pages.page_size}",
                f"set it to {-(-amount // page) * page // (1 << 20)}Mi",
            )
        if f"hugepages-{pages.page_size}" in resources:
            yield Finding(
                path,
                f"hugepages-{pages.page_size} is what hugePages.amount: {number(pages.amount)} asks for",
                "remove one of the two",
            )
    for name, asked in resources.items():
        if name.startswith("hugepages-"):
            page_bytes = parse_byte_count(name.removeprefix("hugepages-"))
            if parse_byte_count(asked) % page_bytes:
                yield Finding(
                    f"{path}.{name}",
                    f"{number(asked)} is no whole number of pages",
                    f"write their sum, such as {max(1, page_bytes * 2 // (1 << 20))}Mi",
                )
        elif re.search(r"(^|\.)kubernetes\.io/", name):
            yield Finding(
                path,
                f"{name} is no extended resource, as kubernetes.io is Kubernetes' own",
                "write the name that kubectl describe node shows",
            )


def _kernel(group: Group) -> Iterator[Finding]:
    engine, path = group.engine, group.path
    if engine.host_network and engine.dns_policy == "ClusterFirst":
        yield Finding(
            f"{path}.dnsPolicy",
            "ClusterFirst with hostNetwork: true leaves a pod without the cluster's names",
            "set ClusterFirstWithHostNet, or null",
        )
    sysctls = [each["name"].replace("/", ".") for each in group.device.pod_security_context.get("sysctls") or ()]
    for name in repeated(sysctls):
        yield Finding(f"{path}.podSecurityContext.sysctls", f"{name} is given twice", "keep one")
    for name in sysctls:
        if engine.host_network and name.startswith("net."):
            yield Finding(
                f"{path}.podSecurityContext.sysctls",
                f"{name} is of the pod's own network, and hostNetwork: true has none",
                "set it on the node, or remove one of the two",
            )


def _storage(group: Group) -> Iterator[Finding]:
    engine, at = group.engine, f"{group.path}.ephemeralStorage"
    storage, volume = engine.ephemeral_storage, engine.offload.shared_tier.nvme.volume
    if storage.limit is None:
        return
    yield from not_above(at, ("request", storage.request), ("limit", storage.limit), size)
    if group.uses_nvme and volume.type == "emptyDir" and size(storage.limit) < size(volume.size):
        yield Finding(
            f"{at}.limit",
            f"{number(storage.limit)} is less than offload.sharedTier.nvme.volume.size: {number(volume.size)}, whose "
            "emptyDir counts against it, so kubelet would evict the pod",
            "raise the limit, or set it to null",
        )
