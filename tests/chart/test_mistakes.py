"""Mistakes that operators make, and the message each gets: where it is, what was given, what is needed, what to do.

mistakes.yaml is the table. One run of each Helm judges all of it with the chart's own templates, as a process for each
entry would cost a minute; a few entries go the whole way to show that such a verdict is the chart's.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart.helm_binaries import Helm, helms
from chart.rendering import CHART, RenderRefused, laid_over, render

from spillway_connector import native_keys
from spillway_engine import credentials
from spillway_engine.chart_keys import chart_key
from spillway_engine.errors import BudgetError, SettingsError
from spillway_engine.machine import Machine
from spillway_engine.model_shape import ModelShape
from spillway_engine.platform_facts import BLOCK_TOKENS_MULTIPLE
from spillway_engine.resolve import resolve_engine
from spillway_engine.settings_reader import engine_settings

TABLE: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("mistakes.yaml").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SERVICE = {"model": {"path": "/m", "maxLength": 32768}, "platform": "npu", "offload": {"numCpuBlocks": 64}}
WHOLE_WAY = ("misspelt section", "a default taken away", "password in the address", "one port twice")
# Helm's own merge of values is `spillway.overlay`: keys win, maps are merged, null removes a default.
JUDGE = """\
kind: Judged
verdicts:
{{- range $name, $given := .Values.cases }}
{{- $values := deepCopy $.Values.defaults }}
{{- include "spillway.overlay" (dict "base" $values "over" (deepCopy $given)) }}
{{- $root := dict "Values" $values "Release" $.Release "Chart" $.Chart "Files" $.Files "Capabilities" $.Capabilities }}
{{- $plan := dict }}
{{- include "spillway.makePlan" (dict "root" $root "plan" $plan) }}
  {{ $name | quote }}: {{ values $plan.problems | toJson }}
{{- end }}
"""
# Where it is; what is wrong; what to do.
FORM = re.compile(r"[a-zA-Z]+(\.[\w./-]+|\[\d+\])*( \w+)?[:, ].+(; .+|did you mean .+\?|: remove it.*)", re.DOTALL)


def judged(cases: dict[str, dict[str, Any]], helm: Helm, folder: Path) -> dict[str, list[str]]:
    """Name -> every problem that the chart finds in those values, all in one run of Helm."""
    (folder / "templates").mkdir(parents=True)
    for file in (CHART / "templates").glob("_*.tpl"):
        shutil.copy(file, folder / "templates")
    shutil.copytree(CHART / "files", folder / "files")
    shutil.copy(CHART / "Chart.yaml", folder)
    (folder / "templates" / "judged.yaml").write_text(JUDGE)
    return render(values={"defaults": VALUES, "cases": cases}, chart=folder, helm=helm).objects[0]["verdicts"]


@pytest.fixture(scope="module", params=helms(), ids=lambda helm: f"helm{helm.major}")
def verdicts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    cases = {name: case["values"] for name, case in TABLE.items()} | {"none": {}}
    return judged(cases, request.param, tmp_path_factory.mktemp("mistakes") / "spillway")


@pytest.mark.parametrize("mistake", TABLE)
def test_message(mistake: str, verdicts: dict[str, list[str]]) -> None:
    text = "\n".join(verdicts[mistake])

    for words in TABLE[mistake]["says"]:
        assert words in text
    assert "SECRET" not in text and " 0 B" not in text and "%!" not in text and "<nil>" not in text
    for problem in verdicts[mistake]:
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


def test_chart_and_connector_answer_keys_of_other_connectors_alike() -> None:
    keys = yaml.safe_load((CHART / "files" / "native-keys.yaml").read_text())

    assert keys["batchMemcpyVariable"] == native_keys.BATCH_MEMCPY_VARIABLE
    assert keys["withoutCounterpart"] == native_keys.WITHOUT_COUNTERPART
    assert {key: tuple(answer) for key, answer in keys["counterparts"].items()} == {
        key: (chart_key(setting), difference) for key, (setting, difference) in native_keys.COUNTERPARTS.items()
    }
    assert {setting for setting, _ in keys["counterparts"].values()} < VALUES["engine"]["offload"].keys()


def test_the_defaults_are_no_mistake(verdicts: dict[str, list[str]]) -> None:
    assert verdicts["none"] == []


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

    assert all(words in message for words in TABLE[mistake]["says"])
    assert "allOf" not in message


def test_every_mistake_is_told_at_once():
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
