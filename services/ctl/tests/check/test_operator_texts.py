"""Values as operators write them: YAML's types, units, other charts' keys, what looks alike. Each sentence helps."""

from pathlib import Path

import pytest

from spillway_ctl.check.chart_facts import Cluster
from spillway_ctl.check.judgement import findings
from spillway_ctl.check.values_files import merged_values
from spillway_ctl.errors import CommandError

TIER = "engine: {offload: {sharedTier: %s}}"
MISTAKES = {
    # What YAML makes of a text.
    "engine: {image: {tag: 1.10}}": "YAML reads 1.10 as the number 1.1",
    "engine: {image: {vllm: 0.30}}": 'write one of them in quotes, e.g. vllm: "0.32"',
    "engine: {model: {servedName: 0123}}": "83 given, a name without blanks at its ends",
    "engine: {podLabels: {a: y}}": "YAML reads a bare on, off, yes or no as true or false",
    "engine: {podLabels: {team: 5}}": "engine.podLabels.team: 5 given",
    "engine: {port: 8100.5}": "8100.5 given, a whole number from 1 to 65535 needed",
    "engine: {replicas: 2:30}": '"2:30" given, a whole number',
    "engine: {extraEnv: {A: true}}": "write the word in quotes",
    "engine: {extraArgs: [--seed, 8]}": "engine.extraArgs[1]: 8 given, text needed; write it in quotes",
    # Quoted numbers and words.
    'engine: {port: "8100"}': "write the number alone, without quotes or a unit",
    'engine: {offload: {generatedTokens: "yes"}}': '"yes" given, auto, on or off needed; write on',
    'engine: {offload: {enabled: "true"}}': "write true, without quotes",
    'checks: {hook: "false"}': "write false, without quotes",
    # Units.
    "engine: {offload: {cpuBytes: 10g, numCpuBlocks: null}}": '"10g" is no size; write for example 512MiB',
    "engine: {offload: {cpuBytes: 10m, numCpuBlocks: null}}": "has a suffix for fractions of a byte",
    "engine: {offload: {cpuBytes: -1GiB, numCpuBlocks: null}}": "is negative",
    "engine: {offload: {cpuBytes: 200, numCpuBlocks: null}}": "200 B holds no chunk of 18.0 MiB",
    'engine: {offload: {cpuBytes: "", numCpuBlocks: null}}': '"" is no size',
    "engine: {offload: {cpuBytes: 1,5GiB, numCpuBlocks: null}}": "in quotes, as a comma ends it, or write 1.5 for 1,5",
    "engine: {offload: {cpuBytes: 200GiB}}": "both size the CPU tier; set one of them to null",
    "engine: {memory: {limit: 64}}": "64 B is too little",
    "engine: {offload: {requestWaitSeconds: 3s}}": "write the number alone, without quotes or a unit",
    "engine: {lifecycle: {startupTimeoutSeconds: 30m}}": '"30m" given, a number above 0',
    "engine: {cpu: {request: 8 cores}}": 'such as 2, "1.5" or 500m needed; write 8',
    "gateway: {resources: {limits: {cpu: 0}}}": "gateway.resources.limits.cpu: 0 given",
    TIER % "{type: redis, redis: {url: redis://r, ttlSeconds: 1d}}": '"1d" given, a whole number from 1',
    # Words, names and addresses that are nearly right.
    "engine: {accelerator: {preset: \u0441uda}}": "type it again: CYRILLIC SMALL LETTER ES is in it",
    "engine: {accelerator: {preset: CUDA}}": "write cuda",
    'engine: {accelerator: {preset: " cuda"}}': "remove the blank",
    "engine: {accelerator: {preset: h100}}": "set it to cuda",
    "engine: {accelerator: {preset: 910b}}": "set it to mindcluster",
    "gateway: {log: {level: WARN}}": "write warning",
    "gateway: {log: {level: trace}}": "debug, error, info or warning needed; write one of these",
    'engine: {model: {path: "Qwen/Qwen3-8B\\u200b"}}': "has ZERO WIDTH SPACE in it",
    "engine: {model: {path: Qwen/Qwen3\u20138B}}": "has EN DASH in it",
    "engine: {model: {path: https://huggingface.co/Qwen/Qwen3-8B}}": "write Qwen/Qwen3-8B",
    "gateway: {ingress: {enabled: true, host: https://llm.example}}": "write llm.example",
    "gateway: {ingress: {enabled: true, host: LLM.example}}": "write llm.example",
    "image: {registry: reg.local/}": "write reg.local",
    "clusterDomain: cluster.local.": "write cluster.local",
    "nameOverride: Chat": "write chat",
    "fullnameOverride: chat.prod": "write chat-prod",
    'listenAddress: "*"': '"*" given, 0.0.0.0 or :: needed; write one of these',
    TIER % "{type: Redis}": "write redis",
    TIER % '{type: redis, redis: {url: "redis:6379"}}': "is no address; write redis://host:6379/0",
    "engines: {Chat: {}}": "the key 'Chat' given, a part of object names (at most 24 small letters, digits and dashes)",
    # Maps, lists and null in one another's place.
    "engine: {model: Qwen/Qwen3-8B}": "write a map: model: {path: ...}",
    "engine: {tolerations: {key: a}}": "a map given, a list needed",
    "engine: {extraEnvVars: {A: b}}": "write a list: [{name: ...}]",
    "engine: {nodeSelector: [a]}": "write a map: nodeSelector: {key: ...}",
    "image: {pullSecrets: regcred}": "write a list: [{name: ...}]",
    "gateway: {auth: {keysSecret: keys}}": "write a map: keysSecret: {name: ...}",
    "engines: [{model: {path: Qwen/Qwen3-8B}}]": "engines: a list given, a map whose keys are each",
    "engines: {chat: null}": "write {} for a group that differs in nothing",
    "engine:": "engine: null given, a map needed; remove the line",
    "redis: true": "write a map: redis: {enabled: ...}",
    # Keys of other charts, and of another level.
    "image: {repository: a}": "use engine.image, gateway.image, redis.image or checks.image",
    "gateway: {auth: {enabled: true}}": "use gateway.auth.keysSecret and gateway.auth.saltSecret",
    "gateway: {autoscaling: {targetCPUUtilizationPercentage: 80}}": "use gateway.autoscaling.cpuPercent",
    "gateway: {livenessProbe: {}}": "use gateway.probes, as probes.liveness",
    "gateway: {serviceMonitor: {enabled: true}}": "use monitoring.serviceMonitor",
    "engine: {serviceAccountName: a}": "use engine.serviceAccount, as serviceAccount.name",
    "engine: {maxModelLen: 4096}": "use engine.model.maxLength",
    "engine: {gpuMemoryUtilization: 0.9}": "--gpu-memory-utilization",
    "engines: {a: {shm: {size: 1Gi}}}": "use engines.a.memory.sharedMemory",
    "servingEngineSpec: {modelSpec: []}": "use engine, or engines for several models",
    "persistence: {enabled: true}": "use engine.model.cache",
    "redis: {master: {persistence: {enabled: false}}}": "a Redis of your own by engine.offload.sharedTier.redis",
    TIER % "{type: nvme, path: /kv}": "use engine.offload.sharedTier.nvme.path",
    TIER % "{type: redis, redis: {host: r}}": "use engine.offload.sharedTier.redis.url",
    "values: {engine: {replicas: 3}}": "remove the level",
    "common: &c {replicas: 3}\nengine:\n  <<: *c\n": "call it x-common if it is your own, such as a YAML anchor",
    "x-c: &c {replcas: 3}\nengine:\n  <<: *c\n": "did you mean engine.replicas?",
    # A line break at an end.
    'engine: {model: {path: "Qwen/Qwen3-8B\\n"}}': "remove the line break",
    'engine: {offload: {weightsVersion: "3\\n"}}': "remove the line break",
    'engine: {nodeSelector: {"zone\\n": a}}': "the key 'zone' given with a blank or a line break at its end",
    'gateway: {podDisruptionBudget: {maxUnavailable: "50%\\n"}}': "remove the line break",
    'engine: {topologySpread: {topologyKey: "zone\\n"}}': "remove the line break",
    'engine: {extraArgs: ["--chat-template=/a\\n"]}': "remove the line break",
}
UNREADABLE = {
    "engine:\n  replicas: 2\n  replicas: 3\n": "replicas: given twice (line 3); keep one of the two",
    "engine: *missing": "undefined alias",
    "engine:\n\treplicas: 3": "indent with blanks, as YAML takes no tabs",
    "- engine": "a list given, a map of settings needed",
    "engine": "text alone given, a map of settings needed",
}
SETS = {
    "engine.nodeSelector.kubernetes.io/arch=arm64": "escape the dots of a key: kubernetes\\.io/arch=arm64",
    "gateway.ingress.annotations.nginx.ingress.kubernetes.io/proxy=1": "escape the dots of a key",
    "engine.tolerations[0].operator=in": "Exists, Equal, Lt, Gt or null needed; write one of these",
    "engine.extraArgs[1]=--enforce-eager": "engine.extraArgs[0]: null given, text needed; remove the entry; with --set",
    "engine.podLabels.team=5": "write it in quotes",
    "engines.chat=": "write a map: chat: {model: ...}",
}
# Helm reads these as what they mean.
RIGHT = (
    "engine: {port: 8100.0, replicas: 1e1}",
    "engine: {port: 08100}",
    "engine: {port: 0o17500}",
    "engine: {port: 1_000}",
    "engine: {offload: {enabled: y}}",
    "engine: {offload: {generatedTokens: yes, cpuBytes: 10 GiB, numCpuBlocks: null}}",
    "engine: {model: {servedName: 2026-11-27}}",
    "gateway: {replicas: 2.0}",
    'engine: {podAnnotations: {note: "two\\nlines\\n"}}',
    "engine: {extraArgs: ['--limit-mm-per-prompt={\"image\": 1}\n']}",
    "x-c: &c {replicas: 3}\nengine:\n  <<: *c\n",
)


def sentences(tmp_path: Path, text: str, *sets: str) -> str:
    file = tmp_path / "values.yaml"
    file.write_text(text)
    values = merged_values([file], [(each, False) for each in sets])
    return "\n".join(finding.sentence for finding in findings(values, Cluster((1, 32))))


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_is_refused_with_what_to_change(tmp_path, text):
    assert MISTAKES[text] in sentences(tmp_path, text)


@pytest.mark.parametrize("text", UNREADABLE)
def test_a_text_that_is_no_map_of_settings_is_refused(tmp_path, text):
    with pytest.raises(CommandError) as refused:
        sentences(tmp_path, text)

    assert UNREADABLE[text] in str(refused.value)


@pytest.mark.parametrize("assignment", SETS)
def test_a_wrong_set_is_refused(tmp_path, assignment):
    assert SETS[assignment] in sentences(tmp_path, "{}", assignment)


def test_a_comma_in_a_set_is_escaped(tmp_path):
    with pytest.raises(CommandError, match="for a comma in a value"):
        sentences(tmp_path, "{}", "engine.model.servedName=a,b")


@pytest.mark.parametrize("text", RIGHT)
def test_what_is_meant_is_taken(tmp_path, text):
    assert sentences(tmp_path, text) == ""
