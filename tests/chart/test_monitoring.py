"""Alerts and dashboards speak of metrics that exist, and every alert has its runbook."""

import json
import re

import pytest
from chart.helm_binaries import ROOT
from chart.rendering import CHART, render
from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from spillway_connector.metrics import ALL, Kind
from spillway_ctl.node_tier import metrics_text
from spillway_gateway.app import Gateway
from spillway_gateway.config.settings import parse_config
from spillway_gateway.metrics import GatewayMetrics

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
def own_series(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names of all series that gateway and connector export; of a histogram its buckets alone."""
    config = parse_config({"models": [{"name": "m", "engines": [{"name": "e", "url": "http://127.0.0.1:1"}]}]})
    text = Gateway(config, tmp_path_factory.mktemp("gateway") / "gateway.yaml").metrics.exposition().decode()
    suffixes = {"counter": "_total", "histogram": "_bucket"}
    gateway = {family.name + suffixes.get(family.type, "") for family in text_string_to_metric_families(text)}
    return gateway | {metric.name + ("_total" if metric.kind is Kind.COUNTER else "") for metric in ALL}


@pytest.fixture(scope="module")
def known_series(own_series: set[str]) -> set[str]:
    keeper = re.findall(r"^# TYPE (\S+)", metrics_text([], 0, {}), re.MULTILINE)
    return own_series | FOREIGN | set(keeper)


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


def test_an_engine_without_events_is_not_reported_as_deaf():
    """A model's name is a regular expression here, and its dots are dots."""
    engines = {
        "deaf": {"model": {"servedName": "deaf"}, "kvEvents": {"enabled": False}},
        "small": {"model": {"servedName": "Qwen2.5-7B"}},
        "large": {"model": {"servedName": "org/large"}},
    }
    rules = render(PRODUCTION, values={"engines": engines}).one("PrometheusRule")["spec"]["groups"][0]["rules"]

    (lost,) = (rule["expr"] for rule in rules if rule["alert"] == "SpillwayEventsLost")
    assert 'model=~"org/large|Qwen2\\\\.5-7B"' in lost


def test_a_model_that_sleeps_has_to_have_been_waited_for_before_it_is_reported():
    scaling = {"enabled": True, "trigger": "gateway", "minReplicas": 0}
    engines = {
        "small": {"model": {"servedName": "Qwen2.5-7B"}, "autoscaling": {**scaling, "wakeTimeoutSeconds": 400}},
        "large": {
            "model": {"servedName": "large"},
            "autoscaling": scaling,
            "lifecycle": {"startupTimeoutSeconds": 900},
        },
        "awake": {"model": {"servedName": "awake"}},
    }
    groups = render(PRODUCTION, values={"engines": engines}).one("PrometheusRule")["spec"]["groups"]

    (absent,) = (rule["expr"] for rule in groups[0]["rules"] if rule["alert"] == "SpillwayNoEngine")
    assert 'model=~"large|Qwen2\\\\.5-7B"}[900s])) == 0' in absent


def test_where_no_model_sleeps_every_one_without_an_engine_is_reported(rules):
    (absent,) = (rule["expr"] for rule in rules if rule["alert"] == "SpillwayNoEngine")

    assert 'model=~""}' in absent  # no series is without a model


@pytest.fixture(scope="module")
def board() -> dict:
    return json.loads(render(PRODUCTION).named("ConfigMap", "chat-spillway-dashboards")["data"]["spillway.json"])


def test_dashboard_shows_every_series_and_none_that_does_not_exist(board, own_series, known_series):
    charts = [panel for panel in board["panels"] if panel["type"] != "row"]
    asked = {name for panel in charts for target in panel["targets"] for name in SERIES.findall(target["expr"])}

    assert own_series <= asked <= known_series


def test_every_series_is_documented(own_series):
    """docs/metrics.md has each series by its whole name, or as `..._end` behind one that begins alike."""
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")

    def documented(name: str) -> bool:
        ends = [name[at:] for at, letter in enumerate(name) if letter == "_"]
        return f"`{name}`" in page or f"`{name}{{" in page or any(f"`...{end}`" in page for end in ends)

    assert [name for name in sorted(own_series) if not documented(re.sub("_(bucket|sum|count)$", "", name))] == []


def test_every_label_is_documented():
    """The row of a series has its labels; `..._end` in a row that begins with another series ends like the series."""
    rows = {}
    for line in (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8").splitlines():
        cells = line.strip("| ").split(" | ")
        if cells[0].startswith("`") and len(cells) > 2:
            rows |= {name.removeprefix("..."): cells[1] for name in re.findall(r"`([\w.]+)", cells[0])}
    own = {f"{metric.name}{'_total' * (metric.kind is Kind.COUNTER)}": metric.labels for metric in ALL}
    gateway = GatewayMetrics()
    for metric in (*gateway._children, *vars(gateway).values()):
        if isinstance(metric, Counter | Gauge | Histogram):
            (family,) = metric.describe()
            own[family.name + "_total" * (family.type == "counter")] = metric._labelnames

    def row(name: str) -> str:
        ends = [name[at:] for at, letter in enumerate(name) if letter == "_"]
        return next(rows[part] for part in (name, *ends) if part in rows)

    missing = {
        name: [label for label in labels if label not in re.findall(r"\w+", row(name))] for name, labels in own.items()
    }
    assert len(missing) > 60
    assert {name: labels for name, labels in missing.items() if labels} == {}


# A member of kv_transfer_params, utilities of EngineCore, and the systems and policies that benches compare.
SYSTEM = re.compile(r'^    "(spillway_\w+)": ', re.MULTILINE)
POLICY = re.compile(r'^        "(spillway_\w+)": lambda', re.MULTILINE)
COMPARED = {
    *SYSTEM.findall((ROOT / "bench" / "system" / "systems.py").read_text()),
    *SYSTEM.findall((ROOT / "bench" / "system" / "device_run.py").read_text()),
    *POLICY.findall((ROOT / "bench" / "routing.py").read_text()),
}
NO_SERIES = {"spillway_session", "spillway_promote", "spillway_settle", "spillway_weights"} | COMPARED


def test_series_that_the_pages_name_exist(own_series, known_series):
    """A name that ends in `_` is the beginning of several (`spillway_tier_*`)."""
    known = known_series | {name.removesuffix("_bucket") for name in own_series} | {"spillway_simulator_lag_seconds"}
    pages = [ROOT / "README.md", CHART / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = {name for page in pages for name in re.findall(r"\bspillway_[a-z_]+(?=[`{}\[* ])", page.read_text())}
    packages = {path.name for pattern in ("*", "services/*") for path in ROOT.glob(f"{pattern}/src/spillway_*")}
    others = named - known - packages - NO_SERIES

    assert "spillway_tier_lookups_total" in named and {"spillway_cpu", "spillway_pinned"} <= COMPARED
    assert [name for name in others if not (name.endswith("_") and any(one.startswith(name) for one in known))] == []


def test_panels_lie_beside_each_other(board):
    places = [panel["gridPos"] for panel in board["panels"]]

    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert len({(place["x"], place["y"]) for place in places}) == len(places)
    assert all(place["x"] + place["w"] <= 24 for place in places)


def test_monitors_find_a_port():
    rendered = render(PRODUCTION)
    service = rendered.one("Service", "gateway")
    (container,) = rendered.one("Deployment", "gateway")["spec"]["template"]["spec"]["containers"]
    monitor = rendered.one("ServiceMonitor")["spec"]

    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["endpoints"][0]["targetPort"] in [port["name"] for port in container["ports"]]
    pods = rendered.one("PodMonitor")["spec"]
    labels = rendered.one("StatefulSet", "engine")["spec"]["template"]["metadata"]["labels"]
    assert pods["selector"]["matchLabels"].items() <= labels.items()


def test_scaling_counts_requests_of_this_model():
    query = render(PRODUCTION).one("ScaledObject")["spec"]["triggers"][0]["metadata"]["query"]

    assert query == 'sum(vllm:num_requests_waiting{namespace="llm", model_name="Qwen3-14B"})'
