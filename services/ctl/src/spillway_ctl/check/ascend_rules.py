"""Rules of what Ascend needs beyond its devices: collective communication (HCCL) and CPUs to bind. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from spillway_connector.native_keys import BATCH_MEMCPY_VARIABLE
from spillway_ctl.check.finding import Finding, milli_cores, number, on_off, quoted
from spillway_ctl.check.group import Group, Release, hccl_environment

_HCCL_FIRST_PORT, _HCCL_PORTS = 60000, 32


def ascend_findings(release: Release) -> Iterator[Finding]:
    yield from _overlaps(release)
    for group in release.groups:
        yield from _hccl(group)
        yield from _variables(group)
        if group.platform == "npu":
            yield from _cpu_binding(group)
            yield from _image(group)


def _hccl_ports(group: Group) -> tuple[int, int] | None:
    """First and last of the host's ports that HCCL takes; None if one rank talks to none."""
    if group.platform != "npu" or group.ranks == 1:
        return None
    first = group.engine.accelerator.hccl.base_port or _HCCL_FIRST_PORT
    return first, first + _HCCL_PORTS - 1


def _ports(group: Group) -> dict[str, int]:
    ports = {"port": group.engine.port}
    for name, port in group.event_ports.items():
        key = "kvEvents.port" if name.startswith("kv-events") else "kvEvents.replayPort"
        rank = re.search("[0-9]+$", name)
        ports[f"{key} + {rank[0]}" if rank else key] = port
    return ports


def _hccl(group: Group) -> Iterator[Finding]:
    hccl, path = group.engine.accelerator.hccl, group.path
    taken = _hccl_ports(group)
    for key, port in sorted(_ports(group).items()):
        if taken is not None and taken[0] <= port <= taken[1]:
            yield Finding(
                f"{path}.{key}",
                f"{port} lies among the ports {taken[0]} to {taken[1]} that HCCL opens (accelerator.hccl.basePort)",
                "choose one outside, or move basePort",
            )
    if hccl.device_ports:
        least, most = map(int, hccl.device_ports.split("-"))
        if least > most or most > 65535 or least < 1024:
            yield Finding(
                f"{path}.accelerator.hccl.devicePorts",
                f"{quoted(hccl.device_ports)} is no range within 1024 to 65535, lower end first",
                "write 16666-16697, for example",
            )


def _overlaps(release: Release) -> Iterator[Finding]:
    """Find overlaps of port ranges between groups that may share a node and use its network."""
    on_host: list[Group] = []
    for group in release.groups:
        taken = _hccl_ports(group)
        if taken is None or not group.engine.host_network:
            continue
        for other in on_host:
            others = _hccl_ports(other) or (0, 0)
            # Pods with a port in common never share a node.
            share_a_port = set(_ports(group).values()) & set(_ports(other).values())
            same_nodes = group.engine.node_selector == other.engine.node_selector
            if not share_a_port and same_nodes and taken[0] <= others[1] and taken[1] >= others[0]:
                yield Finding(
                    f"{group.path}.accelerator.hccl.basePort",
                    f"HCCL's ports {taken[0]} to {taken[1]} overlap those of {other.path} ({others[0]} to "
                    f"{others[1]}), "
                    "and hostNetwork: true brings both onto one node",
                    "set basePort 32 or more apart, or keep the two on different nodes by nodeSelector",
                )
        on_host.append(group)


def _variables(group: Group) -> Iterator[Finding]:
    path = group.path
    for name in hccl_environment(group.engine):
        if name in group.variables:
            yield Finding(
                f"{path}.accelerator.hccl",
                f"sets {name}, and the environment of {path} does too",
                "give it once",
            )
    if BATCH_MEMCPY_VARIABLE in group.variables:
        yield Finding(
            f"{path}.extraEnv",
            f"{BATCH_MEMCPY_VARIABLE} is read when vllm-ascend is built and does nothing here",
            f"remove it, and set {path}.offload.batchMemcpy: auto, on or off",
        )


def _cpu_binding(group: Group) -> Iterator[Finding]:
    engine, path, accelerator = group.engine, group.path, group.engine.accelerator
    binding = on_off(accelerator.cpu_binding)
    if binding == "on":
        needed = group.device.cpus_per_device * group.device.count
        limit, request = (
            milli_cores(engine.cpu.limit or "0"),
            milli_cores(engine.cpu.request or engine.cpu.limit or "0"),
        )
        if limit < 1000 * needed or limit != request or limit % 1000:
            yield Finding(
                f"{path}.cpu",
                f"request {number(engine.cpu.request)} and limit {number(engine.cpu.limit)} given, but "
                f"accelerator.cpuBinding: on needs {needed} whole CPUs or more ({group.device.cpus_per_device} for "
                "each "
                f"of {group.device.count} devices), request and limit alike, which the static CPU manager then "
                "reserves",
                f'set both to "{needed}", or cpuBinding: auto',
            )
        if accelerator.driver_mounts and not accelerator.npu_smi_path:
            yield Finding(
                f"{path}.accelerator.npuSmiPath",
                "is empty, and cpuBinding: on asks npu-smi for the location of each device",
                "set its path on the node, or cpuBinding: off",
            )
    for argument in engine.extra_args:
        if re.match("--additional[-_]config", argument) and binding != "auto":
            yield Finding(
                f"{path}.accelerator.cpuBinding",
                f"{binding} is given to vLLM as --additional-config, which extraArgs has too, and vLLM takes the last "
                "one",
                f'write "enable_cpu_binding": {str(binding == "on").lower()} there, and set cpuBinding: auto',
            )


def _image(group: Group) -> Iterator[Finding]:
    image, preset, path = group.engine.image, group.engine.accelerator.preset, f"{group.path}.image.variant"
    is_a5_image = image.variant.startswith("a5")
    if preset == "a5" and not is_a5_image and not group.has_own_image:
        yield Finding(
            path,
            f"{quoted(image.variant)} is an image of another board than preset: a5",
            "set a5 or a5-openeuler",
        )
    if is_a5_image and preset != "a5" and not group.has_own_image:
        yield Finding(
            path,
            f"{quoted(image.variant)} is an image of Atlas A5, and accelerator.preset: {preset} is for other boards",
            "set preset: a5 and resourceName",
        )
