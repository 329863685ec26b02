"""Keys that are no settings: where each message leads."""

import pytest
import yaml

from spillway_ctl.check.chart_facts import Cluster
from spillway_ctl.check.judgement import findings


def sentences(text: str) -> str:
    return "\n".join(finding.sentence for finding in findings(yaml.safe_load(text), Cluster()))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ("engine: {offload: {numCPUBlock: 4}}", "did you mean engine.offload.numCpuBlocks?"),
        ("engine: {replcas: 3}", "did you mean engine.replicas?"),
        ("numCpuBlocks: 4", "did you mean engine.offload.numCpuBlocks?"),
        ("engine: {numCpuBlocks: 4}", "did you mean engine.offload.numCpuBlocks?"),
        ("engines: {a: {numCpuBlocks: 4}}", "did you mean engines.a.offload.numCpuBlocks?"),
        ("engine: {resources: {}}", "use engine.memory.limit, engine.cpu and engine.accelerator"),
        ("engines: {a: {resources: {}}}", "use engines.a.memory.limit"),
        ("engine: {accelerator: {type: gpu}}", "use engine.accelerator.preset"),
        ("engine: {replicaCount: 2}", "use engine.replicas"),
        ("replicaCount: 2", "use engine.replicas and gateway.replicas"),
        ("gateway: {replicaCount: 2}", "use gateway.replicas"),
        ("gateway: {extraEnv: {}}", "use gateway.extraEnvVars"),
        ("gateway: {args: []}", "takes no arguments"),
        ("engine: {args: []}", "use engine.extraArgs"),
        ("engine: {env: []}", "use engine.extraEnvVars"),
        ("envFrom: []", "engine.envFrom or gateway.envFrom"),
        ("podSecurityContext: {}", "use engine.podSecurityContext and gateway.podSecurityContext"),
        ("imagePullSecrets: []", "use image.pullSecrets"),
        ("redis: {password: SECRET}", "use redis.existingSecret, the name of a Secret"),
        ("engine: {model: {name: x}}", "use engine.model.path"),
        ("gateway: {tracing: {enabled: true}}", "use gateway.tracing.otlpEndpoint"),
        ("engine: {offload: {xyz: 1}}", "known here: "),
    ],
)
def test_the_message_names_the_setting_that_was_meant(values, expected):
    text = sentences(values)

    assert expected in text and "no such setting" in text and "SECRET" not in text


@pytest.mark.parametrize("values", ["spillway: {engine: {replicas: 2}}", "chat: {gateway: {}, redis: {enabled: true}}"])
def test_a_level_of_a_parent_chart_is_told_from_a_misspelt_key(values):
    text = sentences(values)

    assert "remove the level" in text and "spillway check --part" in text


def test_keys_of_the_operators_own_are_let_through_anywhere():
    assert sentences("x-common: &a {replicas: 3}\nengine: {<<: *a, x-note: why}") == ""
