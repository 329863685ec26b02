"""Names that the chart's templates and Python both use: folders of pods, variables, kinds, sections, forms of names.

`make schema` writes them to charts/spillway/files/shared-names.json, which the templates read. Templates and Python
have different engines of regular expressions (RE2 and re), so every expression here means the same in both.
"""

from __future__ import annotations

from typing import Any

# Places in a pod where the chart mounts files.
FOLDERS = {
    "certificate": "/etc/spillway-certificate",
    "config": "/etc/spillway",
    "home": "/var/lib/spillway/home",
    "hub": "/var/lib/spillway/hub",
    "models": "/var/lib/spillway/models",
    "node": "/var/lib/spillway/node",
    "secrets": "/var/lib/spillway/secrets",
    "valkey": "/etc/valkey",
}

# Environment variables of Spillway's own; files/start-ascend.sh reads the last one.
VARIABLES = {
    "clientKey": "SPILLWAY_CLIENT_KEY",
    "limitsPassword": "SPILLWAY_LIMITS_PASSWORD",
    "limitsUsername": "SPILLWAY_LIMITS_USERNAME",
    "redisPassword": "SPILLWAY_REDIS_PASSWORD",
    "redisUsername": "SPILLWAY_REDIS_USERNAME",
    "visibleDevices": "SPILLWAY_VISIBLE_DEVICES",
}

# Kinds that a cluster has only if somebody installed them.
CUSTOM_KINDS = (
    "leaderworkerset.x-k8s.io/v1/LeaderWorkerSet",
    "keda.sh/v1alpha1/ScaledObject",
    "monitoring.coreos.com/v1/PodMonitor",
    "monitoring.coreos.com/v1/ServiceMonitor",
    "monitoring.coreos.com/v1/PrometheusRule",
    "gateway.networking.k8s.io/v1/HTTPRoute",
    "inference.networking.k8s.io/v1/InferencePool",
)

# Sections of a gateway's configuration that it puts into effect while it runs; with `models` they are all there are.
LIVE_SECTIONS = ("continuation", "limits", "log", "timeouts")

# Host memory of a rank's process, if `memory.processPerRank` is null.
PROCESS_PER_RANK = {"onCpu": "2560MiB", "onDevice": "8GiB"}

# A variable with such a name holds a credential,
CREDENTIAL_NAME = (
    r"(?i)(token|password|passwd|passphrase|secret"
    r"|(api|access|private|signing|encryption|account|storage|shared|master)_?key|credentials?"
    r"|(^|_)(pass|pwd|pat|auth|dsn)|authorization|cookies?|connection_?string"
    r"|(otlp(_[a-z]+)?|custom|http|request|extra)_headers)(_json)?$"
)
# unless its value is a path, a switch or a small number.
HARMLESS_VALUE = r"^(/.*|(?i:true|false|on|off|yes|no|none)|[01]|)$"
# A value of this form is a credential wherever it stands.
CREDENTIAL_VALUE = (
    r"^(sk-|hf_|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|AKIA[0-9A-Z]{12}|eyJ[A-Za-z0-9_-]+\.eyJ)"
    r"|[\"'](sk-([a-z0-9]+-)*|hf_|gh[pousr]_|glpat-)[A-Za-z0-9]{16}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY|://[^/@ ]*:[^/@ ]+@"
    r"|(?i:password|secret|api[-_]?key|access[-_]?token|auth[-_]?token|[?&]token)[\"']?[=:] *[\"']?[^&$ \"']"
    r"|(?i:authorization[\"']?[=:] *[\"']?([a-z]+( |%20)+)?[^&$ \"'][^ \"']{7})"
    r"|(?i:\bbearer( |%20)+[a-z0-9._~+/-]{8})"
)

# Endings of a model's name that do not make it another model.
MODEL_NAME_ENDINGS = (
    r"([-_.](instruct|thinking|chat|base|it|pt|hf|bf16|preview|v0\.[0-9]+|[0-9]{4}|awq|gptq(-[48]b)?|gptqmodel|autoround|sym"
    r"|inc|quantized|unquantized|qat|q4_0|bnb|unsloth|marlin|quarot|fp8|fp4|nvfp4(a16)?|mxfp4|mxfp8|int4|int8|[48]bit"
    r"|w[48]a(4|8|16)|dynamic|block|kv|128g|g128))+$"
)
# Word in such an ending -> the size of its weights, in eighths of those in 16 bits: embeddings stay as they are.
QUANTIZED_EIGHTHS = {
    r"[-_.](fp8|mxfp8|int8|8bit|w8a)": 5,
    r"[-_.](awq|gptq|gptqmodel|autoround|bnb|fp4|nvfp4|mxfp4|int4|4bit|w4a)": 3,
}

# Models whose layers of many sizes vLLM packs into blocks in its own way: tokens of a block of full attention, which
# their kernels take no other of; bytes of a block of any group on one rank; those of them that the largest group holds
# without the padding of pages, which a row has once for all ranks of a stage; and groups: their number, tokens of their
# window (0: none) and of a block.
PACKED_MODELS: dict[str, dict[str, Any]] = {
    "deepseek-v4-flash": {
        "blockTokens": 256,
        "blockBytes": 1_039_680,
        "rowBytes": 985_664,
        "groups": [[1, 0, 256], [1, 128, 64], [1, 128, 64], [1, 8, 4], [1, 128, 8]],
    }
}

_TIER = "offload.sharedTier"
# The engine service's own settings with the engine's login at Redis: the embedded one has a Secret of its own.
REDIS_LOGIN = tuple(f"{_TIER}.redis.{key}" for key in ("usernameEnv", "passwordEnv", "passwordFile"))
# Settings of the engine service -> the values below `engine` that they are made of, if these have other names.
ENGINE_SETTINGS = {
    "platform": "accelerator.preset",
    "versionCheck": "accelerator.versionCheck",
    "cpuBinding": "accelerator.cpuBinding",
    **dict.fromkeys(REDIS_LOGIN, f"{_TIER}.redis.existingSecret"),
    f"{_TIER}.redis.tls.caFile": f"{_TIER}.redis.tls.caSecret",
    f"{_TIER}.redis.tls.certificateFile": f"{_TIER}.redis.tls.clientSecret",
    f"{_TIER}.redis.tls.keyFile": f"{_TIER}.redis.tls.clientSecret",
    f"{_TIER}.s3.caFile": f"{_TIER}.s3.caSecret",
    f"{_TIER}.encryption.keyFile": f"{_TIER}.encryption.keySecretName",
    f"{_TIER}.encryption.keyEnv": f"{_TIER}.encryption.keySecretName",
}


def shared_names() -> dict[str, Any]:
    """Return what the templates read."""
    return {
        "folders": FOLDERS,
        "variables": VARIABLES,
        "customKinds": list(CUSTOM_KINDS),
        "engineSettings": ENGINE_SETTINGS,
        "redisLogin": list(REDIS_LOGIN),
        "processPerRank": PROCESS_PER_RANK,
        "liveSections": list(LIVE_SECTIONS),
        "credentials": {"name": CREDENTIAL_NAME, "value": CREDENTIAL_VALUE, "harmless": HARMLESS_VALUE},
        "packedModels": PACKED_MODELS,
        "modelNames": {"endings": MODEL_NAME_ENDINGS, "eighths": QUANTIZED_EIGHTHS},
    }
