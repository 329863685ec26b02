"""Rules of accelerators, engine images and what each platform has. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from spillway_ctl.check.finding import Finding, bytes_text, number, on_off, quoted
from spillway_ctl.check.group import Group
from spillway_engine.argument_memory import argument_memory

VLLM_VERSIONS = ("0.23", "0.30", "0.32")
# Vendor of a device's resource -> the platform that runs on it, and its presets.
_VENDORS = {
    "amd.com/": ("", ""),
    "aws.amazon.com/neuron": ("", ""),
    "google.com/tpu": ("", ""),
    "gpu.intel.com/": ("", ""),
    "huawei.com/": ("npu", "mindcluster, cce or hami"),
    "nvidia.com/": ("cuda", "cuda"),
}
_DEVICE_GIB = {"mindcluster": 64, "cce": 64, "hami": 64, "a5": 144, "custom": 144}
_LARGEST_DEVICE_GIB = 288
_LEAST_MEMORY_MIB = 1024


def device_findings(group: Group) -> Iterator[Finding]:
    if group.platform == "cpu":
        yield from _no_devices(group)
    elif group.engine.accelerator.from_claims:
        yield from _claimed_devices(group)
    else:
        yield from _devices(group)
    yield from _claim_names(group)
    yield from _image(group)
    yield from _security(group)
    yield from _visible_devices(group)
    yield from _platform(group)
    yield from _vendor(group)
    yield from _weights(group)


def _devices(group: Group) -> Iterator[Finding]:
    engine, path, device = group.engine, group.path, group.device
    if not device.resource_name:
        yield Finding(
            f"{path}.accelerator.resourceName",
            f"is empty, and preset: {engine.accelerator.preset} needs the name that your device plugin advertises",
            "set it (kubectl describe node shows it)",
        )
    if device.count < group.ranks:
        sizes = (
            ("tensorParallelSize", engine.tensor_parallel_size),
            ("pipelineParallelSize", engine.pipeline_parallel_size),
            ("dataParallelSize", engine.data_parallel_size),
        )
        product = " x ".join(f"{key}: {value}" for key, value in sizes if value > 1 or key == "tensorParallelSize")
        if engine.nodes_per_replica > 1:
            product += f" / nodesPerReplica: {engine.nodes_per_replica}"
        yield Finding(
            f"{path}.accelerator.count",
            f"{device.count} devices for {product} ranks, and each rank needs one",
            f"set count >= {group.ranks} or null",
        )
    if device.count > group.ranks:
        yield Finding(
            f"{path}.accelerator.count",
            f"{device.count} devices for {group.ranks} {'rank' if group.ranks == 1 else 'ranks'}, so that the others "
            "of each pod are idle",
            "set null, or more ranks by tensorParallelSize, unless the node gives devices only so",
            is_note=True,
        )
    is_310_image = engine.image.variant.startswith("310p")
    is_310_board = "310P" in device.resource_name or device.resource_name.endswith("ascend-310")
    if is_310_image != is_310_board and not group.has_own_image:
        yield Finding(
            f"{path}.image.variant",
            f"{quoted(engine.image.variant)} does not fit accelerator.resourceName: {device.resource_name}, as the "
            "310P "
            "boards need a 310p variant and only they do",
            "change one of the two",
        )


def _claimed_devices(group: Group) -> Iterator[Finding]:
    """Rules of devices that the pod's resourceClaims allocate."""
    engine, path = group.engine, group.path
    given = {
        "resourceName": engine.accelerator.resource_name,
        "count": engine.accelerator.count,
        "memoryMiB": engine.accelerator.memory_mib,
    }
    for key, value in given.items():
        if value:
            yield Finding(
                f"{path}.accelerator.{key}",
                f"{value} is asked of a device plugin, but with fromClaims: true the claims say which devices and how "
                "many",
                "say it in the claim, or set fromClaims: false",
            )
    if not engine.resource_claims:
        yield Finding(
            f"{path}.resourceClaims",
            "is empty, and accelerator.fromClaims: true takes the devices from there",
            "add a claim for the devices, such as {name: devices, resourceClaimTemplateName: ...}",
        )
    for index, claim in enumerate(engine.resource_claims):
        if claim.get("resourceClaimName") and group.pods > 1:
            yield Finding(
                f"{path}.resourceClaims[{index}].resourceClaimName",
                f"{claim['resourceClaimName']} is one claim, whose devices all {group.pods} pods would share",
                "name a template by resourceClaimTemplateName, which gives each pod its own claim",
            )


