"""Mistakes that operators make, and the message each gets: what is wrong, what was given, what to do instead."""

from typing import Any

import pytest
import yaml
from chart.helm_binaries import helms
from chart.rendering import RenderRefused, render

# (values, words of the message); a word may be alternatives of the two Helm majors, separated by |.
MISTAKES: dict[str, tuple[str, list[str]]] = {
    "misspelt section": ("engine: {offlaod: {enabled: true}}", ["offlaod", "not allowed"]),
    "misspelt setting": ("engine: {offload: {numCPUBlocks: 4}}", ["numCPUBlocks", "not allowed"]),
    "setting one level too high": ("numCpuBlocks: 4", ["numCpuBlocks", "not allowed"]),
    "misspelt in one of several models": ("engines: {a: {modle: {}}}", ["modle", "not allowed"]),
    "text for a number": ("engine: {replicas: two}", ["replicas", "integer"]),
    "number with a unit": ("engine: {blockSize: 128tokens}", ["blockSize", "integer"]),
    "negative replicas": ("gateway: {replicas: -1}", ["replicas", "1"]),
    "odd block size": ("engine: {blockSize: 100}", ["blockSize", "16"]),
    "unknown word": ("engine: {offload: {batchMemcpy: always}}", ["batchMemcpy", "auto", "on", "off"]),
    "unknown transport": ("engine: {offload: {transport: gpu}}", ["transport", "auto", "cpu", "cuda", "npu"]),
    "copies that cannot reach a device": (
        "engine: {offload: {transport: cpu}}",
        ["engine.offload.transport: cpu cannot reach the memory of a device; accelerator.preset: mindcluster needs"],
    ),
    "copies of another platform": (
        "{engine: {offload: {transport: cuda}}, engines: {a: {}, "
        "g: {model: {servedName: g}, accelerator: {preset: cuda}, offload: {transport: npu, aclLibraryPath: /x.so}}}}",
        [
            "engines.a.offload.transport: cuda copies from NVIDIA devices; accelerator.preset: mindcluster needs auto",
            "engines.g.offload.transport: npu copies from Ascend devices; accelerator.preset: cuda needs auto or cuda",
            "engines.g.offload.aclLibraryPath: /x.so is a library of Ascend's CANN",
        ],
    ),
    "settings of Ascend for a GPU": (
        "engine: {accelerator: {preset: cuda, driverMounts: true}, image: {variant: a3}}",
        ["driverMounts, roceMounts and visibleDevices are of Ascend", 'variant: "a3" is an Ascend image; preset: cuda'],
    ),
    "library that is not opened": (
        "engine: {accelerator: {preset: cpu}, offload: {aclLibraryPath: /x.so}}",
        ["aclLibraryPath: /x.so is read by transport: npu alone"],
    ),
    "unknown tier": ("engine: {offload: {sharedTier: {type: s3}}}", ["none", "nvme", "redis"]),
    "unknown preset": ("engine: {accelerator: {preset: nvidia}}", ["mindcluster", "hami", "custom", "cuda", "cpu"]),
    "unknown dtype": ("engine: {model: {dtype: fp8}}", ["dtype", "bfloat16"]),
    "unknown image variant": ("engine: {image: {variant: a2}}", ["variant", "a3-openeuler"]),
    "a vLLM without an image": (
        'engine: {image: {vllm: "0.33"}}',
        ['engine.image.vllm: "0.33" has no engine image', "0.23, 0.30 and 0.32: write one of them in quotes"],
    ),
    "a version that YAML takes for a number": (
        "engine: {image: {vllm: 0.30}}",
        ["engine.image.vllm: 0.3 has no engine image", 'in quotes, e.g. vllm: "0.32"'],
    ),
    "a board without a base of that vLLM": (
        'engine: {image: {vllm: "0.32", variant: a5-openeuler}}',
        ['image.variant: "a5-openeuler" has a base image for vllm: "0.23" alone', "image.tag or image.digest"],
    ),
    "tag in the digest": ("engine: {image: {digest: v1.0}}", ["digest", "pattern"]),
    "a default taken away": ("engine: {lifecycle: null}", ["lifecycle", "required|missing"]),
    "number as label": ("commonLabels: {cost: 5}", ["cost", "string"]),
    "number as environment variable": ("engine: {extraEnv: {OMP_NUM_THREADS: 8}}", ["OMP_NUM_THREADS", "string"]),
    "port out of range": ("engine: {port: 70000}", ["port", "65535|65,535"]),
    "capital letters in a model's key": ("engines: {Chat: {}}", ["Chat", "pattern"]),
    "node port too": (
        "gateway: {service: {nodePort: 30000}}",
        ["gateway.service.nodePort: 30000 needs type: NodePort or LoadBalancer; it is ClusterIP"],
    ),
    "settings of another kind of Service": (
        "gateway: {service: {externalTrafficPolicy: Local, loadBalancerSourceRanges: [10.0.0.0/8]}}",
        [
            "gateway.service.externalTrafficPolicy: Local needs type: NodePort or LoadBalancer; it is ClusterIP",
            "gateway.service.loadBalancerSourceRanges: [10.0.0.0/8] needs type: LoadBalancer; it is ClusterIP",
        ],
    ),
    "resources and network that cannot be together": (
        "engine: {hostNetwork: true, dnsPolicy: ClusterFirst, ephemeralStorage: {request: 3GiB, limit: 2GiB}, "
        "accelerator: {extraResources: {huawei.com/Ascend910: 2}}, "
        "offload: {sharedTier: {type: nvme, nvme: {volume: {type: emptyDir, size: 5GiB}}}}}",
        [
            "engine.dnsPolicy: ClusterFirst with hostNetwork: true leaves a pod without the cluster's names",
            "engine.ephemeralStorage: request 3GiB is more than limit 2GiB; raise the limit",
            "engine.ephemeralStorage.limit: 2GiB is less than offload.sharedTier.nvme.volume.size: 5GiB",
            "extraResources: huawei.com/Ascend910 is resourceName, whose amount is accelerator.count",
        ],
    ),
    "runbooks at no address": ("monitoring: {alerts: {runbookBaseUrl: docs/operations.md}}", ["runbookBaseUrl"]),
    "size with an unknown unit": (
        "engine: {offload: {numCpuBlocks: null, cpuBytes: 10gigs}}",
        ['engine.offload.cpuBytes: "10gigs" is no size; write for example 512MiB'],
    ),
    "sizes that cannot be read, and nothing that follows from them": (
        "{redis: {enabled: true, memory: 8Gx}, engine: {memory: {limit: 500m}, model: {cache: {sizeLimit: 80g}}, "
        "offload: {sharedTier: {type: redis, redis: {tenantMaxBytes: 1GiB}}}}, "
        "gateway: {resources: {requests: {memory: 1K}}, index: {bytesMax: lots}}}",
        [
            'engine.memory.limit: "500m" has a suffix for fractions of a byte; write for example 512MiB, 64Gi',
            'engine.model.cache.sizeLimit: "80g" is no size',
            'gateway.index.bytesMax: "lots" is no size',
            'gateway.resources.requests.memory: "1K" is no size',
            'redis.memory: "8Gx" is no size',
        ],
    ),
    "credential for the name of a Secret": (
        "{engine: {model: {hubTokenSecret: {name: hf_SECRET}}}, engines: {a: {apiKeySecret: {name: sk-SECRET}}}, "
        "image: {pullSecrets: [{name: SECRET}]}, gateway: {ingress: {tlsSecret: SECRET}}}",
        [
            "engine.model.hubTokenSecret.name: what is given (9 characters) is no name of a Secret",
            "engines.a.apiKeySecret.name: what is given (9 characters)",
            "image.pullSecrets[0].name: what is given (6 characters)",
            "gateway.ingress.tlsSecret: what is given (6 characters)",
            "kubectl create secret generic NAME --from-literal=KEY=...",
        ],
    ),
    "credentials in an address of no known form": (
        "{gateway: {auth: {sharedLimits: {url: 'http://h:1?password=SECRET'}}}, engine: {offload: {sharedTier: {type: "
        "redis, redis: {url: 'redis://h:1?password=SECRET'}}}}}",
        [
            'sharedLimits.url: "http://h:1?password=***" is no address',
            'redis.url: "redis://h:1?password=***" is no address',
        ],
    ),
    "credentials for traces": (
        "gateway: {tracing: {otlpEndpoint: 'https://me:SECRET@collector:4318/v1/traces'}}",
        ["gateway.tracing.otlpEndpoint holds credentials", "OTEL_EXPORTER_OTLP_HEADERS"],
    ),
    "key of an encryption that is off": (
        "engine: {offload: {sharedTier: {type: nvme, encryption: {keyId: '2026-11', keySecretName: kv-key}}}}",
        ["encryption: keyId: 2026-11 is given, but enabled is false, so blocks would be stored unsealed"],
    ),
    "Secret of an encryption that is off, without a tier": (
        "engine: {offload: {sharedTier: {encryption: {keySecretName: kv-key}}}}",
        ["encryption: keySecretName: kv-key is given, but enabled is false"],
    ),
    "locked memory without the right to it": (
        "engine: {accelerator: {lockMemory: true}, securityContext: {runAsUser: 5, capabilities: {drop: [ALL]}}}",
        ["engine.accelerator.lockMemory: true adds IPC_LOCK", "add capabilities.add: [IPC_LOCK] there"],
    ),
    "size of the CPU tier given twice": (
        "engine: {offload: {numCpuBlocks: 100, cpuBytes: 1GiB}}",
        ["numCpuBlocks: 100 and cpuBytes: 1GiB both size the CPU tier; set one of them to null"],
    ),
    "CPU tier without a size": (
        "engine: {offload: {numCpuBlocks: null}}",
        ["the CPU tier has no size; set numCpuBlocks (or cpuBytes), or offload.enabled: false"],
    ),
    "CPU tier smaller than a chunk": (
        "engine: {offload: {numCpuBlocks: null, cpuBytes: 1MiB}}",
        ["1.0 MiB holds no chunk of 18.0 MiB (128 tokens x 147456 B); set it to 18874368 or more"],
    ),
    "memory that cannot hold it": (
        "engine: {memory: {limit: 20GiB}}",
        [
            "engine.memory.limit: 20.0 GiB is too little: CPU tier 36.0 GiB (2048 chunks x 18.0 MiB)",
            "+ 15 % margin = 50.7 GiB; set memory.limit >= 51907Mi, null to have it computed",
            "offload.numCpuBlocks <= 529",
        ],
    ),
    "/dev/shm that cannot hold it": (
        "engine: {memory: {sharedMemory: 64MiB}}",
        ["engine.memory.sharedMemory: 64.0 MiB cannot hold the CPU tier of 36.0 GiB", "set it to 36944Mi or more"],
    ),
    "device blocks for no prompt": (
        "engine: {deviceBlocks: 100}",
        ["deviceBlocks: 100 blocks of 128 tokens hold no prompt of model.maxLength 32768; set deviceBlocks >= 257"],
    ),
    "unknown model": (
        "engine: {model: {path: acme/secret-7b}}",
        ['"acme/secret-7b" is no model the chart knows', "set engine.model.shape.layers, kvHeads and headDim"],
    ),
    "unknown shape preset": ("engine: {model: {shape: {preset: gpt-9}}}", ['"gpt-9" is no known model', "qwen3-8b"]),
    "folder without a volume": (
        "engine: {model: {path: /models/Qwen3-8B}}",
        ["/models/Qwen3-8B is a folder, but no volume brings it; set model.volume.type"],
    ),
    "hub name with a volume": (
        "engine: {model: {volume: {type: existingClaim, claimName: m}}}",
        ["Qwen/Qwen3-8B is a hub name, but model.volume.type is existingClaim"],
    ),
    "folder outside the volume": (
        "engine: {model: {path: /data/Qwen3-8B, volume: {type: hostPath, hostPath: /m}}}",
        ["/data/Qwen3-8B does not lie below model.volume.mountPath: /models"],
    ),
    "volume without a claim": (
        "engine: {model: {path: /models/Qwen3-8B, volume: {type: existingClaim}}}",
        ["model.volume.claimName is empty; type: existingClaim needs it"],
    ),
    "relative model folder": (
        "engine: {model: {path: ./Qwen3-8B}}",
        ['"./Qwen3-8B" is neither an absolute folder nor a hub name'],
    ),
    "tokenizer without a volume": (
        "engine: {model: {tokenizer: volume}}",
        ["engine.model.tokenizer: volume needs model.volume.type existingClaim"],
    ),
    "tokenizer by name": (
        "engine: {model: {tokenizer: qwen}}",
        ['"qwen" is none of none, volume and an absolute folder'],
    ),
    "tensor parallel size that does not divide": (
        "engine: {tensorParallelSize: 3}",
        ["tensorParallelSize: 3 does not divide the model's 8 KV heads"],
    ),
    "fewer devices than ranks": (
        "engine: {tensorParallelSize: 4, accelerator: {count: 2}}",
        ["accelerator.count: 2 devices for tensorParallelSize: 4 ranks", "set count >= 4 or null"],
    ),
    "custom devices without a name": (
        "engine: {accelerator: {preset: custom}}",
        ["accelerator.resourceName is empty; preset: custom needs the name"],
    ),
    "devices on a CPU engine": (
        "engine: {accelerator: {preset: cpu, count: 1}}",
        ["preset: cpu takes no devices; remove resourceName and count"],
    ),
    "driver mounts on a CPU engine": (
        "engine: {accelerator: {preset: cpu, driverMounts: true}}",
        ["mean nothing with preset: cpu"],
    ),
    "Ascend image on a CPU engine": (
        "engine: {accelerator: {preset: cpu}, image: {variant: a3}}",
        ['image.variant: "a3" is an Ascend image; preset: cpu has no variants'],
    ),
    "310P boards with the wrong image": (
        "engine: {accelerator: {resourceName: huawei.com/Ascend310P}}",
        ["does not fit accelerator.resourceName: huawei.com/Ascend310P; the 310P boards need a 310p variant"],
    ),
    "literal devices without any": (
        "engine: {accelerator: {visibleDevices: {mode: literal}}}",
        ["visibleDevices.value is empty; mode: literal needs one"],
    ),
    "devices that are not used": (
        "engine: {accelerator: {visibleDevices: {value: '0'}}}",
        ["is read with mode: literal alone; the mode is plugin"],
    ),
    "Redis tier without a server": (
        "engine: {offload: {sharedTier: {type: redis}}}",
        ["sharedTier.redis.url is empty; give one (redis://host:6379/0), or redis.enabled: true"],
    ),
    "Redis server that is not used": ("redis: {enabled: true}", ["redis.enabled: true, but no engine uses it"]),
    "password in the address": (
        "engine: {offload: {sharedTier: {type: redis, redis: {url: 'redis://:pw@r:6379/0'}}}}",
        ["redis.url holds credentials; put them into a Secret"],
    ),
    "address of another protocol": (
        "engine: {offload: {sharedTier: {type: redis, redis: {url: 'http://r:6379'}}}}",
        ['redis.url: "http://r:6379" is no address; write redis://host:6379/0, redis-sentinel://'],
    ),
    "several servers that are no cluster": (
        "engine: {offload: {sharedTier: {type: redis, redis: {url: 'redis://a:1,b:1'}}}}",
        ["is no address", "redis-cluster://host:6379,host:6379"],
    ),
    "sentinels without the name of what they watch": (
        "engine: {offload: {sharedTier: {type: redis, redis: {url: 'redis-sentinel://a:1,b:1'}}}}",
        ["is no address", "redis-sentinel://host:26379,host:26379/service?db=0"],
    ),
    "password in the address of a tier that is not in use": (
        "engine: {offload: {sharedTier: {redis: {url: 'redis://:pw@r:6379/0'}}}}",
        ["redis.url holds credentials; put them into a Secret"],
    ),
    "socket that nothing brings": (
        "engine: {offload: {sharedTier: {type: redis, redis: {url: 'unix:///run/r.sock'}}}}",
        ["redis.url: unix:///run/r.sock is a socket in the pod, but nothing brings it"],
    ),
    "certificates for a plain connection": (
        "engine: {offload: {sharedTier: {type: redis, redis: {url: 'redis://r', tls: {caSecret: {name: ca}}}}}}",
        ["redis.tls names Secrets, but url: redis://r asks for no TLS; write rediss://"],
    ),
    "user name without its Secret": (
        "engine: {offload: {sharedTier: {type: redis, redis: {url: 'redis://r', existingSecret: {usernameKey: u}}}}}",
        ["existingSecret.usernameKey: u, but existingSecret.name is empty"],
    ),
    "password as something else": (
        "engine: {offload: {sharedTier: {redis: {existingSecret: {passwordAs: argument}}}}}",
        ["passwordAs", "file", "env"],
    ),
    "more lanes than connections": (
        "engine: {offload: {sharedTier: {type: redis, redis: {url: 'redis://r', payloadConnections: 8}}}}",
        ["redis.payloadConnections: 8 is more than connections: 4; raise connections"],
    ),
    "a tenant larger than the embedded server": (
        "{redis: {enabled: true}, engine: {offload: {sharedTier: {type: redis, redis: {tenantMaxBytes: 8GiB}}}}}",
        ["tenantMaxBytes: 8.0 GiB for one tenant is more than the embedded server holds for all", "6.0 GiB"],
    ),
    "server behind a closed network": (
        "{networkPolicy: {restrictEgress: true}, "
        "engine: {offload: {sharedTier: {type: redis, redis: {url: 'redis://r'}}}}}",
        ["restrictEgress: true closes the way to", "redis.url: redis://r; list its address in networkPolicy.engineEg"],
    ),
    "encryption without a Secret": (
        "engine: {offload: {sharedTier: {type: nvme, encryption: {enabled: true, keyId: a}}}}",
        ["encryption.keySecretName is empty", "kubectl create secret generic kv-key --from-literal=key=$(openssl"],
    ),
    "encryption without a name": (
        "engine: {offload: {sharedTier: {type: nvme, encryption: {enabled: true, keySecretName: k}}}}",
        ["encryption.keyId is empty; give the key a public name"],
    ),
    "the key where its name belongs": (
        "engine: {offload: {sharedTier: {encryption: {keyId: 'dGhpcyBpcyBhIGtleQ=='}}}}",
        ["keyId", "pattern"],
    ),
    "encryption of nothing": (
        "engine: {offload: {sharedTier: {encryption: {enabled: true, keyId: a, keySecretName: k}}}}",
        ["encryption.enabled: true, but sharedTier.type is none; it seals a shared tier"],
    ),
    "key that the engine's user cannot read": (
        "engine: {accelerator: {preset: cpu}, podSecurityContext: {runAsUser: 5}, offload: {sharedTier: "
        "{type: nvme, encryption: {enabled: true, keyId: a, keySecretName: k}}}}",
        ["user 5 of the engine cannot read the files of Secret k", "add fsGroup to engine.podSecurityContext"],
    ),
    "slabs on a volume of many nodes": (
        "engine: {offload: {sharedTier: {type: nvme, nvme: {mode: slab, volume: {type: sharedClaim}}}}}",
        ["nvme.mode: slab needs a disk of one node, but volume.type: sharedClaim is a ReadWriteMany claim"],
    ),
    "slabs on a claim that several pods mount": (
        "engine: {offload: {sharedTier: {type: nvme, nvme: {mode: slab, volume: {type: existingClaim, "
        "claimName: c}}}}}",
        ["mode: slab needs a disk of one node, but up to 2 pods on any nodes mount claim c", "mode: files (or auto"],
    ),
    "unknown layout": ("engine: {offload: {sharedTier: {nvme: {mode: slabs}}}}", ["mode", "files", "slab", "auto"]),
    "a tenant larger than the whole": (
        "engine: {offload: {sharedTier: {type: nvme, nvme: {maxBytes: 1TiB, tenantMaxBytes: 2TiB}}}}",
        ["nvme.tenantMaxBytes: 2.0 TiB for one tenant is more than maxBytes: 1.0 TiB for all"],
    ),
    "a tenant larger than what the volume leaves": (
        "engine: {offload: {sharedTier: {type: nvme, nvme: {tenantMaxBytes: 95GiB, volume: {type: emptyDir, "
        "size: 100GiB}}}}}",
        ["nvme.tenantMaxBytes: 95.0 GiB for one tenant is more than maxBytes: 90.0 GiB for all"],
    ),
    "a bound of nothing": ("engine: {offload: {sharedTier: {nvme: {maxBytes: 0}}}}", ["maxBytes", "1"]),
    "chunks that live for no time": ("engine: {offload: {sharedTier: {nvme: {ttlSeconds: 0}}}}", ["ttlSeconds", "1"]),
    "queue that no chunk fits into": (
        "engine: {offload: {blocksPerChunk: 100, sharedTier: {type: nvme, storeQueueBytesMax: 1GiB}}}",
        ["sharedTier.storeQueueBytesMax: 1.0 GiB holds no chunk of 1.8 GiB; set it to 1887436800 or more"],
    ),
    "tier that no chunk fits into": (
        "engine: {offload: {sharedTier: {type: nvme, nvme: {maxBytes: 1MiB}}}}",
        ["nvme.maxBytes: 1.0 MiB holds no chunk of 18.0 MiB; set it to 18874368 or more"],
    ),
    "threads at the old place": (
        "engine: {offload: {sharedTier: {nvme: {ioThreads: 8}}}}",
        ["ioThreads", "not allowed"],
    ),
    "a share above everything": ("engine: {offload: {promotionInFlightFraction: 50}}", ["promotionInFlightFraction"]),
    "waiting for no time": ("engine: {offload: {requestWaitSeconds: 0}}", ["requestWaitSeconds", "0"]),
    "secret of a further tier": (
        "engine: {offload: {extraTiers: [{type: obj, secret_key: abc}]}}",
        ["extraTiers[0].secret_key would lie in a ConfigMap in plain text"],
    ),
    "tier without offload": (
        "engine: {offload: {enabled: false, sharedTier: {type: nvme}}}",
        ["sharedTier.type: nvme, but offload.enabled is false"],
    ),
    "tier larger than its volume": (
        "engine: {offload: {sharedTier: {type: nvme, nvme: {maxBytes: 2TiB, volume: {type: emptyDir, size: 1TiB}}}}}",
        ["nvme.maxBytes: 2.0 TiB does not fit into the volume of 1.0 TiB"],
    ),
    "tier's claim without a name": (
        "engine: {offload: {sharedTier: {type: nvme, nvme: {volume: {type: existingClaim}}}}}",
        ["nvme.volume.claimName is empty; type: existingClaim needs it"],
    ),
    "relative tier folder": (
        "engine: {offload: {sharedTier: {type: nvme, nvme: {path: kv}}}}",
        ['nvme.path: "kv" is no absolute folder'],
    ),
    "one port twice": ("engine: {kvEvents: {port: 8100}}", ["8100 is also", "give each its own port"]),
    "secret in plain text": (
        "engine: {extraEnv: {MY_TOKEN: abc}}",
        ["engine.extraEnv.MY_TOKEN would lie in a ConfigMap in plain text; use extraEnvVars"],
    ),
    "API key as an argument": (
        "engine: {extraArgs: [--api-key=x]}",
        ["would show a secret in a ConfigMap; use apiKeySecret"],
    ),
    "argument that the chart writes": (
        "engine: {extraArgs: ['--kv-transfer-config={}']}",
        ["engine.extraArgs: --kv-transfer-config is decided by engine.offload; change that instead"],
    ),
    "hash seed of one's own": ("engine: {extraEnv: {PYTHONHASHSEED: '1'}}", ["PYTHONHASHSEED is the chart's own"]),
    "variable that the chart sets": (
        "engine: {extraEnvVars: [{name: HF_HOME, value: /x}]}",
        ["HF_HOME is set by the chart"],
    ),
    "variable that the chart sets in every pod": (
        "engine: {extraEnvVars: [{name: USER, value: me}]}",
        ["engine.extraEnvVars: USER is set by the chart; remove it"],
    ),
    "variable that the chart sets in some pods": (
        "engine: {accelerator: {visibleDevices: {mode: literal, value: '0'}}, "
        "extraEnvVars: [{name: ASCEND_RT_VISIBLE_DEVICES, value: '1'}]}",
        ["engine.extraEnvVars: ASCEND_RT_VISIBLE_DEVICES is set by the chart; remove it"],
    ),
    "variable in both lists": (
        "engine: {extraEnv: {A: b}, extraEnvVars: [{name: A, value: c}]}",
        ["engine.extraEnvVars: A is in extraEnv too; give it once"],
    ),
    "variable of the embedded server twice": (
        "{redis: {enabled: true, extraEnvVars: [{name: A, value: b}, {name: A, value: c}]}, "
        "engine: {offload: {sharedTier: {type: redis}}}}",
        ["redis.extraEnvVars: A is listed twice"],
    ),
    "variable twice": (
        "engine: {extraEnvVars: [{name: A, value: b}, {name: A, value: c}]}",
        ["extraEnvVars: A is listed twice"],
    ),
    "two models of one name": (
        "engines: {a: {model: {servedName: chat}}, b: {model: {servedName: chat}}}",
        ['engines.b: the name "chat" is already served by engines.a'],
    ),
    "alias of another model": (
        "engines: {a: {model: {servedName: x}}, b: {model: {servedName: y, aliases: [x]}}}",
        ['the name "x" is already served by engines.a'],
    ),
    "fewest replicas above most": (
        "gateway: {autoscaling: {enabled: true, minReplicas: 9, maxReplicas: 3}}",
        ["gateway.autoscaling: minReplicas: 9 is more than maxReplicas: 3"],
    ),
    "route without a parent": ("gateway: {httpRoute: {enabled: true}}", ["gateway.httpRoute.parentRefs is empty"]),
    "request above the limit": (
        "gateway: {resources: {requests: {memory: 4GiB}, limits: {memory: 2GiB}}}",
        ["requests.memory 4.0 GiB is more than limits.memory 2.0 GiB"],
    ),
    "one port for clients and operators": (
        "gateway: {opsPort: 8000}",
        ["gateway.opsPort: 8000 is also port; give each its own"],
    ),
    "metrics behind a certificate": (
        "{gateway: {opsPort: null, tls: {secret: {name: c}}}, monitoring: {serviceMonitor: {enabled: true}}}",
        ["gateway.tls closes /metrics to plain HTTP; set gateway.opsPort, e.g. 8001"],
    ),
    "audit into a read-only folder": (
        "gateway: {audit: {enabled: true, file: /var/log/audit.jsonl}}",
        ["/var/log/audit.jsonl lies in the image, which is read-only; mount its folder with extraVolumes"],
    ),
    "audit file without an audit": (
        "gateway: {audit: {file: /tmp/audit.jsonl}}",
        ["/tmp/audit.jsonl, but audit.enabled is false"],
    ),
    "a word for unsalted routes": ("gateway: {auth: {unsaltedRoutes: maybe}}", ["unsaltedRoutes", "refuse", "allow"]),
    "misspelt setting of the breaker": ("gateway: {breaker: {openSecondMax: 9}}", ["openSecondMax", "not allowed"]),
    "breaker that opens at once": ("gateway: {breaker: {failures: 0}}", ["failures", "1"]),
    "longest pause shorter than the first": (
        "gateway: {breaker: {openSeconds: 90}}",
        ["gateway.breaker.openSecondsMax: 60 is less than openSeconds: 90", "raise openSecondsMax or lower"],
    ),
    "a way to find engines that does not exist": ("gateway: {discovery: {type: dns}}", ["discovery", "kubernetes"]),
    "limits without tenants": (
        "gateway: {auth: {sharedLimits: {url: 'redis://r:6379/0'}}}",
        ["no tenants to limit; set gateway.auth.keysSecret"],
    ),
    "a password in the address of shared limits": (
        "gateway: {auth: {sharedLimits: {url: 'redis://:SECRET@r:6379/0'}}}",
        ["gateway.auth.sharedLimits.url holds credentials", "url: redis://***@r:6379/0, but there are no tenants"],
    ),
    "an authority without TLS": (
        "gateway: {auth: {keysSecret: {name: k}, saltSecret: {name: s}, "
        "sharedLimits: {url: 'redis://r:6379/0', caSecret: {name: ca}}}}",
        ["url speaks no TLS; begin it with rediss"],
    ),
    "a login for no server": (
        "gateway: {auth: {sharedLimits: {existingSecret: {name: login}}}}",
        ["sharedLimits.existingSecret.name: login, but url is empty; give the server's address"],
    ),
    "a user of no Secret": (
        "gateway: {auth: {keysSecret: {name: k}, saltSecret: {name: s}, "
        "sharedLimits: {url: 'redis://r:6379/0', existingSecret: {usernameKey: user}}}}",
        ["existingSecret.usernameKey: user, but existingSecret.name is empty"],
    ),
    "limits in the embedded server": (
        "{redis: {enabled: true}, engine: {offload: {sharedTier: {type: redis}}}, gateway: {auth: {keysSecret: "
        "{name: k}, saltSecret: {name: s}, sharedLimits: {url: 'redis://chat-spillway-redis:6379/1'}}}}",
        ["redis://chat-spillway-redis:6379/1 is the embedded server, whose only user may run no scripts"],
    ),
    "limits behind a closed network": (
        "{networkPolicy: {restrictEgress: true, engineEgress: [{}]}, gateway: {auth: {keysSecret: {name: k}, "
        "saltSecret: {name: s}, sharedLimits: {url: 'redis://r:6379/0'}}}}",
        ["closes the way to gateway.auth.sharedLimits.url: redis://r:6379/0; list its address in", "gatewayEgress"],
    ),
    "traces behind a closed network": (
        "{networkPolicy: {restrictEgress: true, engineEgress: [{}]}, "
        "gateway: {tracing: {otlpEndpoint: 'http://collector:4318/v1/traces'}}}",
        ["closes the way to gateway.tracing.otlpEndpoint: http://collector:4318/v1/traces"],
    ),
    "a model behind a closed network": (
        "networkPolicy: {restrictEgress: true}",
        ["closes the way to the hub that engine.model.path: Qwen/Qwen3-8B comes from", "engineEgress"],
    ),
    "variable that the chart sets in the gateway": (
        "gateway: {extraEnvVars: [{name: SPILLWAY_LIMITS_PASSWORD, value: x}]}",
        ["SPILLWAY_LIMITS_PASSWORD is set by the chart; name the Secret in gateway.auth.sharedLimits.existingSecret"],
    ),
    "variable twice in the gateway": (
        "gateway: {extraEnvVars: [{name: A, value: b}, {name: A, value: c}]}",
        ["gateway.extraEnvVars: A is listed twice"],
    ),
    "leases shorter than reports": (
        "gateway: {auth: {keysSecret: {name: k}, saltSecret: {name: s}, "
        "sharedLimits: {url: 'redis://r:6379/0', leaseSeconds: 1, reportSeconds: 0.5}}}",
        ["less than ten times reportSeconds"],
    ),
    "traces to no receiver": ("gateway: {tracing: {otlpEndpoint: collector}}", ["otlpEndpoint"]),
    "slow start with a unit": ("gateway: {routing: {slowStartSeconds: 10s}}", ["slowStartSeconds", "number"]),
    "a store that gives nothing": (
        "gateway: {routing: {sharedStoreTokensPerSecond: 0}}",
        ["sharedStoreTokensPerSecond", "0"],
    ),
    "gateways let go of requests after the engine": (
        "{engine: {lifecycle: {drainTimeoutSeconds: 60}}, gateway: {health: {endingSeconds: 90}}}",
        ["gateway.health.endingSeconds: 90", "65 s together", "leave it null"],
    ),
    "metrics never read": ("gateway: {health: {metricsPeriodSeconds: 0}}", ["metricsPeriodSeconds", "0"]),
    "queue of a part of a request": (
        "gateway: {admission: {waitingRequestsMax: 0.5}}",
        ["waitingRequestsMax", "integer"],
    ),
    "keys in the values": ("gateway: {auth: {keys: [sk-1]}}", ["keys", "not allowed"]),
    "a key where the Secret's name belongs": (
        "gateway: {auth: {keysSecret: {name: sk_SECRETxyz}}}",
        ["gateway.auth.keysSecret.name: what is given (12 characters) is no name of a Secret"],
    ),
    "a password where the Secret's name belongs": (
        "gateway: {auth: {sharedLimits: {url: 'redis://r:6379/0', existingSecret: {name: 'SECRET horses'}}}}",
        ["gateway.auth.sharedLimits.existingSecret.name: what is given (13 characters) is no name of a Secret"],
    ),
    "entry of a Secret as a path": (
        "gateway: {auth: {keysSecret: {name: k, key: etc/keys.yaml}}}",
        ["keysSecret", "pattern"],
    ),
    "keys without a salt": (
        "gateway: {auth: {keysSecret: {name: k}}}",
        ["gateway.auth.saltSecret.name is empty", "--from-literal=secret=$(openssl rand -base64 48)"],
    ),
    "a salt without keys": (
        "gateway: {auth: {saltSecret: {name: s}}}",
        ["gateway.auth.saltSecret.name: s, but keysSecret.name is empty; name the Secret with the tenants"],
    ),
    "engines that demand a key that is not sent": (
        "{engine: {apiKeySecret: {name: e, key: k}}, gateway: {auth: {keysSecret: {name: k}, saltSecret: {name: s}}}}",
        ["engines demand a key (engine.apiKeySecret), and clients' keys no longer", "set it to {name: e, key: k}"],
    ),
    "engines that demand different keys": (
        "{engines: {a: {model: {servedName: a}, apiKeySecret: {name: x}}, "
        "b: {model: {servedName: b}, apiKeySecret: {name: y}}}, gateway: {auth: {engineKeySecret: {name: x}}}}",
        ["one key to all engines, but engines.a.apiKeySecret and engines.b.apiKeySecret name different ones"],
    ),
    "keys that the gateway's user cannot read": (
        "gateway: {podSecurityContext: {fsGroup: null}, auth: {keysSecret: {name: k}, saltSecret: {name: s}}}",
        ["user 10001 of its pods cannot read the files of their Secrets", "add fsGroup to gateway.podSecurityContext"],
    ),
    "a client's key without keys": (
        "tests: {apiKeySecret: {name: t}}",
        ["tests.apiKeySecret.name: t, but the gateway requires no keys"],
    ),
    "volume of the chart's name in the gateway": (
        "gateway: {extraVolumes: [{name: secrets, emptyDir: {}}]}",
        ["gateway.extraVolumes: secrets is the name of a volume of the chart's own; choose another"],
    ),
    "volume of the chart's name in the engine": (
        "engine: {extraVolumes: [{name: shared-memory, emptyDir: {}}]}",
        ["engine.extraVolumes: shared-memory is the name of a volume of the chart's own"],
    ),
    "volume of the chart's name in the server": (
        "{redis: {enabled: true, extraVolumes: [{name: scratch}]}, engine: {offload: {sharedTier: {type: redis}}}}",
        ["redis.extraVolumes: scratch is the name of a volume of the chart's own"],
    ),
    "password of the server as a variable": (
        "{redis: {enabled: true, extraEnvVars: [{name: VALKEY_PASSWORD, value: x}]}, "
        "engine: {offload: {sharedTier: {type: redis}}}}",
        ["redis.extraEnvVars: VALKEY_PASSWORD is set by the chart; name the Secret in redis.existingSecret"],
    ),
    "index larger than the gateway": (
        "gateway: {index: {bytesMax: 8GiB}}",
        ["limits.memory: 2.0 GiB cannot hold gateway.index.bytesMax 8.0 GiB x 1 models"],
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_message(mistake):
    text, words = MISTAKES[mistake]

    for helm in helms():
        message = refusal(yaml.safe_load(text), helm=helm)
        for word in words:
            assert any(option in message for option in word.split("|")), message
        assert "SECRET" not in message and " 0 B" not in message


def test_every_mistake_is_told_at_once():
    message = refusal(yaml.safe_load("engine: {tensorParallelSize: 3, memory: {limit: 1GiB}, extraEnv: {A_TOKEN: x}}"))

    assert message.count("\n- ") == 3


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ("engine: {autoscaling: {enabled: true}}", "keda.sh/v1alpha1/ScaledObject"),
        ("monitoring: {podMonitor: {enabled: true}}", "monitoring.coreos.com/v1/PodMonitor"),
        ("monitoring: {serviceMonitor: {enabled: true}}", "monitoring.coreos.com/v1/ServiceMonitor"),
        ("monitoring: {alerts: {enabled: true}}", "monitoring.coreos.com/v1/PrometheusRule"),
        ("gateway: {httpRoute: {enabled: true, parentRefs: [{name: a}]}}", "gateway.networking.k8s.io/v1/HTTPRoute"),
    ],
)
def test_kinds_that_the_cluster_lacks(values, kind):
    message = refusal(yaml.safe_load(values), kinds=())

    assert "install" in message and f"-a {kind}" in message
    assert render(values=yaml.safe_load(values), kinds=[kind]).of_kind(kind.rsplit("/", 1)[1])


def test_force_takes_numbers_that_are_too_small():
    values = yaml.safe_load("engine: {memory: {limit: 20GiB, sharedMemory: 1GiB, force: true}}")

    engine = render(values=values).one("StatefulSet", "engine")

    assert engine["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"] == "20480Mi"


def refusal(values: dict[str, Any], **options: Any) -> str:
    with pytest.raises(RenderRefused) as refused:
        render(values=values, **options)
    return str(refused.value)
