"""No value is accepted and ignored: changing any leaf of values.yaml changes what is rendered.

A leaf that means something only together with others is changed on top of those, which CONTEXTS names.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart.rendering import CHART, digests_of_many, laid_over, nested, pod_spec, render, require_valid

VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
OBJECT = {"some": "thing"}

# Everything on that can be on together.
RICH = yaml.safe_load("""
engine:
  model:
    path: /models/Qwen3-8B
    volume: {type: existingClaim, claimName: models}
    hubTokenSecret: {name: hub}
  offload:
    sharedTier:
      type: redis
      redis:
        url: "rediss://r:6379/0"
        existingSecret: {name: cache, usernameKey: user}
        tls: {caSecret: {name: ca}, clientSecret: {name: client}}
      encryption: {enabled: true, keyId: "2026", keySecretName: kv-key}
  apiKeySecret: {name: keys}
  topologySpread: {enabled: true}
gateway:
  auth:
    keysSecret: {name: keys}
    saltSecret: {name: salt}
    engineKeySecret: {name: engine-key}
    sharedLimits: {url: "rediss://r:6379/1", existingSecret: {name: limits, usernameKey: user}, caSecret: {name: ca}}
  opsPort: 9001
  tls: {secret: {name: certificate}}
  audit: {enabled: true, file: /var/log/audit/lines.jsonl}
  extraVolumes: [{name: audit, emptyDir: {}}]
  extraVolumeMounts: [{name: audit, mountPath: /var/log/audit}]
  ingress: {enabled: true, host: a.example, tlsSecret: tls}
  service: {annotations: {example.com/backend-protocol: HTTPS}}
  httpRoute: {enabled: true, parentRefs: [{name: public}]}
  picker: {enabled: true}
networkPolicy:
  restrictEgress: true
  engineFrom: [{podSelector: {matchLabels: {app: proxy}}}]
  gatewayFrom: [{podSelector: {}}]
  engineEgress: [{to: [{podSelector: {}}]}]
  gatewayEgress: [{to: [{podSelector: {}}]}]
monitoring:
  podMonitor: {enabled: true}
  serviceMonitor: {enabled: true}
  alerts: {enabled: true}
  dashboards: {enabled: true}