def _claim_names(group: Group) -> Iterator[Finding]:
    """Claims of one pod have different names."""
    engine, path = group.engine, group.path
    names: set[str] = set()
    for index, claim in enumerate(engine.resource_claims):
        if claim["name"] in names:
            yield Finding(
                f"{path}.resourceClaims[{index}].name",
                f"{claim['name']} is there twice",
                "give each claim its own name",
            )
        names.add(claim["name"])


def _no_devices(group: Group) -> Iterator[Finding]:
    accelerator, path = group.engine.accelerator, group.path
    if accelerator.resource_name or accelerator.count or accelerator.from_claims:
        yield Finding(
            f"{path}.accelerator",
            "preset: cpu takes no devices",
            "remove resourceName and count, and fromClaims, or choose another preset",
        )
    given = (
        accelerator.driver_mounts,
        accelerator.roce_mounts,
        accelerator.privileged,
        accelerator.visible_devices.mode,
    )
    if any(given):
        yield Finding(
            f"{path}.accelerator",
            "driverMounts, roceMounts, privileged and visibleDevices mean nothing with preset: cpu",
            "remove them",
        )
    if group.engine.image.variant:
        yield Finding(
            f"{path}.image.variant",
            f"{quoted(group.engine.image.variant)} is an Ascend image, and preset: cpu has no variants",
            "remove it",
        )


def _image(group: Group) -> Iterator[Finding]:
    image, path = group.engine.image, group.path
    given = quoted(image.vllm)
    if image.vllm not in VLLM_VERSIONS:
        yield Finding(
            f"{path}.image.vllm",
            f"{given} has no engine image; there are images of vLLM 0.23, 0.30 and 0.32",
            'write one of them in quotes, e.g. vllm: "0.32"',
        )
    elif image.vllm != "0.23" and image.variant.startswith("a5") and not group.has_own_image:
        yield Finding(
            f"{path}.image.variant",
            f'{quoted(image.variant)} has a base image for vllm: "0.23" alone',
            f'with vllm: {given} name an image of your own by image.tag or image.digest, or set vllm: "0.23"',
        )


def _security(group: Group) -> Iterator[Finding]:
    engine, path = group.engine, group.path
    own = engine.security_context or {}
    if engine.accelerator.privileged and own and not own.get("privileged"):
        yield Finding(
            f"{path}.accelerator.privileged",
            f"true makes the chart's own security context privileged, but {path}.securityContext replaces it",
            "add privileged: true there, or remove one of the two",
        )
    added = (own.get("capabilities") or {}).get("add") or []
    if engine.accelerator.lock_memory and own and not own.get("privileged") and not {"IPC_LOCK", "ALL"} & set(added):
        yield Finding(
            f"{path}.accelerator.lockMemory",
            f"true adds IPC_LOCK to the chart's own security context, but {path}.securityContext replaces it",
            "add capabilities.add: [IPC_LOCK] there, or remove one of the two",
        )


def _visible_devices(group: Group) -> Iterator[Finding]:
    setting = f"{group.path}.accelerator.visibleDevices.value"
    value, mode = group.engine.accelerator.visible_devices.value, group.device.visible_devices
    if mode == "literal" and not value:
        yield Finding(setting, "is empty, and mode: literal needs one", 'set it, e.g. to "0,1"')
    elif mode == "literal":
        devices = value.split(",")
        wrong = re.fullmatch(r"[0-9]+(,[0-9]+)*", value) is None or len(set(devices)) != len(devices)
        if wrong or len(devices) < group.ranks:
            yield Finding(
                setting,
                f"{quoted(value)} given, numbers of devices with commas between them needed, each once and one for "
                f"each of {group.ranks} ranks",
                f"write {quoted(','.join(map(str, range(group.ranks))))}, for example",
            )
    elif value:
        yield Finding(
            setting,
            f"{quoted(value)} is read with mode: literal alone, and the mode is {mode}",
            "set mode: literal, or remove it",
        )


