"""Rules of containers, volumes and mounts that values add to a pod, held against the chart's own. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from spillway_ctl.check.finding import Finding, amount, number, quoted
from spillway_ctl.check.group import Group, Mount, Release, fitting
from spillway_ctl.check.pod_rules import OWN_FOLDERS
from spillway_ctl.check.shared_rules import containers, distinct_folders, not_above, propagation, repeated
from spillway_settings.shared_names import FOLDERS

_CHOSEN = {
    "model": "model.volume.mountPath",
    "adapters": "lora.volume.mountPath",
    "kv": "offload.sharedTier.nvme.path",
    "hugepages": "hugePages.mountPath",
}
_READ_ONLY = (FOLDERS["config"], FOLDERS["valkey"], FOLDERS["secrets"])
_IMAGE = re.compile(
    r"([A-Za-z0-9.-]+(:[0-9]+)?/)?[a-z0-9]+(([._]|__|-+)[a-z0-9]+)*(/[a-z0-9]+(([._]|__|-+)[a-z0-9]+)*)*"
    r"(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@[a-z0-9+.-]+:[0-9a-fA-F]{32,})?"
)
_MEMORY_BYTES_LEAST = 1 << 20
# Without what the image has there, nothing in it starts.
_OF_THE_IMAGE = {
    *("/bin", "/etc", "/lib", "/lib64", "/opt/spillway", "/sbin", "/usr", "/usr/bin", "/usr/lib", "/usr/local"),
    *("/usr/local/bin", "/usr/local/lib"),
}
_SYSTEM = {
    *("/boot", "/dev", "/home", "/opt", "/proc", "/root", "/run", "/sys", "/var", "/var/lib", "/var/lib/spillway"),
    *_OF_THE_IMAGE,
}
_NEEDS_AN_END = ("readinessProbe", "livenessProbe", "startupProbe", "lifecycle")


class Pod(msgspec.Struct, frozen=True):
    """A component's pod before values add to it."""

    path: str
    section: Any
    container: str
    volumes: tuple[str, ...]
    ports: dict[str, int]
    mounts: tuple[Mount, ...]
    is_privileged: bool


def container_findings(release: Release) -> Iterator[Finding]:
    for pod in _pods(release):
        yield from _mounts(pod)
        yield from _containers(pod, release)
    for group in release.groups:
        yield from _chosen_folders(group)
        yield from _host_ports(group)


def _pods(release: Release) -> Iterator[Pod]:
    gateway, redis = release.values.gateway, release.values.redis
    tokenizers = tuple(
        Mount(fitting(f"model-{group.key or 'default'}", 63), f"{FOLDERS['models']}/{group.key or 'default'}", True)
        for group in release.groups
        if group.engine.model.tokenizer == "volume"
    )
    ports = {"http": gateway.port} | ({"ops": gateway.ops_port} if gateway.ops_port else {})
    names = ("config", "scratch", "secrets", *(mount.name for mount in tokenizers))
    is_privileged = bool(gateway.security_context.get("privileged"))
    yield Pod("gateway", gateway, "gateway", names, ports, tokenizers, is_privileged)
    yield Pod("redis", redis, "valkey", ("config", "scratch"), {"redis": redis.port}, (), False)
    for group in release.groups:
        mounts = group.mounts()
        yield Pod(
            group.path,
            group.engine,
            "engine",
            tuple(mount.name for mount in mounts),
            {"http": group.engine.port, **group.event_ports},
            mounts,
            bool(group.device.security_context.get("privileged")),
        )


def _mounts(pod: Pod) -> Iterator[Finding]:
    at, volumes = f"{pod.path}.extraVolumeMounts", _volumes(pod)
    read_only = dict.fromkeys([*_READ_ONLY, *(each.path.removesuffix("/") for each in pod.mounts if each.read_only)])
    folders = {mount.path.removesuffix("/"): mount.name for mount in pod.mounts}
    for mount in pod.section.extra_volume_mounts:
        name, path = mount["name"], mount["mountPath"]
        folder = path.removesuffix("/")
        if name not in volumes:
            yield Finding(
                at, f"{name} at {path} is no volume of the pod", "add it to extraVolumes, or correct the name"
            )
        if folder in _OF_THE_IMAGE:
            yield Finding(
                at,
                f"{path} hides what the image has there, without which nothing starts",
                f"mount {name} elsewhere, or a file of it with subPath",
            )
        if folder in folders and folder not in OWN_FOLDERS:
            yield Finding(at, f"at {path} the chart mounts {folders[folder]}", f"mount {name} elsewhere")
        for other in read_only:
            if path.startswith(f"{other}/"):
                yield Finding(
                    at,
                    f"{path} lies in {other}, which is mounted read-only, so that no folder can be made there",
                    f"mount {name} outside",
                )
        yield from propagation(at, mount, is_privileged=pod.is_privileged)
        if ".." in (mount.get("subPath") or "").split("/"):
            yield Finding(
                at, f"subPath: {quoted(mount['subPath'])} of {name} leaves its volume", "write a path without .."
            )


