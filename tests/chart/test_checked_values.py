"""`spillway check` on the table of mistakes, on right values, and on a cluster that lacks what they need."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart.helm_binaries import Helm, helms
from chart.judging import MISTAKES, TABLE, TRIAL
from chart.rendering import CUSTOM_KINDS, VALUES_FILES, render
from chart.test_documented_values import PAGES, fragments
from lanes.rules import ROOT

from spillway_ctl.check.chart_facts import Cluster
from spillway_ctl.check.finding import Finding
from spillway_ctl.check.group import group_of
from spillway_ctl.check.judgement import findings
from spillway_ctl.check.typed_values import engine_groups, laid_out, typed
from spillway_ctl.check.values_files import read_values

UNUSUAL: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("unusual.yaml").read_text())
CLUSTER = Cluster((1, 32), frozenset(CUSTOM_KINDS), "chat", "llm")
REPORT = ROOT / "build" / "mistakes.md"
# Where it is; what is wrong; what to do.
FORM = re.compile(r"\w+(\.[\w./-]+|\[\d+\])*( \w+)?[:, ].+; .+", re.DOTALL)


@pytest.fixture(scope="module")
def verdicts() -> dict[str, list[Finding]]:
    return {name: findings(case["values"], CLUSTER) for name, case in MISTAKES.items()}


def test_every_mistake_is_refused_in_its_words(verdicts: dict[str, list[Finding]]) -> None:
    unclear = {}
    for name, case in MISTAKES.items():
        if "startSays" in case or "taken" in case:  # startSays: services/engine/tests/vllm/test_server_contract.py
            continue
        text = "\n".join(finding.sentence for finding in verdicts[name])
        # Helm writes a.0.b for a[0].b.
        places = [re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", place) for place in case.get("refusedAt", [])]
        needed = case.get("says") or case.get("notes") or places
        if not verdicts[name] or not all(words in text for words in needed):
            unclear[name] = text

    assert unclear == {}


def test_a_sentence_has_its_setting_its_remedy_and_no_secret(verdicts: dict[str, list[Finding]]) -> None:
    sentences = [finding.sentence for found in verdicts.values() for finding in found]

    assert [text for text in sentences if not FORM.fullmatch(text)] == []
    assert [text for text in sentences if re.search(r"SECRET|None|\{|<", text) and "SECRET" in text] == []


def test_each_mistake_by_the_place_that_refuses_it_first(verdicts: dict[str, list[Finding]]) -> None:
    """Writes the table of all mistakes, with counts; a row that may be right is taken with a note, or with a reason."""
    places = {name: place(case, verdicts[name]) for name, case in MISTAKES.items()}

    write_report(places, verdicts)
    assert [name for name in TABLE if places[name] == "none"] == []
    assert {name for name in TRIAL if places[name] == "none"} == {name for name in TRIAL if "taken" in TRIAL[name]}
    assert {name for name in TRIAL if places[name] == "note"} == {name for name in TRIAL if "notes" in TRIAL[name]}


def place(case: dict[str, Any], found: list[Finding]) -> str:
    """The first in the order of an installation; `note`: the check says it, and takes the values all the same."""
    if "refusedAt" in case:  # by Helm: test_mistakes.py
        return "schema"
    if "renderSays" in case:
        return "template"
    if any(not finding.is_note for finding in found):
        return "check"
    if "startSays" in case:
        return "start"
    return "note" if found else "none"


def write_report(places: dict[str, str], verdicts: dict[str, list[Finding]]) -> None:
    lines = []
    for title, rows in (("The table of mistakes", TABLE), ("Mistakes of the trial", TRIAL)):
        counts = Counter(places[name] for name in rows)
        total = ", ".join(f"{each} {counts[each]}" for each in ("schema", "template", "check", "start", "note", "none"))
        lines += [f"# {title}", "", f"{len(rows)} rows: {total}.", ""]
        lines += ["| place | mistake | sentences |", "| --- | --- | --- |"]
        for name, case in rows.items():
            sentences = [finding.sentence for finding in verdicts[name]]
            said = "<br>".join(sentences or case.get("startSays", []) or [case.get("taken", "")])
            lines.append(f"| {places[name]} | {name} | {said.replace('|', '&#124;')} |")
        lines.append("")
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text("\n".join(lines))


@pytest.mark.parametrize("file", VALUES_FILES, ids=lambda file: file.name)
def test_the_charts_own_values_are_right(file: Path) -> None:
    assert findings(yaml.safe_load(file.read_text()), CLUSTER) == []


@pytest.mark.parametrize("page", PAGES)
def test_documented_values_are_right(page: str) -> None:
    for values in fragments((ROOT / page).read_text()):
        assert mistakes(values, CLUSTER) == [], values


def test_unusual_values_are_right() -> None:
    found = {name: mistakes(values, Cluster(None, frozenset(CUSTOM_KINDS))) for name, values in UNUSUAL.items()}

    assert {name: each for name, each in found.items() if each} == {}


def mistakes(values: dict[str, Any], cluster: Cluster) -> list[Finding]:
    return [finding for finding in findings(values, cluster) if not finding.is_note]


SCALARS = """
    1.10 0.30 0123 08100 0o17500 0b101 0x1F 1_000 1e1 12e9 -5 +5 .5 5. 2:30 2026-11-27 8100.0 1.5e3 on off yes no y n
    Y N Yes YES yEs true True tRue false ~ null Null none 10G 10GiB 0. 00 0_1 1__0 -0x1f 1e+3 1.e3 0.0