def _platform(group: Group) -> Iterator[Finding]:
    engine, path, offload = group.engine, group.path, group.engine.offload
    accelerator = engine.accelerator
    if group.platform == "cuda":
        if accelerator.driver_mounts or accelerator.roce_mounts or accelerator.visible_devices.mode:
            yield Finding(
                f"{path}.accelerator",
                "driverMounts, roceMounts and visibleDevices are of Ascend and mean nothing with preset: cuda, whose "
                "container runtime brings driver and devices",
                "remove them",
            )
        if engine.image.variant:
            yield Finding(
                f"{path}.image.variant",
                f"{quoted(engine.image.variant)} is an Ascend image, and preset: cuda has no variants",
                "remove it",
            )
        if offload.acl_library_path:
            yield Finding(
                f"{path}.offload.aclLibraryPath",
                f"{offload.acl_library_path} is a library of Ascend's CANN, which preset: cuda does not open",
                "remove it",
            )
        if offload.transport == "npu":
            yield Finding(
                f"{path}.offload.transport",
                "npu copies from Ascend devices; accelerator.preset: cuda needs auto or cuda",
                "set it to auto",
            )
    elif offload.transport == "cuda":
        yield Finding(
            f"{path}.offload.transport",
            f"cuda copies from NVIDIA devices; accelerator.preset: {accelerator.preset} needs auto",
            "set it to auto",
        )
    if (
        offload.enabled
        and group.platform == "cpu"
        and on_off(offload.batch_memcpy) == "on"
        and offload.transport in ("auto", "cpu")
    ):
        yield Finding(
            f"{path}.offload.batchMemcpy",
            "on needs a device driver with batched copies, and accelerator.preset: cpu has none",
            "set auto or off",
        )


def _vendor(group: Group) -> Iterator[Finding]:
    resource = group.device.resource_name
    for vendor, (platform, presets) in _VENDORS.items():
        if resource.startswith(vendor) and group.platform != platform:
            remedy = "engines run on Ascend NPUs, NVIDIA GPUs and CPUs: choose a node of one of these"
            yield Finding(
                f"{group.path}.accelerator.resourceName",
                f"{resource} is no device for the engine image of preset: {group.engine.accelerator.preset}",
                f"set preset: {presets}" if presets else remedy,
            )


def _weights(group: Group) -> Iterator[Finding]:
    """Find weights that no device holds, which would otherwise show after an hour's download.

    memoryMiB and the name of a part of a device (MIG) say how large one is; else it is the largest that the preset
    stands for. Quantised weights and those kept in host memory may be smaller than is known here.
    """
    engine, resource, accelerator = group.engine, group.device.resource_name, group.engine.accelerator
    gib = _DEVICE_GIB.get(accelerator.preset, _LARGEST_DEVICE_GIB)
    of = f"that a device of accelerator.preset: {accelerator.preset} has at most"
    if resource.endswith("/Ascend910B4"):
        gib, of = 32, f"of a {resource}"
    if part := re.search(r"mig-[0-9]+g\.([0-9]+)gb", resource):
        gib, of = int(part[1]), f"of a {resource}"
    most = gib << 30
    if accelerator.memory_mib:
        most, of = accelerator.memory_mib << 20, "of accelerator.memoryMiB"
    # Every data parallel rank has all weights, but for experts that are spread over them.
    ranks = engine.tensor_parallel_size * engine.pipeline_parallel_size
    if group.model.shape.experts and "--enable-expert-parallel" in engine.extra_args:
        ranks *= engine.data_parallel_size
    asked = argument_memory(engine.extra_args, on_cpu=False, ranks=1, cores=1, weight_bytes=1)
    weights = group.model.shape.weight_bytes
    share = weights // ranks
    if accelerator.memory_mib and accelerator.memory_mib < _LEAST_MEMORY_MIB:
        yield Finding(
            f"{group.path}.accelerator.memoryMiB",
            f"{accelerator.memory_mib} given, which is less than an engine's own process takes of a device",
            f"write {accelerator.memory_mib * 1024} for {accelerator.memory_mib} GiB",
        )
    elif group.platform != "cpu" and not engine.model.quantization and not asked.process_bytes and share > most:
        more_memory = ", or raise accelerator.memoryMiB" if accelerator.memory_mib else ""
        yield Finding(
            f"{group.path}.tensorParallelSize",
            f"{number(engine.tensor_parallel_size)} given ({ranks} ranks), but the weights of "
            f"{engine.model.shape.preset or engine.model.path} are {bytes_text(weights)}, {bytes_text(share)} for "
            "each, "
            f"more than the {bytes_text(most)} {of}",
            f"set it so that there are {weights // most + 1} ranks or more, or choose a smaller model{more_memory}",
        )
