"""Rules of the model: its location, tokenizer, adapters, heads and downloads. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator

from spillway_ctl.check.finding import Finding, below, bytes_text, number, on_off, quantity, quoted, size
from spillway_ctl.check.group import ON_VOLUME, Group, Release
from spillway_ctl.check.model_facts import is_model_path, meant_hub_name
from spillway_ctl.check.shared_rules import closed_way, system_folder

_VOLUME_NEEDS = (("existingClaim", "claimName", "claim_name"), ("hostPath", "hostPath", "host_path"))
_TRUE = ("1", "on", "yes", "true")
_NO_HOST_BYTES = 16 << 40
_START_SECONDS = 30.0
_START_BYTES_PER_SECOND = 20e9  # above any disk, network or kernel that an engine starts on


def model_findings(group: Group, release: Release) -> Iterator[Finding]:
    yield from _place(group)
    yield from _hub(group, release)
    yield from _volumes(group)
    yield from _tokenizer(group)
    yield from _adapters(group)
    yield from _resolver(group)
    yield from _parallelism(group)
    yield from _downloads(group)
    yield from _start(group)


def _place(group: Group) -> Iterator[Finding]:
    model, path = group.engine.model, f"{group.path}.model.path"
    volume, is_folder = model.volume, model.path.startswith("/")
    if is_folder and volume.type == "none":
        yield Finding(
            path,
            f"{model.path} is a folder, but no volume brings it",
            "set model.volume.type to existingClaim, hostPath or nfs, or to image when the engine image holds it",
        )
    if not is_folder and volume.type != "none":
        yield Finding(
            path,
            f"{model.path} is a hub name, but model.volume.type is {volume.type}",
            f"write the folder below {volume.mount_path}, or type: none",
        )
    if is_folder and volume.type in ON_VOLUME and not below(model.path, volume.mount_path):
        yield Finding(
            path,
            f"{model.path} does not lie below model.volume.mountPath: {volume.mount_path}, where the volume is",
            "change one of the two",
        )
    yield from _folder_or_hub_name(path, model.path, "/models/Qwen3-8B or Qwen/Qwen3-8B")


def _folder_or_hub_name(at: str, path: str, examples: str) -> Iterator[Finding]:
    if is_model_path(path):
        return
    if path.startswith("/"):
        yield Finding(
            at,
            f"{quoted(path)} given, an absolute folder without .. in it and without a blank at its end needed",
            "correct it",
        )
        return
    remedy = f"write {examples}, for example"
    if meant := meant_hub_name(path):
        remedy = f"write {meant}"
    elif "://" in path:
        remedy = "bring its files by a volume (model.volume, lora.volume), and write their folder here"
    yield Finding(at, f"{quoted(path)} is neither an absolute folder nor a hub name", remedy)


def _hub(group: Group, release: Release) -> Iterator[Finding]:
    engine, path = group.engine, group.path
    if engine.model.cache.type == "emptyDir":
        places = {f"{path}.model.path": (engine.model.path, "the model by model.volume")}
        places |= {
            f"{path}.lora.adapters[{index}].path": (adapter.path, "the adapter by lora.volume")
            for index, adapter in enumerate(engine.lora.adapters)
        }
        for place, (name, remedy) in places.items():
            if not name.startswith("/"):
                to, or_else = f"the hub that {place}: {name} comes from", f", or bring {remedy}"
                yield from closed_way(release.values.network_policy, "engineEgress", to, or_else)
    offline = [
        name
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
        if str(engine.extra_env.get(name, "")).lower() in _TRUE
    ]
    if offline and engine.model.cache.type == "emptyDir" and group.uses_hub:
        yield Finding(
            f"{path}.extraEnv",
            f"{offline[-1]} forbids the download of what has a hub name, and model.cache.type: emptyDir begins empty",
            "remove it, or bring a filled cache by model.cache.type: existingClaim or hostPath",
        )


def _volumes(group: Group) -> Iterator[Finding]:
    model, lora = group.engine.model, group.engine.lora
    for key, volume in (("model.volume", model.volume), ("model.cache", model.cache), ("lora.volume", lora.volume)):
        for kind, setting, field in _VOLUME_NEEDS:
            if volume.type == kind and not getattr(volume, field):
                yield Finding(f"{group.path}.{key}.{setting}", f"is empty, and type: {kind} needs it", "set it")
        if volume.type == "hostPath":
            yield from system_folder(
                f"{group.path}.{key}.hostPath",
                volume.host_path,
                "mount a disk's file system somewhere else, and name a folder there, such as /mnt/models",
                is_read=key != "model.cache",
            )
    for key, source in (("model.volume", model.volume), ("lora.volume", lora.volume)):
        if source.type == "nfs" and not (source.nfs.server and source.nfs.path):
            yield Finding(f"{group.path}.{key}.nfs", "type: nfs needs server and path", "set both")


def _tokenizer(group: Group) -> Iterator[Finding]:
    model, path = group.engine.model, f"{group.path}.model.tokenizer"
    if model.tokenizer == "volume" and model.volume.type not in ON_VOLUME:
        yield Finding(
            path,
            "volume needs model.volume.type existingClaim (ReadOnlyMany or ReadWriteMany), hostPath or nfs; it is "
            f"{model.volume.type}",
            "set that type, or tokenizer: none",
        )
    if model.tokenizer not in ("none", "volume") and not model.tokenizer.startswith("/"):
        yield Finding(
            path, f"{quoted(model.tokenizer)} is none of none, volume and an absolute folder", "write one of these"
        )


def _adapter_root(group: Group) -> str:
    engine = group.engine
    if engine.lora.volume.type in ON_VOLUME:
        return engine.lora.volume.mount_path
    return engine.model.volume.mount_path if engine.lora.volume.type == "modelVolume" else ""


def _adapters(group: Group) -> Iterator[Finding]:
    lora, path = group.engine.lora, f"{group.path}.lora"
    kind, root = lora.volume.type, _adapter_root(group)
    folders = [adapter.path for adapter in lora.adapters if adapter.path.startswith("/")]
    for index, adapter in enumerate(lora.adapters):
        at = f"{path}.adapters[{index}].path"
        is_folder = adapter.path.startswith("/")
        yield from _folder_or_hub_name(at, adapter.path, "/adapters/name or owner/adapter")
        if is_folder and root and not adapter.path.startswith(f"{root.rstrip('/')}/"):
            yield Finding(
                at,
                f"{adapter.path} does not lie below {root}, where lora.volume.type: {kind} appears",
                "correct one of the two",
            )
    names = [adapter.name for adapter in lora.adapters]
    for index, alias in enumerate(lora.aliases if not lora.runtime_updating else ()):
        if alias.adapter not in names:
            yield Finding(
                f"{path}.aliases[{index}].adapter",
                f"{quoted(alias.adapter)} is none of lora.adapters ({', '.join(names) or 'none'}), and none comes "
                "later without runtimeUpdating: true",
                "correct it, or add the adapter",
            )
    if folders and kind == "none":
        yield Finding(
            f"{path}.adapters",
            f"{folders[0]} is a folder, but no volume brings it",
            "set lora.volume.type to existingClaim, hostPath or nfs, to modelVolume when it lies in the model's, or to "
            "image",
        )
    if kind != "none" and not folders and not lora.runtime_updating:
        yield Finding(
            f"{path}.volume.type",
            f"{kind}, but no adapter has a path in it",
            "name one in lora.adapters, set runtimeUpdating: true, or type: none",
        )
    if kind == "modelVolume" and group.engine.model.volume.type not in ON_VOLUME:
        yield Finding(
            f"{path}.volume.type",
            "modelVolume needs model.volume.type existingClaim, hostPath or nfs; it is "
            f"{group.engine.model.volume.type}",
            "set that type, or another one here",
        )


def _resolver(group: Group) -> Iterator[Finding]:
    lora, path = group.engine.lora, f"{group.path}.lora"
    folder, kind, root = lora.resolver_folder, lora.volume.type, _adapter_root(group)
    if not folder:
        return
    if not lora.resolver_names:
        yield Finding(
            f"{path}.resolverNames",
            "empty, so no request would load an adapter",
            'write ["*"] for every name, or set resolverFolder: ""',
        )
    if kind == "none":
        yield Finding(
            f"{path}.resolverFolder",
            f"{folder}, but no volume brings it",
            "set lora.volume.type to existingClaim, hostPath or nfs, to modelVolume when it lies in the model's, or to "
            "image",
        )
    elif root and not below(folder, root):
        yield Finding(
            f"{path}.resolverFolder",
            f"{folder} does not lie in {root}, where lora.volume.type: {kind} appears",
            "correct one of the two",
        )


def _parallelism(group: Group) -> Iterator[Finding]:
    engine, path = group.engine, group.path
    ranks, heads = engine.tensor_parallel_size, group.model.heads
    if heads and heads % ranks:
        yield Finding(
            f"{path}.tensorParallelSize",
            f"{ranks} does not divide the model's {heads} attention heads, as vLLM needs it",
            f"choose a divisor of {heads}",
        )
    stages = engine.pipeline_parallel_size
    if stages > 1 and group.platform == "cpu" and engine.image.vllm != "0.23":
        yield Finding(
            f"{path}.pipelineParallelSize",
            f"{stages} needs vLLM 0.23 with accelerator.preset: cpu, but {path}.image.vllm is "
            f"{quoted(engine.image.vllm)}, whose CPU engines fail at the first step of a pipeline",
            'set it to 1, or vllm: "0.23"',
        )


def _downloads(group: Group) -> Iterator[Finding]:
    engine, path, weights = group.engine, group.path, group.model.shape.weight_bytes
    model, cache = engine.model, engine.model.cache
    if not model.path.startswith("/") and cache.type == "emptyDir":
        enough = quantity(weights * 11 // 10)
        if cache.size_limit is not None and size(cache.size_limit) < weights:
            yield Finding(
                f"{path}.model.cache.sizeLimit",
                f"{number(cache.size_limit)} holds no download of {model.path}, {bytes_text(weights)}, and kubelet "
                "would "
                "evict the pod",
                f"set {enough} or more, or null",
            )
        limit = engine.ephemeral_storage.limit
        if limit is not None and size(limit) < weights:
            yield Finding(
                f"{path}.ephemeralStorage.limit",
                f"{number(limit)} holds no download of {model.path}, {bytes_text(weights)}, into model.cache.type: "
                "emptyDir, which counts against it, and kubelet would evict the pod",
                f"set {enough} or more, or null",
            )
    if not group.uses_hub and (cache.type != "emptyDir" or cache.size_limit is not None):
        yield Finding(
            f"{path}.model.cache",
            f"type {cache.type} given, but model.path: {model.path} is a folder, and only downloads are kept there",
            "remove model.cache",
        )


def _start(group: Group) -> Iterator[Finding]:
    """Find starts that cannot end in time: such a pod is killed and restarted without end."""
    engine, lifecycle, tier = group.engine, group.engine.lifecycle, group.memory.tier
    seconds, parts = _START_SECONDS, ["30 s for Python and vLLM"]
    if on_off(lifecycle.self_check) != "off":
        seconds += lifecycle.self_check_timeout_seconds
        parts.append(
            f"up to {number(lifecycle.self_check_timeout_seconds)} s for the start-up check (selfCheckTimeoutSeconds)"
        )
    if tier > _NO_HOST_BYTES:
        by_blocks = bool(engine.offload.num_cpu_blocks)
        given = engine.offload.num_cpu_blocks if by_blocks else engine.offload.cpu_bytes
        yield Finding(
            f"{group.path}.offload.{'numCpuBlocks' if by_blocks else 'cpuBytes'}",
            f"{number(given)} given, a CPU tier of {bytes_text(tier)} for each pod, which no host's memory holds",
            f"lower it (a chunk has {bytes_text(group.memory.row)})",
        )
        tier = 0
    moved = group.model.shape.weight_bytes + tier
    if moving := math.ceil(moved / _START_BYTES_PER_SECOND):
        seconds += moving
        parts.append(f"{moving} s for weights and CPU tier ({bytes_text(moved)} at 20 GB/s)")
    if lifecycle.startup_timeout_seconds < seconds:
        yield Finding(
            f"{group.path}.lifecycle.startupTimeoutSeconds",
            f"{number(lifecycle.startup_timeout_seconds)} given, at least {number(seconds)} needed: "
            f"{', '.join(parts)}; a "
            "pod that is not ready by then is killed and restarted, again and again",
            "raise it",
        )