"""


@pytest.mark.parametrize("helm", helms(), ids=lambda helm: f"helm{helm.major}")
def test_a_text_is_read_as_helm_reads_it(helm: Helm, tmp_path: Path) -> None:
    values = "".join(f"k{at}: [{text}]\n" for at, text in enumerate(SCALARS.split()))
    (tmp_path / "templates").mkdir()
    (tmp_path / "Chart.yaml").write_text("{apiVersion: v2, name: read, version: 0.1.0}")
    (tmp_path / "templates" / "read.yaml").write_text("kind: Read\nread: {{ .Values | toJson | quote }}\n")
    (tmp_path / "given.yaml").write_text(values)

    read = json.loads(render(tmp_path / "given.yaml", chart=tmp_path, helm=helm).objects[0]["read"])

    assert read == read_values(values, "given.yaml")


@pytest.mark.parametrize("file", VALUES_FILES, ids=lambda file: file.name)
def test_memory_of_a_pod_is_what_the_chart_computes(file: Path) -> None:
    """The one rule that a render needs too: it sizes the pods."""
    assert_same_memory(yaml.safe_load(file.read_text()))


def test_quantised_weights_are_known_by_the_same_names() -> None:
    paths = ["Qwen/Qwen2.5-7B-Instruct-AWQ", "Qwen/Qwen3-8B-FP8", "a/meta-llama-3.1-8b-instruct-quantized.w8a8"]
    engines = {
        f"m{key}": {"model": {"path": path, "servedName": f"m{key}"}, "accelerator": {"preset": "cpu"}}
        for key, path in enumerate(paths)
    }
    assert_same_memory({"engines": engines, "gateway": {"resources": {"limits": {"memory": "4GiB"}}}})


def assert_same_memory(values: dict[str, Any]) -> None:
    tree = laid_out(values)
    rendered = {
        item["metadata"]["name"]: json.loads(item["data"]["memory.json"])
        for item in render(values=values).of_kind("ConfigMap", "engine")
    }

    for key, engine in engine_groups(tree).items():
        group, found = group_of(key, engine, typed(tree), CLUSTER)
        memory = rendered[group.name]
        assert found == []
        assert group.memory.row == memory["cpuRowBytes"] and group.memory.tier == memory["cpuTierBytes"]
        assert group.memory.needed == memory["podNeedsBytes"] and group.memory.limit == memory["memoryLimitBytes"]
        assert group.memory.shared_memory == memory["sharedMemoryBytes"]


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
        (
            "{gateway: {picker: {enabled: true}}, networkPolicy: {engineFrom: [{podSelector: {}}]}}",
            "inference.networking.k8s.io/v1/InferencePool",
        ),
    ],
)
def test_kinds_that_the_cluster_lacks(values: str, kind: str) -> None:
    given = yaml.safe_load(values)

    lacking = "\n".join(each.sentence for each in findings(given, Cluster((1, 32), frozenset())))

    assert "install" in lacking and kind in lacking
    assert mistakes(given, CLUSTER) == []
    assert render(values=given).of_kind(kind.rsplit("/", 1)[1])
