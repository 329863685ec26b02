"""Rules within one group of engines: CPU tier, scaling, the environment and another KV connector. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

import msgspec

from spillway_connector.plan.copy_table import CopyTable
from spillway_connector.setting_names import PLAIN_NAMES, SettingNames
from spillway_ctl.check.chart_facts import facts
from spillway_ctl.check.finding import Finding, number
from spillway_ctl.check.group import Group, Release, driver_mounts
from spillway_ctl.check.shared_rules import behavior, is_own_pod, replica_bounds, variables
from spillway_engine.argument_verdicts import ArgumentVerdict
from spillway_engine.extra_arguments import (
    AUTO_TOOLS,
    OF_THE_CHART,
    TOOL_PARSER,
    argument_name,
    refused_arguments,
)
from spillway_engine.platform_facts import fact_contradictions, memory_contradictions
from spillway_engine.setting_rules import contradictions
from spillway_engine.tier_settings import plain_secrets
from spillway_settings.shared_names import VARIABLES
from spillway_settings.typed import WrongSetting, read_settings

OWN_VARIABLES = (
    "POD_NAME",
    "POD_IP",
    "VLLM_HOST_IP",
    "PYTHONHASHSEED",
    "HOME",
    "USER",
    "HF_HOME",
    "HF_TOKEN",
    "VLLM_API_KEY",
    VARIABLES["redisUsername"],
    VARIABLES["redisPassword"],
    VARIABLES["visibleDevices"],
)
_SET_BY_PLUGIN = {
    "npu": {
        "ASCEND_RT_VISIBLE_DEVICES": "set accelerator.visibleDevices in its place",
        "ASCEND_VISIBLE_DEVICES": "set accelerator.visibleDevices in its place",
    },
    "cuda": {"CUDA_VISIBLE_DEVICES": "remove it", "NVIDIA_VISIBLE_DEVICES": "remove it"},
    "cpu": {},
}
_OWN_VOLUMES = ("config", "shared-memory", "scratch", "model", "hub", "adapters", "kv", "secrets", "hugepages")
_SEVERAL_TIMES = ("--middleware",)


def engine_findings(group: Group, release: Release) -> Iterator[Finding]:
    yield from _cpu_tier(group)
    yield from _contradictions(group)
    yield from _scaling(group, release)
    yield from _controller(group, release)
    yield from _environment(group)
    yield from argument_findings(group)
    own = (*_OWN_VOLUMES, *(each["name"] for each in driver_mounts(group.engine)))
    yield from volume_names(group.path, group.engine.extra_volumes, own)
    yield from _kv_transfer(group)


def volume_names(path: str, volumes: list[dict[str, object]], own: tuple[str, ...]) -> Iterator[Finding]:
    """extraVolumes may not bear names of the chart's own volumes."""
    for volume in volumes:
        if volume["name"] in own:
            yield Finding(
                f"{path}.extraVolumes",
                f"{volume['name']} is the name of a volume of the chart's own",
                "choose another",
            )


def _cpu_tier(group: Group) -> Iterator[Finding]:
    offload, path, preset = group.engine.offload, f"{group.path}.offload", group.engine.accelerator.preset
    chunk_tokens = group.memory.chunk_tokens
    held = group.memory.tier // group.cores // group.memory.row * chunk_tokens
    longest = group.engine.model.max_length // chunk_tokens * chunk_tokens
    if offload.enabled and not offload.node_tier.enabled and 0 < held < longest:
        yield Finding(
            f"{path}.{'cpuBytes' if offload.cpu_bytes is not None else 'numCpuBlocks'}",
            f"a CPU tier of {held:,} tokens given, but a prompt of model.maxLength has {longest:,}, whose end "
            "would push out its beginning",
            f"give it {longest // chunk_tokens} chunks or more, or lower model.maxLength",
            is_note=True,
        )
    if offload.transport == "cpu" and group.platform != "cpu":
        yield Finding(
            f"{path}.transport",
            f"cpu cannot reach the memory of a device; accelerator.preset: {preset} needs auto",
            "set it to auto",
        )
    if offload.copy_table is not None:
        try:
            read_settings(CopyTable, msgspec.to_builtins(offload.copy_table))
        except WrongSetting as wrong:
            yield Finding(
                f"{path}.copyTable{wrong.path and '.'}{wrong.path}",
                wrong.problem,
                "write it as `make bench-copy` prints it, such as {store: [[524288, staged]], load: []}",
            )
    if offload.acl_library_path and offload.transport == "auto" and group.platform == "cpu":
        yield Finding(
            f"{path}.aclLibraryPath",
            f"{offload.acl_library_path} is read by transport: npu alone",
            "with preset: cpu name the transport too",
        )


