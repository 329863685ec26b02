"""Keys that are no settings: what was meant, by spelling, by place and by what other charts call it. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from spillway_ctl.check.chart_facts import schema
from spillway_ctl.check.finding import Finding

# Names in other charts and in vLLM -> the name here, for each section that has it.
_ENGINE_AND_GATEWAY = {
    "replicaCount": "{section}.replicas",
    "env": "{section}.extraEnvVars",
    "extraEnv": "{section}.extraEnvVars",
    "volumes": "{section}.extraVolumes",
    "volumeMounts": "{section}.extraVolumeMounts",
    "extraContainers": "{section}.sidecars",
    "affinityPreset": "{section}.affinity",
    "labels": "{section}.podLabels",
    "annotations": "{section}.podAnnotations",
    "pdb": "{section}.podDisruptionBudget",
    "nodeselector": "{section}.nodeSelector",
    "hpa": "{section}.autoscaling",
    "imagePullSecrets": "image.pullSecrets",
    "livenessProbe": "{section}.probes, as probes.liveness",
    "readinessProbe": "{section}.probes, as probes.readiness",
    "startupProbe": "{section}.probes, as probes.startup",
    "serviceAccountName": "{section}.serviceAccount, as serviceAccount.name",
    "podMonitor": "monitoring.podMonitor",
    "serviceMonitor": "monitoring.serviceMonitor",
}
_ELSEWHERE: dict[str, dict[str, str]] = {
    "engine": {
        "args": "engine.extraArgs",
        "command": "engine.extraArgs",
        "vllmArgs": "engine.extraArgs",
        "resources": "engine.memory.limit, engine.cpu and engine.accelerator",
        "model.name": "engine.model.path, or engine.model.servedName for the name that clients use",
        "accelerator.type": "engine.accelerator.preset",
        "model.hfToken": "engine.model.hubTokenSecret",
        "model.maxModelLen": "engine.model.maxLength",
        "tensorParallel": "engine.tensorParallelSize",
        "maxModelLen": "engine.model.maxLength",
        "shm": "engine.memory.sharedMemory",
        "shmSize": "engine.memory.sharedMemory",
        "gpuMemoryUtilization": 'engine.extraArgs: ["--gpu-memory-utilization=0.9"]',
        "gpu": "engine.accelerator",
        "requestGPU": "engine.accelerator.count",
        "requestCPU": "engine.cpu.request",
        "requestMemory": "engine.memory.limit",
        "limitMemory": "engine.memory.limit",
        "vllmConfig": "engine.model, engine.tensorParallelSize and engine.extraArgs",
        "lmcacheConfig": "engine.offload",
        "modelSpec": "engine.model, or engines for several models",
        "modelURL": "engine.model.path",
        "hf_token": "engine.model.hubTokenSecret",
        "pvcStorage": "engine.model.cache, or engine.model.volume",
        "storageUri": "engine.model.path",
        "model.storageUri": "engine.model.path",
        "model.hubToken": "engine.model.hubTokenSecret, the name of a Secret that holds it",
        "minReplicas": "engine.autoscaling.minReplicas",
        "maxReplicas": "engine.autoscaling.maxReplicas",
        "scaleMetric": "engine.autoscaling.trigger",
        "terminationGracePeriodSeconds": "engine.lifecycle, from which it is computed",
        "platform": "engine.accelerator.preset",
        "lora.enabled": "engine.lora.adapters, which turn LoRA on",
        "gateway": "gateway, at the left margin",
        "offload.sharedTier.volume": "engine.offload.sharedTier.nvme.volume",
        "offload.sharedTier.enabled": "engine.offload.sharedTier.type, which is none without a shared tier",
        "offload.nodeTier.size": "engine.offload.nodeTier.bytes",
        "offload.sharedTier.nvme.storageClass": "engine.offload.sharedTier.nvme.volume.storageClassName",
        "memory.request": "engine.memory.limit, which the pod requests too",
        "persistence": "engine.model.cache, or engine.offload.sharedTier.nvme.volume for KV",
        "podDisruptionBudget.minAvailable": "engine.podDisruptionBudget.maxUnavailable, pods that may be away",
        "autoscaling.targetCPUUtilizationPercentage": "engine.autoscaling.waitingPerReplica",
        "model.hubTokenSecret.secretName": "engine.model.hubTokenSecret.name",
        "offload.sharedTier.path": "engine.offload.sharedTier.nvme.path",
        "offload.sharedTier.url": "engine.offload.sharedTier.redis.url",
        "offload.sharedTier.redis.host": "engine.offload.sharedTier.redis.url: redis://HOST:6379/0",
        "offload.sharedTier.s3.accessKeyId": "engine.offload.sharedTier.s3.existingSecret",
        "offload.sharedTier.s3.secretAccessKey": "engine.offload.sharedTier.s3.existingSecret",
        "offload.sharedTier.redis.password": "engine.offload.sharedTier.redis.existingSecret",
    },
    "gateway": {
        "args": "the sections of gateway, as the gateway takes no arguments",
        "command": "the sections of gateway, as the gateway takes no arguments",
        "apiKey": "gateway.auth.keysSecret",
        "auth.enabled": "gateway.auth.keysSecret and gateway.auth.saltSecret, which turn keys on",
        "autoscaling.targetCPUUtilizationPercentage": "gateway.autoscaling.cpuPercent",
        "logLevel": "gateway.log.level",
        "tls.enabled": "gateway.tls.secret, whose name turns TLS on",
        "podDisruptionBudget.minAvailable": "gateway.podDisruptionBudget.maxUnavailable, pods that may be away",
        "auth.keys": "gateway.auth.keysSecret, the name of a Secret that holds them",
        "tls.secretName": "gateway.tls.secret.name",
        "ingress.hostname": "gateway.ingress.host",
        "ingress.extraHosts": "gateway.ingress.hosts",
        "terminationGracePeriodSeconds": "gateway.lifecycle, from which it is computed",
        "engine": "engine, at the left margin",
        "tracing.enabled": "gateway.tracing.otlpEndpoint, which turns traces on",
    },
    "redis": {
        "password": "redis.existingSecret, the name of a Secret that holds it",
        "resources": "redis.memory and redis.cpu",
        "auth": "redis.existingSecret",
        **dict.fromkeys(
            ("architecture", "master", "replica", "replicas", "sentinel", "cluster", "persistence"),
            "a Redis of your own by engine.offload.sharedTier.redis.url, as this one is a single cache for trials",
        ),
    },
    "checks": {"enabled": "checks.hook"},
    "monitoring": {
        f"{kind}.{key}": f"monitoring.{kind}.{ours}"
        for kind in ("podMonitor", "serviceMonitor")
        for key, ours in {"interval": "intervalSeconds", "additionalLabels": "labels"}.items()
    },
    "image": dict.fromkeys(
        ("repository", "tag", "digest", "name"), "engine.image, gateway.image, redis.image or checks.image"
    ),
    "": {
        "replicaCount": "engine.replicas and gateway.replicas",
        "replicas": "engine.replicas and gateway.replicas",
        "imagePullSecrets": "image.pullSecrets",
        "podSecurityContext": "engine.podSecurityContext and gateway.podSecurityContext",
        "securityContext": "engine.securityContext and gateway.securityContext",
        "resources": "gateway.resources, and engine.memory and engine.cpu",
        "nodeSelector": "engine.nodeSelector and gateway.nodeSelector",
        "tolerations": "engine.tolerations and gateway.tolerations",
        "ingress": "gateway.ingress",
        "service": "gateway.service",
        "autoscaling": "engine.autoscaling and gateway.autoscaling",
        "serviceAccount": "engine.serviceAccount and gateway.serviceAccount",
        "env": "engine.extraEnv and gateway.extraEnvVars",
        "args": "engine.extraArgs",
        "extraArgs": "engine.extraArgs",
        "prometheus": "monitoring",
        "metrics": "monitoring.serviceMonitor and monitoring.podMonitor",
        "persistence": "engine.model.cache, or engine.offload.sharedTier.nvme.volume for KV",
        "gpu": "engine.accelerator",
        "servingEngineSpec": "engine, or engines for several models",
        "routerSpec": "gateway",
        "model": "engine.model",
        "logLevel": "gateway.log.level",
        "cacheserverSpec": "engine.offload.sharedTier",
        "modelArtifacts": "engine.model",
        "predictor": "engine",
        "inferencePool": "gateway.picker",
        "inferenceExtension": "gateway",
        "valkey": "redis",
        **dict.fromkeys(("decode", "prefill"), "engine, as an entry of engines"),
    },
}
_CLOSE = 0.72  # of difflib: rarely another word
_WORD_LETTERS = 3  # a longer key at the end of another one is meant: `name` by secretName
_SETTINGS_OF_A_LEVEL = 0.5  # so many of a map's keys are settings at the root if it is a wrapper chart's level
_KEYS_SHOWN = 12


def unknown_key(path: str, key: str, value: Any, node: Mapping[str, Any]) -> Finding:
    """The refusal of a key.

    Args:
        path: the section that the key stands in; empty for the root.
        key: what was given.
        value: what lies below it.
        node: the section's schema.
    """
    at = f"{path}.{key}" if path else key
    known = sorted(node.get("properties", {}))
    if not known:  # of a map whose keys have a form
        described = node.get("description", "").rpartition("keys are each ")[2].rstrip(".")
        return Finding(at, f"the key {key!r} given, {described or 'another key'} needed", "correct it")
    roots = schema()["properties"]
    if not path and isinstance(value, dict) and value:
        settings = [inner for inner in value if inner in roots]
        if len(settings) >= _SETTINGS_OF_A_LEVEL * len(value):
            return Finding(
                at,
                f"no setting, but {', '.join(settings)} below it are: so a chart gives values to its part {key}",
                f"remove the level, or read these values as that part's: spillway check --part {key}",
            )
    if key == "engine" and re.fullmatch(r"engines\.[^.]+", path):
        return Finding(at, "no such setting here", f"write what is below it directly into {path}")
    if elsewhere := _elsewhere(path, key):
        return Finding(at, "no such setting", f"use {elsewhere}")
    plain = {name.lower(): name for name in known}
    near = difflib.get_close_matches(key.lower().replace("_", "").replace("-", ""), plain, n=1, cutoff=_CLOSE)
    near = near or [name for name in plain if len(name) > _WORD_LETTERS and key.lower().endswith(name)]
    if near:
        return Finding(at, "no such setting", f"did you mean {path + '.' if path else ''}{plain[near[0]]}?")
    section = _section(path)
    moved = sorted({place for place in _places(key.lower()) if _is_near(place, section)}, key=len)
    if moved:
        named = " or ".join(_of_section(place, path) for place in moved[:3])
        return Finding(at, "no such setting here", f"did you mean {named}?")
    if value is None and key[:1].isdigit():
        return Finding(
            at, "no such setting", "put the value before it in quotes, as a comma ends it, or write 1.5 for 1,5"
        )
    if not path and isinstance(value, Mapping):
        return Finding(
            at,
            "no such setting",
            f"remove it, or call it x-{re.sub(r'^x?[_.-]+', '', key)} if it is your own, such as a YAML anchor",
        )
    listed = ", ".join(known) if len(known) <= _KEYS_SHOWN else ", ".join([*known[:_KEYS_SHOWN], "..."])
    return Finding(at, "no such setting", f"remove it; known here: {listed}")


def _section(path: str) -> str:
    return "engine" if path.split(".", maxsplit=1)[0] == "engines" else path.split(".", maxsplit=1)[0]


def _elsewhere(path: str, key: str) -> str | None:
    section = _section(path)
    within = path.split(".")[2:] if path.startswith("engines.") else path.split(".")[1:]
    place = ".".join([*within, key])
    names = dict(_ELSEWHERE.get(section, {}))
    if not within and section in ("engine", "gateway", "redis"):
        known = schema()["definitions"]["engine"] if section == "engine" else schema()["properties"][section]
        for name, target in _ENGINE_AND_GATEWAY.items():
            last = target.removeprefix("{section}.").split(",")[0]
            if last in known["properties"] or not target.startswith("{"):
                names.setdefault(name, target.format(section=section))
    found = names.get(place)
    return _of_section(found, path) if found is not None else None


def _of_section(place: str, path: str) -> str:
    """`engine.x` as the entry of `engines` that the path is in has it."""
    if not path.startswith("engines."):
        return place
    return place.replace("engine.", f"engines.{path.split('.')[1]}.")


def _is_near(place: str, section: str) -> bool:
    """A key of the root may have been meant for any section; others for their own."""
    return section == "" or place.split(".", maxsplit=1)[0] == section


@cache
def _all_places() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    root = schema()
    for place in _walk({**root["properties"], "engine": root["definitions"]["engine"]}, ""):
        found.setdefault(place.rsplit(".", 1)[-1].lower(), []).append(place)
    return found


def _places(key: str) -> list[str]:
    if key in ("type", "name", "path", "enabled", "key", "mode"):  # of many sections
        return []
    return _all_places().get(key, [])


def _walk(properties: Mapping[str, Any], above: str) -> Iterator[str]:
    for key, node in properties.items():
        if key in ("engines", "global"):
            continue
        place = f"{above}.{key}" if above else key
        yield place
        yield from _walk(node.get("properties", {}), place)
