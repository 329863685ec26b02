"""Mistakes that operators make: which of them Helm's schema refuses, which a render, which the engine service too.

mistakes.yaml is the table, and trial.yaml has those of a trial. `spillway check` refuses every row of the table
(test_checked_values.py), and Helm by values.schema.json those with a wrong type, word, bound or key. A render refuses
the few that harm a release even if the check did not run (charts/spillway/templates/_rules.tpl).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart.helm_binaries import Helm, helms
from chart.judging import MISTAKES, refused_by_schema
from chart.rendering import CHART, RenderRefused, laid_over, render

from spillway_ctl.check.chart_facts import facts
from spillway_ctl.check.unread_rules import settings_of
from spillway_engine.errors import BudgetError, SettingsError
from spillway_engine.machine import Machine
from spillway_engine.model_shape import ModelShape
from spillway_engine.resolve import resolve_engine
from spillway_engine.settings_reader import engine_settings

VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
BY_SCHEMA = {name: case for name, case in MISTAKES.items() if "refusedAt" in case}
BY_RENDER = {name: case for name, case in MISTAKES.items() if "renderSays" in case}
SERVICE = {"model": {"path": "/m", "maxLength": 32768}, "platform": "npu", "offload": {"numCpuBlocks": 64}}
TEMPLATES = [file for file in (CHART / "templates").rglob("*") if file.is_file()]
RULES_MAX = 15
# Of rules that no row breaks: a release's name (test_names.py), a megabyte of values.
OTHER_RULES = {
    "name": None,
    "hook": ({"gateway": {"podAnnotations": {"a": "b" * 1048576}}}, "set checks.hook: false and run spillway check"),
}
LINES_MAX, COLUMNS_MAX = 2621, 120


@pytest.mark.parametrize("helm", helms(), ids=lambda helm: f"helm{helm.major}")
def test_helm_names_the_setting_that_the_schema_refuses(helm: Helm, tmp_path: Path) -> None:
    verdicts = refused_by_schema({name: case["values"] for name, case in MISTAKES.items()}, helm, tmp_path / "spillway")

    assert {name for name, texts in verdicts.items() if texts} == BY_SCHEMA.keys()
    wrong = {
        name: verdicts[name]
        for name, case in BY_SCHEMA.items()
        if not all(place in "\n".join(verdicts[name]) for place in case["refusedAt"])
        or "SECRET" in json.dumps(verdicts[name])
    }
    assert wrong == {}


@pytest.mark.parametrize("mistake", BY_RENDER)
def test_a_render_refuses_it(mistake: str) -> None:
    case = MISTAKES[mistake]

    message = refusal(case["values"], helm=helms()[list(BY_RENDER).index(mistake) % 2])

    assert case["renderSays"] in message and "SECRET" not in message


def test_the_rules_of_the_templates_are_few_and_each_has_its_reason_and_a_row() -> None:
    """A new rule between values goes into services/ctl/src/spillway_ctl/check/."""
    text = (CHART / "templates" / "_rules.tpl").read_text()
    rules = re.findall(r'^\{\{/\* \d+\. .+?\*/\}\}\n\{\{- define "spillway\.rule\.(\w+)" -\}\}$', text, re.M | re.S)

    assert len(rules) == len(set(rules)) == text.count('{{- define "spillway.rule.') <= RULES_MAX
    assert {case["rule"] for case in BY_RENDER.values() if "rule" in case} == set(rules) - OTHER_RULES.keys()
    assert [file.name for file in TEMPLATES if re.search(r"[{( ](fail|required) ", file.read_text())] == ["_rules.tpl"]


@pytest.mark.parametrize("rule", [name for name, case in OTHER_RULES.items() if case])
def test_a_render_refuses_what_no_row_has(rule: str) -> None:
    values, said = OTHER_RULES[rule]

    assert said in refusal(values)


def test_the_templates_stay_short() -> None:
    lines = [line for file in TEMPLATES for line in file.read_text().splitlines()]

    assert len(lines) <= LINES_MAX
    assert [line for line in lines if len(line) > COLUMNS_MAX] == []


@pytest.mark.parametrize("mistake", [name for name, case in MISTAKES.items() if "service" in case])
def test_the_engine_service_refuses_it_too(mistake: str) -> None:
    """The service refuses it wherever it is configured: on a machine without the chart there is no render before its
    start."""
    tree = laid_over(SERVICE, MISTAKES[mistake]["service"])
    shape = ModelShape(36, 8, 128, None, "bfloat16", 40960, 0)
    machine = Machine("npu", frozenset(), (0,), 1 << 40, "cgroup limit", 1 << 40, 1 << 40)

    with pytest.raises((SettingsError, BudgetError)) as refused:
        resolve_engine(engine_settings(tree), shape, machine).require_fit()

    case, text = MISTAKES[mistake], str(refused.value)
    said = case.get("says") or case["refusedAt"][-1:]  # settings have the same names there, but for the section
    needed = [case["serviceSays"]] if "serviceSays" in case else [words.removeprefix("engine.") for words in said]
    assert [words for words in needed if words not in text] == [] and "SECRET" not in text


def test_the_engine_service_takes_what_is_no_mistake() -> None:
    shape = ModelShape(36, 8, 128, None, "bfloat16", 40960, 0)
    machine = Machine("npu", frozenset(), (0,), 1 << 40, "cgroup limit", 1 << 40, 1 << 40)

    resolve_engine(engine_settings(SERVICE), shape, machine).require_fit()


def test_sections_of_unread_settings_stand_for_all_of_theirs() -> None:
    rules = facts("unread-settings.yaml")
    unread = {(rule["readBy"], setting): default for rule in rules for setting, default in settings_of(rule).items()}

    assert len(unread) > 90
    assert {setting: value_at(setting) for _, setting in unread} == {each: unread[by, each] for by, each in unread}
    assert unread["engine.offload.sharedTier.type", "engine.offload.sharedTier.storeQueueSecondsMax"] == 5
    assert unread["engine.offload.sharedTier.type", "engine.offload.sharedTier.nvme.volume.size"] == "500GiB"
    assert not any(reader == setting for reader, setting in unread)
    for reader, _ in unread:
        value_at(reader)


def value_at(path: str) -> Any:
    here: Any = VALUES
    for key in path.split("."):
        here = here[key]
    return here


def test_every_rule_that_is_broken_is_said_at_once() -> None:
    values = yaml.safe_load("engine: {memory: {limit: 1GiB}, apiKeySecret: {name: k}}")
    values["gateway"] = {"auth": {"keysSecret": {"name": "k"}}}

    assert refusal(values).count("\n- ") == 3


def test_force_takes_numbers_that_are_too_small():
    values = yaml.safe_load("engine: {memory: {limit: 20GiB, sharedMemory: 1GiB, force: true}}")

    engine = render(values=values).one("StatefulSet", "engine")

    assert engine["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"] == "20480Mi"


def refusal(values: dict[str, Any], **options: Any) -> str:
    with pytest.raises(RenderRefused) as refused:
        render(values=values, **options)
    return str(refused.value)