def _contradictions(group: Group) -> Iterator[Finding]:
    """Yield what the engine service would refuse when it starts."""
    engine, shape, memory = group.engine, group.model.shape, group.memory
    wrong = (
        *contradictions(engine, PLAIN_NAMES),
        *fact_contradictions(engine, shape, group.platform, memory.chunk_tokens, PLAIN_NAMES),
        *memory_contradictions(engine, shape, memory.row, PLAIN_NAMES),
    )
    for each in wrong:
        problem = each.problem if each.value is None else f"{number(each.value)}{each.joint}{each.problem}"
        yield Finding(f"{group.path}.{each.setting}", problem, each.remedy)


def _scaling(group: Group, release: Release) -> Iterator[Finding]:
    scaling, path = group.engine.autoscaling, f"{group.path}.autoscaling"
    yield from replica_bounds(path, scaling)
    yield from behavior(f"{path}.behavior", scaling.behavior)
    if not re.search(r"^https?://[^ @]+$", scaling.prometheus_address):
        yield Finding(
            f"{path}.prometheusAddress",
            f"text of {len(scaling.prometheus_address)} characters given, an address such as "
            "http://prometheus-operated.monitoring.svc:9090, without credentials, needed",
            "correct it",
        )
    elif page := re.search(r"/(graph|query|targets|metrics|api/v1(/query)?)/*$", scaling.prometheus_address):
        yield Finding(
            f"{path}.prometheusAddress",
            f"it ends in {page[0]}, to which KEDA would append /api/v1/query",
            f"remove {page[0]}",
        )
    if scaling.enabled and is_own_pod(scaling.prometheus_address):
        yield Finding(
            f"{path}.prometheusAddress",
            "it is the own pod of KEDA's operator, which asks there, and no Prometheus is in it",
            "write the name of Prometheus' Service, such as http://prometheus-operated.monitoring.svc:9090",
        )
    if scaling.enabled and "keda.sh/v1alpha1/ScaledObject" not in release.cluster.kinds:
        yield Finding(
            f"{path}.enabled",
            "this cluster has no keda.sh/v1alpha1 ScaledObject",
            "install KEDA first (with helm template: -a keda.sh/v1alpha1/ScaledObject)",
        )
    if scaling.enabled and scaling.min_replicas == 0 and scaling.trigger != "gateway":
        yield Finding(
            f"{path}.minReplicas",
            "0 with trigger: engines never starts an engine again, as only engines report waiting requests",
            "set trigger: gateway, or minReplicas: 1",
        )
    monitoring = release.values.monitoring
    monitors = {
        "engines": ("podMonitor", monitoring.pod_monitor),
        "gateway": ("serviceMonitor", monitoring.service_monitor),
    }
    monitor, monitored = monitors[scaling.trigger]
    if scaling.enabled and not monitored.enabled:
        yield Finding(
            f"{path}.enabled",
            f"true, but monitoring.{monitor}.enabled is false, and KEDA needs what Prometheus has of the "
            f"{scaling.trigger.removesuffix('s')}s",
            f"set monitoring.{monitor}.enabled: true, unless Prometheus finds them otherwise",
            is_note=True,
        )
    if scaling.wake_timeout_seconds and not (scaling.enabled and scaling.min_replicas == 0):
        yield Finding(
            f"{path}.wakeTimeoutSeconds",
            f"{number(scaling.wake_timeout_seconds)} is about a model without a pod",
            "set autoscaling.enabled: true and minReplicas: 0, or null here",
        )


def _controller(group: Group, release: Release) -> Iterator[Finding]:
    partition = group.engine.update_strategy.partition
    if group.engine.controller != "Deployment":
        if partition and partition >= group.pods:
            yield Finding(
                f"{group.path}.updateStrategy.partition",
                f"{partition} given, but there are at most {group.pods} pods, so that none gets a change",
                f"set {max(group.pods - 1, 0)} for one canary, and 0 for all",
                is_note=True,
            )
        return
    volume = group.engine.offload.shared_tier.nvme.volume.type
    if group.uses_nvme and volume == "perPodClaim":
        yield Finding(
            f"{group.path}.controller",
            "Deployment given, whose pods have no claims of their own as nvme.volume.type: perPodClaim makes them",
            "set controller: StatefulSet, or volume.type: hostPath, emptyDir or sharedClaim",
        )
    if release.values.gateway.discovery.type == "static":
        yield Finding(
            f"{group.path}.controller",
            "Deployment given, whose pods have no names that gateway.discovery.type: static could list",
            "set gateway.discovery.type: kubernetes, or controller: StatefulSet",
        )


