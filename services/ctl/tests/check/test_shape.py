"""Types, words and bounds in sentences."""

import json
from pathlib import Path

import pytest
import yaml

from spillway_ctl.check.chart_facts import CHART, Cluster
from spillway_ctl.check.judgement import findings


def sentences(values: object) -> str:
    return "\n".join(finding.sentence for finding in findings(values, Cluster()))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            "engine: {replicas: two}",
            'engine.replicas: "two" given, a whole number from 0 to 10000 needed; write the num',
        ),
        ("gateway: {replicas: 0}", "gateway.replicas: 0 given, a whole number from 1 to 10000 needed"),
        ("engine: {blockSize: 100}", "engine.blockSize: 100 given, a multiple of 16 of at least 16 needed"),
        ("engine: {accelerator: {preset: nvidia}}", "set it to cuda"),
        ("engine: {accelerator: {preset: gpu}}", "set it to cuda"),
        ("engine: {image: {tag: 1.10}}", "write it in quotes as you mean it: YAML reads 1.10 as the number 1.1"),
        ("engine: {model: {tokenizer: off}}", "write none: YAML reads a bare on, off, yes or no as true or false"),
        ("engine: {model: {servedName: [a, b]}}", "further names as model.aliases"),
        ("engine: {offload: false}", "write a map: offload: {enabled: ...}"),
        ("image: {pullPolicy: always}", "write Always"),
        ("engine: {nodeSelector: {kubernetes: {io/arch: arm64}}}", "escape the dots of a key"),
        ("engine: {offload: {prefillTokensPerSecond: 8k}}", 'prefillTokensPerSecond: "8k" given, a number above 0'),
        ('engine: {apiKeySecret: {name: "keys\\n"}}', "with a blank or a line break at its end"),
        ('gateway: {ingress: {tlsSecret: "llm\\n"}}', "with a blank or a line break at its end"),
        ("engine: {image: {tag: 1.0}}", "engine.image.tag: 1.0 given"),
        ("engines: {replicas: 2}", "write engines: {NAME: {replicas: ...}}, or engine.replicas for all groups"),
        ("engines: {model: {path: /m}}", "write engines: {NAME: {model: ...}}, or engine.model for all groups"),
        ("engine: {extraEnv: [{name: A}]}", "engine.extraEnv: a list given, a map whose keys are each the name of an"),
        ("engine: {lifecycle: null}", "engine.lifecycle: null given, a map needed; remove the line"),
    ],
)
def test_each_says_what_was_given_what_is_needed_and_what_to_do(values, expected):
    assert expected in sentences(yaml.safe_load(values))


def test_null_takes_away_no_default_that_is_needed():
    needed = json.loads(Path(CHART, "files", "needed-settings.json").read_text())
    accepted = []
    for section, keys in needed.items():
        for key in keys:
            values: object = None
            for step in reversed([*filter(None, section.split(".")), key]):
                values = {step: values}
            if "null" not in sentences(values):
                accepted.append(f"{section}.{key}")

    assert len(needed) > 60 and accepted == []