def _volumes(pod: Pod) -> set[str]:
    return {*pod.volumes, *(volume["name"] for volume in pod.section.extra_volumes)}


def _containers(pod: Pod, release: Release) -> Iterator[Finding]:
    ports, volumes = dict(pod.ports), _volumes(pod)
    names = {pod.container: "the chart's own container"}
    for at, container in containers(pod.path, pod.section):
        name, is_sidecar = container["name"], at.startswith(f"{pod.path}.sidecars[")
        if name in names:
            yield Finding(f"{at}.name", f"{name} is {names[name]}", "choose another name")
        names[name] = f"the name of {at.removeprefix(f'{pod.path}.')} too"
        yield from _own(at, container, release, is_sidecar=is_sidecar)
        yield from _claims(at, pod, container)
        for mount in container.get("volumeMounts") or ():
            if mount["name"] not in volumes:
                yield Finding(
                    f"{at}.volumeMounts",
                    f"{mount['name']} at {mount['mountPath']} is no volume of the pod",
                    f"add it to {pod.path}.extraVolumes, or correct the name",
                )
        if is_sidecar or container.get("restartPolicy") == "Always":
            yield from _ports(at, container, ports)
            continue
        for probe in _NEEDS_AN_END:
            if container.get(probe):
                yield Finding(
                    f"{at}.{probe}",
                    "given, but a container that ends before the others begin has none",
                    "remove it, or set restartPolicy: Always",
                )


def _claims(at: str, pod: Pod, container: Mapping[str, Any]) -> Iterator[Finding]:
    known = [claim["name"] for claim in getattr(pod.section, "resource_claims", ())]
    remedy = f"add it to {pod.path}.resourceClaims, or correct the name"
    for claim in (container.get("resources") or {}).get("claims") or ():
        if claim["name"] not in known:
            yield Finding(
                f"{at}.resources.claims",
                f"{claim['name']} is no claim of the pod",
                remedy if hasattr(pod.section, "resource_claims") else "remove it, as only engines have claims",
            )


def _ports(at: str, container: Mapping[str, Any], ports: dict[str, int]) -> Iterator[Finding]:
    listed = container.get("ports") or ()
    for port in listed:
        for name, taken in ports.items():
            if port["containerPort"] == taken and port.get("protocol") != "UDP":
                yield Finding(
                    f"{at}.ports",
                    f"{taken} is the pod's port {name} already",
                    f"let {container['name']} listen on another",
                )
            elif port.get("name") == name:
                yield Finding(
                    f"{at}.ports",
                    f"the name {name} is that of port {taken} of the pod, which Services look for",
                    "choose another name",
                )
    for port in listed:
        ports[port.get("name") or f"of {container['name']}"] = port["containerPort"]


def _own(at: str, container: Mapping[str, Any], release: Release, *, is_sidecar: bool) -> Iterator[Finding]:
    """Yield the contradictions within one container."""
    policy = container.get("restartPolicy")
    if policy and release.cluster.is_before("1.35"):
        if is_sidecar:
            yield Finding(
                f"{at}.restartPolicy",
                f"{policy} given, but before Kubernetes 1.35 a container has none of its own",
                "remove it, or make it one of initContainers with restartPolicy: Always, which starts first and stays",
            )
        elif policy != "Always":
            yield Finding(
                f"{at}.restartPolicy",
                f"{policy} given, Always needed before Kubernetes 1.35, for one that stays",
                "set that, or remove it for one that ends",
            )
    names = [port["name"] for port in container.get("ports") or () if port.get("name")]
    for name in repeated(names):
        yield Finding(f"{at}.ports", f"the name {name} is there twice", "give each port its own")
    yield from _probes(at, container, names)
    for name in repeated(variable["name"] for variable in container.get("env") or ()):
        yield Finding(f"{at}.env", f"{name} is listed twice", "remove one")
    if (image := container["image"]) and _IMAGE.fullmatch(image) is None:
        yield Finding(
            f"{at}.image",
            f"{quoted(image)} given, HOST[:PORT]/NAME:TAG without a scheme, with NAME in small letters, needed",
            "correct it",
        )
    is_privileged = bool((container.get("securityContext") or {}).get("privileged"))
    mounts = container.get("volumeMounts") or ()
    yield from distinct_folders(f"{at}.volumeMounts", mounts)
    for mount in mounts:
        yield from propagation(f"{at}.volumeMounts", mount, is_privileged=is_privileged)
    yield from _resources(at, container.get("resources") or {})


