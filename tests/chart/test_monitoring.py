"""Alerts and dashboards speak of metrics that exist, and every alert has its runbook."""

import json
import re

import pytest
from chart.helm_binaries import ROOT
from chart.rendering import CHART, render
from prometheus_client.parser import text_string_to_metric_families

from spillway_connector.metrics import ALL, Kind
from spillway_gateway.app import Gateway
from spillway_gateway.config import parse_config

PRODUCTION = CHART / "examples" / "production.yaml"
# vLLM 0.23's own, and Prometheus' own.
FOREIGN = {
    "up",
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_queries_total",
    "vllm:external_prefix_cache_hits_total",
    "vllm:external_prefix_cache_queries_total",
    "vllm:num_requests_waiting",
    "vllm:num_requests_running",
}
SERIES = re.compile(r"\b((?:spillway_|vllm:)[a-z_]+)")


@pytest.fixture(scope="module")
def known_series() -> set[str]:
    config = parse_config({"models": [{"name": "m", "engines": [{"name": "e", "url": "http://127.0.0.1:1"}]}]})
    text = Gateway(config).metrics.exposition().decode()
    names: set[str] = set()
    for family in text_string_to_metric_families(text):
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
        names |= {family.name + suffix for suffix in suffixes}
    names |= {metric.name + ("_total" if metric.kind is Kind.COUNTER else "") for metric in ALL}
    return names | FOREIGN


@pytest.fixture(scope="module")
def rules() -> list[dict]:
    return render(PRODUCTION).one("PrometheusRule")["spec"]["groups"][0]["rules"]


def test_alerts_ask_for_series_that_exist(rules, known_series):
    for rule in rules:
        assert set(SERIES.findall(rule["expr"])) <= known_series, rule["alert"]


def test_alerts_ask_for_this_release_alone(rules):
    jobs = {'namespace="llm",job="chat-spillway-gateway"', 'namespace="llm",job="llm/chat-spillway-engine"'}

    for rule in rules:
        selectors = re.findall(r"(?:up|spillway_[a-z_]+)\{([^}]*)\}", rule["expr"])
        assert selectors, rule["alert"]
        assert all(any(selector.startswith(job) for job in jobs) for selector in selectors), rule["expr"]
        assert not re.search(r"[A-Z]{3,}_[A-Z]+", rule["expr"] + rule["for"])


def test_every_alert_has_its_runbook(rules):
    headings = re.findall(r"^#+ (\w+)$", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE)

    for rule in rules:
        assert rule["alert"] in headings, f"docs/operations.md has no section {rule['alert']}"
        assert (
            rule["annotations"]["runbook_url"]
            == f"https://docs.example.com/spillway/operations#{rule['alert'].lower()}"
        )
    described = [heading for heading in headings if heading.startswith("Spillway") and heading != "Spillway"]
    assert sorted(described) == sorted(rule["alert"] for rule in rules)


def test_dashboard_asks_for_series_that_exist(known_series):
    board = json.loads(render(PRODUCTION).named("ConfigMap", "chat-spillway-dashboards")["data"]["spillway.json"])
    asked = {
        name for panel in board["panels"] for target in panel["targets"] for name in SERIES.findall(target["expr"])
    }

    assert asked <= known_series
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_monitors_find_a_port():
    rendered = render(PRODUCTION)
    service = rendered.one("Service", "gateway")
    monitor = rendered.one("ServiceMonitor")["spec"]

    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["endpoints"][0]["port"] in [port["name"] for port in service["spec"]["ports"]]
    pods = rendered.one("PodMonitor")["spec"]
    labels = rendered.one("StatefulSet", "engine")["spec"]["template"]["metadata"]["labels"]
    assert pods["selector"]["matchLabels"].items() <= labels.items()


def test_scaling_counts_requests_of_this_model():
    query = render(PRODUCTION).one("ScaledObject")["spec"]["triggers"][0]["metadata"]["query"]

    assert query == 'sum(vllm:num_requests_waiting{namespace="llm", model_name="Qwen3-14B"})'