def _environment(group: Group) -> Iterator[Finding]:
    engine, path = group.engine, group.path
    if "PYTHONHASHSEED" in engine.extra_env:
        yield Finding(
            f"{path}.extraEnv",
            "PYTHONHASHSEED is the chart's own, equal on all engines",
            "remove it: with another value no engine finds what others stored",
        )
    if "HF_HOME" in engine.extra_env:
        yield Finding(
            f"{path}.extraEnv.HF_HOME",
            "set by the chart to the folder of model.cache, beside which a pod may write to /tmp and to "
            "extraVolumeMounts alone",
            "remove it, and choose the place of downloads by model.cache",
            is_note=True,
        )
    for name, remedy in _SET_BY_PLUGIN[group.platform].items():
        if name in group.variables:
            yield Finding(
                f"{path}.extraEnv",
                f"{name} chooses devices beside the device plugin, which gives each pod its own",
                remedy,
            )
    own = dict.fromkeys(OWN_VARIABLES, "remove it")
    if group.platform == "npu" and group.device.visible_devices == "literal":
        own["ASCEND_RT_VISIBLE_DEVICES"] = "remove it"
    yield from variables(f"{path}.extraEnvVars", engine.extra_env_vars, own)
    for variable in engine.extra_env_vars:
        if variable.name in engine.extra_env:
            yield Finding(f"{path}.extraEnvVars", f"{variable.name} is in extraEnv too", "give it once")


def _kv_transfer(group: Group) -> Iterator[Finding]:
    """Names of vLLM, and secrets among the options of another connector."""
    engine, path, transfer = group.engine, group.path, group.engine.kv_transfer
    names = facts("vllm-names.yaml")
    for known in names["connectors"].split() if not transfer.module_path else ():
        if known.lower() == transfer.connector.lower() and known != transfer.connector:
            yield Finding(
                f"{path}.kvTransfer.connector",
                f"{transfer.connector} is not how vLLM writes it",
                f"did you mean {known}?",
            )
    methods = names["quantization"].split()
    if engine.model.quantization and engine.model.quantization not in methods and group.is_chart_image:
        yield Finding(
            f"{path}.model.quantization",
            f"{engine.model.quantization} is no method of vLLM",
            "remove the line: then it is as the checkpoint says"
            if engine.model.quantization in ("none", "null", "auto")
            else f"write one of {', '.join(methods)}",
        )
    wrong, have = ("NotOfNpu", "Ascend NPUs do not have") if group.platform == "npu" else ("OfNpu", "only NPUs have")
    if engine.model.quantization in names[f"quantization{wrong}"].split():
        yield Finding(
            f"{path}.model.quantization",
            f"{engine.model.quantization} is a method that {have}, but accelerator.preset is "
            f"{engine.accelerator.preset}",
            "choose weights that are quantised for it, or remove the line: then it is as the checkpoint says",
        )
    for key in plain_secrets(transfer.extra_config):
        yield Finding(
            f"{path}.kvTransfer.extraConfig.{key}",
            "would lie in a ConfigMap in plain text",
            "give that connector its secret by a variable (extraEnvVars) or a file (extraVolumes)",
        )


def argument_findings(group: Group) -> Iterator[Finding]:
    """Find vLLM's arguments that may not be added, as the engine service has them."""
    names = SettingNames({"host": "listenAddress"}, f"{group.path}.{{path}}")
    arguments = group.engine.extra_args
    yield from findings_of(group.path, refused_arguments(arguments, names, OF_THE_CHART))
    whole = [argument for argument in arguments if "." not in argument.partition("=")[0]]  # others are merged by vLLM
    given = Counter(name for argument in whole if (name := argument_name(argument)) is not None)
    for name, times in given.items():
        if times > 1 and name not in _SEVERAL_TIMES:
            yield Finding(
                f"{group.path}.extraArgs",
                f"{name} is there {times} times, and vLLM takes the last one",
                "remove the others",
                is_note=True,
            )
    if TOOL_PARSER in given and AUTO_TOOLS not in given:
        yield Finding(
            f"{group.path}.extraArgs",
            f"{TOOL_PARSER} without {AUTO_TOOLS}, so that vLLM refuses requests whose tool_choice is auto, the default",
            f"add {AUTO_TOOLS}",
            is_note=True,
        )


def findings_of(path: str, verdicts: Iterable[ArgumentVerdict]) -> Iterator[Finding]:
    """Verdicts on the arguments of the engines at `path`, such as `engines.chat`."""
    for verdict in verdicts:
        yield Finding(f"{path}.{verdict.setting}", verdict.problem, verdict.remedy)