def _probes(at: str, container: Mapping[str, Any], names: list[str]) -> Iterator[Finding]:
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        given = container.get(probe) or {}
        if probe != "readinessProbe" and (given.get("successThreshold") or 1) > 1:
            yield Finding(
                f"{at}.{probe}.successThreshold",
                f"{given['successThreshold']} given, 1 needed",
                "remove it: only a readinessProbe has another",
            )
        for way in ("httpGet", "tcpSocket"):
            port = (given.get(way) or {}).get("port")
            if isinstance(port, str) and port not in names:
                yield Finding(
                    f"{at}.{probe}.{way}.port",
                    f"{port} is no name among the container's ports",
                    "add it there, or write the number",
                )


def _resources(at: str, resources: Mapping[str, Any]) -> Iterator[Finding]:
    limits = resources.get("limits") or {}
    for name, given in limits.items():
        if "/" in name and amount(given).denominator != 1:
            yield Finding(
                f"{at}.resources.limits.{name}",
                f"{number(given)} given, a whole number needed, as no device is shared",
                "write one",
            )
    memory = limits.get("memory")
    if memory is not None and amount(memory) < _MEMORY_BYTES_LEAST:
        yield Finding(
            f"{at}.resources.limits.memory",
            f"{number(memory)} given, less than a MiB, in which no container starts",
            f"add a unit, such as {number(memory)}Mi" if isinstance(memory, int) else "write 128Mi, for example",
        )
    for name, request in (resources.get("requests") or {}).items():
        limit = limits.get(name)
        if ("/" in name or name.startswith("hugepages-")) and str(request) != str(limit):
            yield Finding(
                f"{at}.resources",
                f"requests of {name}: {number(request)} given, but limits have "
                f"{'none' if limit is None else number(limit)}, and Kubernetes takes this resource with both alike",
                "give both the same",
            )
        if name.startswith("cpu") or name in ("memory", "ephemeral-storage"):
            yield from not_above(f"{at}.resources", (f"requests.{name}", request), (f"limits.{name}", limit), amount)


def _chosen_folders(group: Group) -> Iterator[Finding]:
    """Folders that values choose for volumes and at which none can be mounted."""
    mounts = group.mounts()
    named: set[str] = set()  # of two chosen folders, the first one reports the conflict
    for mount in mounts:
        if mount.name not in _CHOSEN:
            continue
        at, folder = f"{group.path}.{_CHOSEN[mount.name]}", mount.path.removesuffix("/")
        if folder in _SYSTEM:
            yield Finding(
                at,
                f"{folder} holds files of the image, which a volume there would hide",
                "choose a folder of its own, such as /data",
            )
        for other in mounts:
            taken = other.path.removesuffix("/")
            if other.name == mount.name:
                continue
            if folder == taken and other.name not in named:
                yield Finding(at, f"at {folder} the pod mounts its volume {other.name}", "choose another folder")
            elif other.read_only and folder.startswith(f"{taken}/"):
                yield Finding(
                    at,
                    f"{folder} lies in {taken}, which is mounted read-only, so that no folder can be made there",
                    "choose one outside",
                )
        named.add(mount.name)


def _host_ports(group: Group) -> Iterator[Finding]:
    for at, container in containers(group.path, group.engine) if group.engine.host_network else ():
        for port in container.get("ports") or ():
            if port.get("hostPort") and port["hostPort"] != port["containerPort"]:
                yield Finding(
                    f"{at}.ports",
                    f"hostPort: {port['hostPort']} given, but with hostNetwork: true it is containerPort: "
                    f"{port['containerPort']}",
                    "give both the same, or remove hostPort",
                )