tests: {apiKeySecret: {name: client}}
""")

LORA = nested("engine.lora.adapters", [{"name": "a", "path": "/adapters/deeper/a"}])
RESOLVER = nested("engine.lora", {"runtimeUpdating": True, "volume": {"type": "existingClaim", "claimName": "c"}})
HUB = nested("engine.model", {"path": "Qwen/Qwen3-8B", "volume": {"type": "none", "claimName": ""}})
# What another choice of tier, volume or model would leave unread is refused, so it has to go.
NO_REDIS = nested(
    "engine.offload.sharedTier.redis",
    {
        "url": "",
        "existingSecret": {"name": "", "usernameKey": ""},
        "tls": {"caSecret": {"name": ""}, "clientSecret": {"name": ""}},
    },
)
NO_CLAIM = nested("engine.model.volume.claimName", "")
NVME = laid_over(NO_REDIS, nested("engine.offload.sharedTier.type", "nvme"))
S3 = laid_over(NO_REDIS, nested("engine.offload.sharedTier", {"type": "s3", "s3": {"bucket": "kv-cache"}}))
BELOW = laid_over(
    NO_REDIS,
    nested("engine.offload.sharedTier", {"type": "nvme", "below": {"type": "s3"}, "s3": {"bucket": "kv-cache"}}),
)
S3_SECRET = laid_over(S3, nested("engine.offload.sharedTier.s3.existingSecret.name", "kv-s3"))
S3_CA = laid_over(S3, nested("engine.offload.sharedTier.s3.caSecret.name", "kv-ca"))
EMBEDDED = laid_over(NO_REDIS, nested("redis", {"enabled": True, "existingSecret": {"name": "valkey"}}))
UNSEALED = {"enabled": False, "keyId": "", "keySecretName": ""}
ON_CPU = nested("engine.accelerator.preset", "cpu")


def nvme_volume(kind: str) -> dict[str, Any]:
    return laid_over(NVME, nested("engine.offload.sharedTier.nvme.volume.type", kind))


# Path or its beginning -> what has to be set for it to matter. The longest match counts.
CONTEXTS: dict[str, dict[str, Any]] = {
    "engine.model.shape.weightBytes": ON_CPU,
    "engine.model.shape.draftLayers": nested("engine.extraArgs", ["--speculative-config.method=eagle"]),
    "engine.model.volume.hostPath": nested(
        "engine.model.volume", {"type": "hostPath", "hostPath": "/data", "claimName": ""}
    ),
    "engine.model.volume.nfs": nested(
        "engine.model.volume", {"type": "nfs", "nfs": {"server": "s", "path": "/p"}, "claimName": ""}
    ),
    "engine.model.cache": HUB,
    "engine.model.cache.claimName": laid_over(
        HUB, nested("engine.model.cache", {"type": "existingClaim", "claimName": "c"})
    ),
    "engine.model.cache.hostPath": laid_over(HUB, nested("engine.model.cache", {"type": "hostPath", "hostPath": "/c"})),
    "engine.kvTransfer": nested("engine.kvTransfer.connector", "NixlConnector"),
    "engine.kvTransfer.connector": {},
    "engine.lora.adapters": {},
    "engine.lora": laid_over(LORA, nested("engine.lora.volume", {"type": "existingClaim", "claimName": "c"})),
    "engine.lora.volume.hostPath": laid_over(
        LORA, nested("engine.lora.volume", {"type": "hostPath", "hostPath": "/a"})
    ),
    "engine.lora.aliases": nested("engine.lora.runtimeUpdating", True),
    "engine.lora.resolverFolder": RESOLVER,
    "engine.lora.resolverNames": laid_over(RESOLVER, nested("engine.lora.resolverFolder", "/adapters")),
    "engine.lora.volume.nfs": laid_over(
        LORA, nested("engine.lora.volume", {"type": "nfs", "nfs": {"server": "s", "path": "/p"}})
    ),
    "engine.accelerator.visibleDevices.value": nested(
        "engine.accelerator.visibleDevices", {"mode": "literal", "value": "0"}
    ),
    "engine.accelerator.npuSmiPath": nested("engine.accelerator.driverMounts", True),
    "engine.accelerator.memoryMiB": nested("engine.accelerator.preset", "hami"),
    "engine.hugePages": nested("engine.hugePages.amount", "4GiB"),
    "gateway.discovery.podDeletionCostSeconds": nested("engine.controller", "Deployment"),
    "engine.podDisruptionBudget.maxUnavailable": nested("engine.replicas", 3),  # all at once would be refused
    "engine.offload.copyTable": nested("engine.accelerator.preset", "cuda"),
    "engine.offload.cpuBytes": nested("engine.offload", {"numCpuBlocks": None, "cpuBytes": "20GiB"}),
    "engine.offload.enabled": laid_over(
        NO_REDIS, nested("engine.offload.sharedTier", {"type": "none", "encryption": UNSEALED})
    ),
    "engine.offload.nodeTier": nested("engine.offload.nodeTier.enabled", True),
    "engine.offload.nodeTier.enabled": {},
    "engine.offload.sharedTier.nvme": NVME,
    "engine.offload.sharedTier.below": BELOW,
    "engine.offload.sharedTier.s3": S3,
    "engine.offload.sharedTier.s3.existingSecret": S3_SECRET,
    "engine.offload.sharedTier.s3.caSecret": S3_CA,
    "engine.offload.sharedTier.nvme.volume.size": nvme_volume("sharedClaim"),
    "engine.offload.sharedTier.nvme.volume.storageClassName": nvme_volume("perPodClaim"),
    "engine.offload.sharedTier.nvme.volume.claimName": laid_over(
        nvme_volume("existingClaim"), nested("engine.offload.sharedTier.nvme.volume.claimName", "kv")
    ),
    "engine.memory.pageCache": NVME,
    "engine.memory.force": nested("engine.memory.limit", "20GiB"),
    "engine.autoscaling": nested("engine.autoscaling.enabled", True),
    **{
        f"engine.autoscaling.{key}": nested(
            "engine.autoscaling", {"enabled": True, "minReplicas": 0, "trigger": "gateway"}
        )
        for key in ("requestsPerReplica", "wakeTimeoutSeconds")
    },
    "engine.autoscaling.enabled": {},
    "gateway.audit.enabled": nested("gateway.audit.file", None),
    "gateway.autoscaling": nested("gateway.autoscaling.enabled", True),
    "gateway.autoscaling.enabled": {},
    "gateway.continuation": nested("gateway.continuation.enabled", True),
    "gateway.continuation.enabled": {},
    "gateway.podDisruptionBudget.maxUnavailable": nested("gateway.replicas", 3),
    "gateway.service.nodePort": nested("gateway.service.type", "NodePort"),
    "gateway.service.externalTrafficPolicy": nested("gateway.service.type", "NodePort"),
    "gateway.service.loadBalancerClass": nested("gateway.service.type", "LoadBalancer"),
    "gateway.service.loadBalancerSourceRanges": nested("gateway.service.type", "LoadBalancer"),
    "gateway.tracing": nested("gateway.tracing.otlpEndpoint", "http://receiver:4318/v1/traces"),
    "gateway.tracing.otlpEndpoint": {},
    "engine.extraVolumeMounts": nested("engine.extraVolumes", [{"name": "v", "emptyDir": {}}]),
    "gateway.extraVolumes": nested("gateway", {"audit": {"file": None}, "extraVolumeMounts": []}),
    "gateway.extraVolumeMounts": nested(
        "gateway",
        {"audit": {"file": None}, "extraVolumes": [{"name": name, "emptyDir": {}} for name in ("audit", "v")]},
    ),
    "monitoring.serviceMonitor.enabled": nested("monitoring.alerts.enabled", False),  # alerts need its series
    "redis.extraVolumeMounts": laid_over(EMBEDDED, nested("redis.extraVolumes", [{"name": "v", "emptyDir": {}}])),
    "redis": EMBEDDED,
    "redis.enabled": laid_over(EMBEDDED, nested("redis.enabled", False)),
}

# What a leaf is changed to, where its present value does not suggest it.
CHANGES: dict[str, Any] = {
    "image.pullSecrets": [{"name": "other"}],
    "image.pullPolicy": "Always",
    "listenAddress": "::",
    "engine.model.path": "/models/Qwen3-4B",
    "engine.model.aliases": ["other"],
    "engine.model.dtype": "float32",
    "engine.model.kvCacheDtype": "fp8",
    "engine.model.quantization": "awq",
    "engine.lora.adapters": [{"name": "a", "path": "owner/a"}],
    "engine.accelerator.visibleDevices.value": "1",
    "engine.lora.aliases": [{"name": "latest", "adapter": "a"}],
    "engine.lora.resolverFolder": "/adapters/deeper",
    "engine.lora.resolverNames": ["team-*"],
    "engine.lora.maxRank": 8,
    "engine.lora.maxInMemory": 3,
    "engine.lora.volume.type": "image",
    "engine.lora.volume.mountPath": "/adapters/deeper",
    "engine.model.shape.preset": "qwen3-14b",
    "engine.model.shape.dtype": "float16",
    "engine.model.shape.weightBytes": "20GiB",
    "engine.model.shape.layers": 40,
    "engine.model.shape.slidingLayers": 20,
    "engine.model.shape.kvHeads": 4,
    "engine.model.shape.headDim": 64,
    "engine.model.shape.latentDim": 576,
    "engine.model.shape.draftLayers": 2,
    "engine.model.volume.type": "nfs",
    "engine.model.volume.mountPath": "/models/Qwen3-8B",
    "engine.model.cache.type": "hostPath",
    "engine.model.cache.sizeLimit": "50GiB",
    "engine.model.tokenizer": "volume",
    "engine.accelerator.preset": "cce",
    "engine.accelerator.resourceName": "huawei.com/Ascend910B4",
    "engine.accelerator.count": 4,
    "engine.accelerator.visibleDevices.mode": "unset",
    "engine.accelerator.extraResources": {"rdma/hca": 1},
    "engine.accelerator.versionCheck": "warn",
    "engine.accelerator.cpuBinding": "off",
    "engine.accelerator.hccl.basePort": 50000,
    "engine.accelerator.hccl.devicePorts": "16666-16697",
    "engine.accelerator.hccl.connectTimeoutSeconds": 600,
    "engine.accelerator.hccl.executeTimeoutSeconds": 600,
    "engine.accelerator.hccl.bufferMiB": 400,
    "engine.accelerator.memoryMiB": 16384,
    "engine.hugePages.amount": "2GiB",
    "engine.hugePages.pageSize": "1Gi",
    "engine.ephemeralStorage.request": "1GiB",
    "engine.ephemeralStorage.limit": "1GiB",
    "engine.dnsPolicy": "Default",
    "engine.allowedMediaDomains": ["images.example.com"],
    "engine.autoscaling.trigger": "gateway",
    "engine.autoscaling.wakeTimeoutSeconds": 60,
    "engine.blockSize": 256,
    "engine.deviceBlocks": 4000,
    "engine.offload.numCpuBlocks": 4096,
    "engine.offload.cpuBytes": "10GiB",
    "engine.offload.generatedTokens": "off",
    "engine.offload.storing": "eager",
    "engine.offload.queueOrder": "arrival",
    "engine.offload.queueOvertakeSeconds": 2.5,
    "engine.offload.layerwiseLoads": "on",
    "engine.offload.computeWhileLoading": "on",
    "engine.offload.fairSteps": "on",
    "engine.offload.windowChunks": "all",
    "engine.offload.evictionPolicy": "arc",
    "engine.offload.batchMemcpy": "on",
    "engine.offload.nodeTier.bytes": "65GiB",
    "engine.offload.nodeTier.fallback": "refuse",
    "engine.offload.nodeTier.floor": 0.2,
    "engine.offload.sharedTier.type": "nvme",
    "engine.offload.sharedTier.nvme.path": "/kv",
    "engine.offload.sharedTier.below.type": "redis",
    "engine.offload.sharedTier.s3.bucket": "other-bucket",
    "engine.offload.sharedTier.s3.prefix": "chat/",
    "engine.offload.sharedTier.s3.endpoint": "https://store:9000",
    "engine.offload.sharedTier.nvme.maxBytes": "100GiB",
    "engine.offload.sharedTier.nvme.volume.type": "emptyDir",
    "engine.offload.sharedTier.nvme.volume.hostPath": "/other",
    "engine.offload.sharedTier.nvme.volume.size": "700GiB",
    "engine.offload.sharedTier.nvme.volume.storageClassName": "fast",
    "engine.offload.sharedTier.nvme.mode": "slab",
    "engine.offload.sharedTier.nvme.ttlSeconds": 3600,
    "engine.offload.sharedTier.nvme.tenantMaxBytes": "10GiB",
    "engine.offload.sharedTier.nvme.pageCache": "off",
    "engine.offload.sharedTier.redis.url": "rediss://other:6379/0",
    "engine.offload.sharedTier.redis.existingSecret.passwordAs": "env",
    "engine.offload.sharedTier.redis.tenantMaxBytes": "10GiB",
    "engine.offload.sharedTier.loadQueueBytesMax": "9GiB",
    "engine.offload.sharedTier.storeQueueBytesMax": "9GiB",
    "engine.offload.prefillTokensPerSecond": 9000,
    "engine.offload.transport": "npu",
    "engine.offload.aclLibraryPath": "/emulator/libascendcl.so",
    "engine.offload.weightsVersion": "step 7",
    "engine.offload.copyTable": {"store": [[65536, "staged"]]},
    "engine.offload.extraTiers": [{"type": "fs", "root_dir": "/x"}],
    "engine.kvTransfer.modulePath": "a.connector",
    "engine.kvTransfer.role": "kv_producer",
    "engine.kvTransfer.extraConfig": {"a": "b"},
    "engine.memory.limit": "200GiB",
    "engine.memory.sharedMemory": "100GiB",
    "engine.memory.processPerRank": "10GiB",
    "engine.memory.pageCache": "4GiB",
    "engine.cpu.limit": "16",
    "engine.lifecycle.selfCheck": "off",
    "engine.lifecycle.selfCheckText": "Alle Menschen werden Brüder.",
    "engine.image.vllm": "0.32",
    "engine.image.variant": "openeuler",
    "engine.image.digest": "sha256:" + "a" * 64,
    "engine.image.registry": "other.example",
    "engine.schedulerName": "default-scheduler",
    "engine.controller": "Deployment",
    "engine.podSecurityContext": {"fsGroup": 1},
    "engine.securityContext": {"privileged": False},
    "gateway.securityContext": {"privileged": False},
    "gateway.timeouts.plainSeconds": 800,
    "engine.extraArgs": ["--enforce-eager"],
    "engines": {"a": {"replicas": 1}},
    "gateway.service.type": "LoadBalancer",
    "gateway.service.annotations": {"A": "b"},
    "gateway.service.nodePort": 30000,
    "gateway.service.ipFamilyPolicy": "SingleStack",
    "gateway.service.ipFamilies": ["IPv6"],
    "gateway.service.externalTrafficPolicy": "Local",
    "gateway.service.loadBalancerSourceRanges": ["10.0.0.0/8"],
    "gateway.limits.bodyBytesMax": "1MiB",
    "gateway.limits.bodiesBytesMax": "128MiB",
    "gateway.limits.plainReplyBufferBytes": "1MiB",
    "gateway.limits.repliesBytesMax": "64MiB",
    "gateway.index.bytesMax": "1MiB",
    "gateway.continuation.bytesMax": "1MiB",
    "gateway.disaggregation.mode": "always",
    "gateway.disaggregation.handOver": "connector",
    "gateway.disaggregation.tokenMsMax": 20,
    "engine.role": "decode",
    "gateway.connections.headBytesMax": "1MiB",
    "gateway.connections.targetBytesMax": "1MiB",
    "gateway.connections.bodyBytesPerSecondMin": "1MiB",
    "gateway.routing.boundedLoadFactor": 2,
    "gateway.auth.unsaltedRoutes": "allow",
    "gateway.auth.kvTransferTenants": ["router"],
    "gateway.cors.origins": ["https://chat.example.com"],
    "gateway.cors.methods": ["POST"],
    "gateway.cors.headers": ["authorization"],
    "gateway.routing.sharedStoreTokensPerSecond": 90000,
    "gateway.health.endingSeconds": 30,
    "gateway.discovery.type": "static",
    "gateway.auth.sharedLimits.url": "rediss://other:6379/1",
    "gateway.tracing.otlpEndpoint": "http://collector:4318/v1/traces",
    "gateway.tracing.sampleRatio": 0.5,
    "gateway.log.level": "debug",
    "gateway.resources.requests.memory": "1.5GiB",
    "gateway.resources.limits.memory": "3GiB",
    "gateway.resources.limits.cpu": "4",
    "gateway.resources.requests.ephemeralStorage": "1GiB",
    "gateway.resources.limits.ephemeralStorage": "1GiB",
    "gateway.ingress.hosts": [{"host": "b.example"}],
    "gateway.ingress.tls": [{"secretName": "b"}],
    "monitoring.alerts.runbookBaseUrl": "https://docs.example.com/operations",
    "gateway.ingress.path": "/llm",
    "gateway.httpRoute.parentRefs": [{"name": "other"}],
    "gateway.httpRoute.hostnames": ["h.example"],
    "gateway.httpRoute.requestTimeoutSeconds": 3600,
    "gateway.image.registry": "other.example",
    "gateway.image.digest": "sha256:" + "a" * 64,
    "checks.image.digest": "sha256:" + "a" * 64,
    "redis.image.digest": "sha256:" + "a" * 64,
    "redis.image.registry": "other.example",
    "checks.image.registry": "other.example",
    "redis.securityContext": {"privileged": False},
    "redis.memory": "4GiB",
    "redis.cpu.limit": "4",
    "networkPolicy.gatewayFrom": [{"namespaceSelector": {}}],
    "networkPolicy.engineFrom": [{"namespaceSelector": {}}],
}
LISTS = {
    "initContainers": [{"name": "i", "image": "i:1"}],
    "sidecars": [{"name": "s", "image": "s:1"}],
    "prometheusFrom": [{"podSelector": {}}],
    "engineEgress": [{"to": [{"namespaceSelector": {}}]}],
    "gatewayEgress": [{"to": [{"namespaceSelector": {}}]}],
    "extraEnvVars": [{"name": "A", "value": "b"}],
    "envFrom": [{"secretRef": {"name": "s"}}],
    "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}],
    "hostAliases": [{"ip": "10.0.0.5", "hostnames": ["r.local"]}],
    "filters": [{"type": "RequestMirror"}],
    "disabled": ["SpillwayGatewayDown"],
    "tolerations": [{"operator": "Exists"}],
    "topologySpreadConstraints": [{"topologyKey": "rack", "maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule"}],
    "extraMetrics": [
        {"type": "Pods", "pods": {"metric": {"name": "m"}, "target": {"type": "AverageValue", "averageValue": "1"}}}
    ],
    "relabelings": [{"action": "labeldrop", "regex": "pod"}],
    "metricRelabelings": [{"action": "labeldrop", "regex": "pod"}],
    "extraVolumes": [{"name": "v", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "v", "mountPath": "/v"}],
    "extraObjects": [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x"}}],
}
MAPS = {"dnsConfig": {"nameservers": ["10.0.0.10"]}, "behavior": {"scaleUp": {"stabilizationWindowSeconds": 60}}}
OTHER_WORDS = {"whenUnsatisfiable": "DoNotSchedule", "pullPolicy": "Always", "pathType": "Exact"}


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict) and tree and path.rsplit(".", 1)[-1] not in ("podSecurityContext", "securityContext"):
        for key, value in tree.items():
            yield from leaves(value, f"{path}.{key}" if path else key)
    else:
        yield path, tree


def changed(path: str, value: Any) -> Any:
    leaf = path.rsplit(".", 1)[-1]
    if path in CHANGES:
        return CHANGES[path]
    if leaf in OTHER_WORDS:
        return OTHER_WORDS[leaf]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value / 2
    if isinstance(value, str):
        return str(int(value) + 1) if value.isdigit() else f"{value}x"
    if isinstance(value, list):
        return LISTS.get(leaf, [OBJECT])
    if leaf == "affinity":
        return {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
    if leaf in MAPS:
        return MAPS[leaf]
    if isinstance(value, dict):
        return {**value, "fsGroup": 7} if value else {"A": "b"}
    raise AssertionError(f"{path}: {value!r} needs an entry in CHANGES")


def context_of(path: str) -> dict[str, Any]:
    fitting = [key for key in CONTEXTS if path == key or path.startswith(f"{key}.")]
    return CONTEXTS[max(fitting, key=len)] if fitting else {}


# Refused with the values that it matters to unless it is on (test_mistakes.py).
APART = ("engine.memory.force",)
SHARES = 4  # which several processes may render


@pytest.mark.parametrize("share", range(SHARES))
def test_changing_a_leaf_changes_the_render(share: int, tmp_path: Path) -> None:
    cases: dict[str, dict[str, Any]] = {}
    before = {}
    for path, value in [leaf for leaf in leaves(VALUES) if leaf[0] not in APART][share::SHARES]:
        base = laid_over(RICH, context_of(path))
        cases[path] = laid_over(base, change_of(path, value, base))
        before[path] = hashlib.sha256(json.dumps(base, sort_keys=True).encode()).hexdigest()
        cases[before[path]] = base

    hashes = digests_of_many(cases, tmp_path / "spillway")

    assert len(before) > 100
    assert [path for path in before if hashes[path] == hashes[before[path]]] == []


def change_of(path: str, value: Any, base: dict[str, Any]) -> dict[str, Any]:
    change = nested(path, changed(path, present(base, path, value)))
    if path == "engine.model.volume.type":
        change = laid_over(change, nested("engine.model.volume.nfs", {"server": "s", "path": "/p"}), NO_CLAIM)
    if path == "engine.offload.sharedTier.type":
        change = laid_over(change, NO_REDIS)
    if path == "engine.offload.sharedTier.encryption.enabled":  # what is off names no key
        change = laid_over(change, nested("engine.offload.sharedTier.encryption", UNSEALED))
    if path == "engine.model.cache.type":
        change = laid_over(change, nested("engine.model.cache.hostPath", "/c"))
    return change


def present(values: dict[str, Any], path: str, default: Any) -> Any:
    """Return the value at the path, or the chart's default if `values` have none."""
    here: Any = values
    for key in path.split("."):
        if not isinstance(here, dict) or key not in here:
            return default
        here = here[key]
    return here


