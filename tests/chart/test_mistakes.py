"""Mistakes that operators make, and the message each gets: where it is, what was given, what is needed, what to do.

mistakes.yaml is the table. Helm refuses types, words, bounds and names of keys by values.schema.json, in words of its
own; what that takes the templates judge. A few entries go the whole way to show that such a verdict is the chart's.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart.helm_binaries import Helm, helms
from chart.judging import refused_by_schema, refused_by_templates
from chart.rendering import CHART, RenderRefused, laid_over, render

from spillway_connector.native_keys import BATCH_MEMCPY_VARIABLE
from spillway_engine import credentials
from spillway_engine.errors import BudgetError, SettingsError
from spillway_engine.machine import Machine
from spillway_engine.model_shape import ModelShape
from spillway_engine.platform_facts import BLOCK_TOKENS_MULTIPLE
from spillway_engine.resolve import resolve_engine
from spillway_engine.settings_reader import engine_settings

TABLE: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("mistakes.yaml").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
BY_SCHEMA = {name: case for name, case in TABLE.items() if "refusedAt" in case}
BY_TEMPLATES = {name: case for name, case in TABLE.items() if "says" in case}
SHARES = 6  # of the table, which several processes may judge
SERVICE = {"model": {"path": "/m", "maxLength": 32768}, "platform": "npu", "offload": {"numCpuBlocks": 64}}
WHOLE_WAY = ("misspelt section", "a default taken away", "password in the address", "one port twice")
# Where it is; what is wrong; what to do.
FORM = re.compile(r"[a-zA-Z]+(\.[\w./-]+|\[\d+\])*( \w+)?[:, ].+(; .+|did you mean .+\?|: remove it.*)", re.DOTALL)


def test_every_mistake_is_refused_by_one_of_the_two() -> None:
    assert BY_SCHEMA.keys() | BY_TEMPLATES.keys() == TABLE.keys() and not BY_SCHEMA.keys() & BY_TEMPLATES.keys()


@pytest.mark.parametrize("helm", helms(), ids=lambda helm: f"helm{helm.major}")
def test_helm_names_the_setting_that_the_schema_refuses(helm: Helm, tmp_path: Path) -> None:
    verdicts = refused_by_schema({name: case["values"] for name, case in TABLE.items()}, helm, tmp_path / "spillway")

    assert {name for name, texts in verdicts.items() if texts} == BY_SCHEMA.keys()
    wrong = {
        name: verdicts[name]
        for name, case in BY_SCHEMA.items()
        if not all(place in "\n".join(verdicts[name]) for place in case["refusedAt"])
        or "SECRET" in json.dumps(verdicts[name])
    }
    assert wrong == {}


@pytest.mark.parametrize("share", range(SHARES))
def test_messages_of_the_templates(share: int, tmp_path: Path) -> None:
    names = list(BY_TEMPLATES)[share::SHARES]
    verdicts = refused_by_templates({name: TABLE[name]["values"] for name in names}, helms()[1], tmp_path / "spillway")

    for name in names:
        text = "\n".join(verdicts[name])
        for words in TABLE[name]["says"]:
            assert words in text, name
        assert not any(word in text for word in ("SECRET", " 0 B", "%!", "<nil>")), name
        for problem in verdicts[name]:
            assert FORM.fullmatch(problem), problem


@pytest.mark.parametrize("mistake", [name for name, case in TABLE.items() if "service" in case])
def test_the_engine_service_refuses_it_too(mistake: str) -> None:
    """Wherever it is configured: on a machine without the chart there is no render before its start."""
    tree = laid_over(SERVICE, TABLE[mistake]["service"])
    shape = ModelShape(36, 8, 128, None, "bfloat16", 40960, 0)
    machine = Machine("npu", frozenset(), (0,), 1 << 40, "cgroup limit", 1 << 40, 1 << 40)

    with pytest.raises((SettingsError, BudgetError)) as refused:
        resolve_engine(engine_settings(tree), shape, machine).require_fit()

    assert TABLE[mistake]["serviceSays"] in str(refused.value) and "SECRET" not in str(refused.value)


def test_the_engine_service_takes_what_is_no_mistake() -> None:
    shape = ModelShape(36, 8, 128, None, "bfloat16", 40960, 0)
    machine = Machine("npu", frozenset(), (0,), 1 << 40, "cgroup limit", 1 << 40, 1 << 40)

    resolve_engine(engine_settings(SERVICE), shape, machine).require_fit()


def test_chart_and_engine_service_go_by_the_same_facts() -> None:
    looks = yaml.safe_load((CHART / "files" / "credentials.yaml").read_text())
    presets = yaml.safe_load((CHART / "files" / "accelerators.yaml").read_text())

    assert looks["name"] == credentials.NAME.pattern
    assert looks["value"] == credentials.VALUE.pattern.replace('\\"', '"')
    assert {each["platform"]: each["blockTokensMultiple"] for each in presets.values()} == BLOCK_TOKENS_MULTIPLE


def test_the_chart_knows_the_variable_that_does_nothing() -> None:
    assert f'$variable := "{BATCH_MEMCPY_VARIABLE}"' in (CHART / "templates" / "_ascend.tpl").read_text()


def test_defaults_of_unread_settings_are_those_of_the_values() -> None:
    rules = yaml.safe_load((CHART / "files" / "unread-settings.yaml").read_text())
    settings = {setting: default for rule in rules for setting, default in rule["settings"].items()}

    assert len(settings) > 90
    assert {setting: value_at(setting) for setting in settings} == settings
    for rule in rules:
        value_at(rule["readBy"])


def value_at(path: str) -> Any:
    here: Any = VALUES
    for key in path.split("."):
        here = here[key]
    return here


@pytest.mark.parametrize("helm", helms(), ids=lambda helm: f"helm{helm.major}")
@pytest.mark.parametrize("mistake", WHOLE_WAY)
def test_a_render_is_refused_with_the_same_words(mistake: str, helm: Helm) -> None:
    message = refusal(TABLE[mistake]["values"], helm=helm)

    case = TABLE[mistake]
    # Helm 4 writes /a/b for a.b.
    assert all(words in message.replace("/", ".") for words in case.get("says") or case["refusedAt"])


def test_every_mistake_is_verdicts_at_once():
    message = refusal(yaml.safe_load("engine: {tensorParallelSize: 3, memory: {limit: 1GiB}, extraEnv: {A_TOKEN: x}}"))

    assert message.count("\n- ") == 4


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ("engine: {autoscaling: {enabled: true}}", "keda.sh/v1alpha1/ScaledObject"),
        ("monitoring: {podMonitor: {enabled: true}}", "monitoring.coreos.com/v1/PodMonitor"),
        ("monitoring: {serviceMonitor: {enabled: true}}", "monitoring.coreos.com/v1/ServiceMonitor"),
        (
            "monitoring: {alerts: {enabled: true}, serviceMonitor: {enabled: true}}",
            "monitoring.coreos.com/v1/PrometheusRule",
        ),
        ("gateway: {httpRoute: {enabled: true, parentRefs: [{name: a}]}}", "gateway.networking.k8s.io/v1/HTTPRoute"),
    ],
)
def test_kinds_that_the_cluster_lacks(values, kind):
    message = refusal(yaml.safe_load(values), kinds=())

    assert "install" in message and f"-a {kind}" in message
    monitors = [kind, "monitoring.coreos.com/v1/ServiceMonitor"]
    assert render(values=yaml.safe_load(values), kinds=monitors).of_kind(kind.rsplit("/", 1)[1])


def test_force_takes_numbers_that_are_too_small():
    values = yaml.safe_load("engine: {memory: {limit: 20GiB, sharedMemory: 1GiB, force: true}}")

    engine = render(values=values).one("StatefulSet", "engine")

    assert engine["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"] == "20480Mi"


def refusal(values: dict[str, Any], **options: Any) -> str:
    with pytest.raises(RenderRefused) as refused:
        render(values=values, **options)
    return str(refused.value)