# Names that other parts of the values must agree with, or that have a form of their own.
FORMED = (
    "gateway.continuation.bytesMax",
    "engine.autoscaling.trigger",
    *("gateway.serviceAccount.name", "redis.serviceAccount.name"),  # one account is made once
    "gateway.tls.secret.privateKeyKey",
    *("nameOverride", "fullnameOverride", "namespaceOverride", "engine.autoscaling.prometheusAddress"),
    *(
        "engine.model.cache.claimName",
        "redis.existingSecret.name",
        "engine.model.cache.hostPath",
        "engine.model.volume.hostPath",
        "engine.model.volume.nfs",
    ),
    *("listenAddress", "image.pullPolicy", "engine.model.path", "engine.model.dtype", "engine.model.tokenizer"),
    *(
        "engine.model.volume.type",
        "engine.model.volume.mountPath",
        "engine.model.cache.type",
        "engine.accelerator.preset",
    ),
    *("engine.accelerator.npuSmiPath", "engine.accelerator.versionCheck"),
    *("engine.accelerator.cpuBinding", "engine.accelerator.hccl", "engine.hugePages"),
    *("engine.accelerator.visibleDevices.value", "engine.offload.generatedTokens"),
    *("engine.offload.layerwiseLoads", "engine.offload.computeWhileLoading", "engine.offload.fairSteps"),
    *(
        "engine.offload.storing",
        "engine.offload.queueOrder",
        "engine.offload.windowChunks",
        "engine.offload.evictionPolicy",
        "engine.offload.batchMemcpy",
    ),
    "engine.offload.transport",
    *("engine.offload.sharedTier.type", "engine.offload.sharedTier.nvme", "engine.offload.sharedTier.redis.url"),
    "engine.offload.sharedTier.below",
    "engine.offload.nodeTier",
    *("passwordAs", "loadQueueBytesMax", "storeQueueBytesMax"),
    *("engine.memory", "engine.cpu", "engine.lifecycle", "engine.image.variant", "engine.image.digest", "redis.memory"),
    "engine.image.vllm",
    *(
        "engine.model.kvCacheDtype",
        "engine.kvTransfer",
        "engine.lora",
        "engine.autoscaling.trigger",
        "engine.controller",
    ),
    *("gateway.service.loadBalancerClass", "monitoring.alerts.runbookBaseUrl"),
    *("whenUnsatisfiable", "gateway.service.type", "gateway.limits", "gateway.index", "gateway.log.level", "redis.cpu"),
    *(
        "gateway.auth.unsaltedRoutes",
        "gateway.disaggregation.mode",
        "gateway.disaggregation.handOver",
        "engine.role",
        "gateway.auth.saltSecret.key",  # which may not be keysSecret's entry too
        "gateway.auth.engineKeySecret.key",
        "gateway.auth.sharedLimits.url",
        "gateway.discovery.type",
        "gateway.connections",
        "gateway.tracing",
        "gateway.resources",
        "gateway.ingress.path",
        "gateway.ingress.pathType",
        "gateway.picker.failureMode",
        "gateway.image.digest",
        "checks.image.digest",
        "redis.image.digest",
        "labels",
    ),
)


@pytest.mark.parametrize("word", ["on", "1e3", "0x10", "null", "123"])
def test_text_stays_text(word):
    """Text stays text whatever YAML would make of it: every object keeps the types that Kubernetes' schemas demand."""
    texts = [path for path, value in leaves(VALUES) if isinstance(value, str) and not is_formed(path)]
    values = laid_over(RICH, *(nested(path, word) for path in texts), nested("engine.model.servedName", word))

    rendered = render(values=values)

    assert len(texts) > 30
    require_valid(rendered, "1.32")
    assert pod_spec(rendered.one("StatefulSet", "engine"))["priorityClassName"] == word


def is_formed(path: str) -> bool:
    return any(path == known or path.startswith(f"{known}.") or path.rsplit(".", 1)[-1] == known for known in FORMED)
