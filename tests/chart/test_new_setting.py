"""A new setting takes its field in settings/, the code that reads it and a line of CHANGELOG.md (CONTRIBUTING.md).

So what only passes through stands nowhere else: templates, connector and engine service take whole sections.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from chart.rendering import laid_over, nested, render_many

from spillway_connector.config import ConnectorConfig
from spillway_connector.limits import TierLimits
from spillway_ctl.check.unread_rules import settings_of
from spillway_engine.chart_keys import camel_case_keys
from spillway_engine.settings_reader import read_settings
from spillway_gateway.config.settings import RoutingConfig
from spillway_settings.keys import own_keys
from spillway_settings.values.gateway import Routing
from spillway_settings.values.offload import ConnectorSettings, Offload, SharedTier, TransferSettings

# Section of `engine` -> the values that it is read with.
ENGINE_SECTIONS: dict[str, dict[str, Any]] = {
    "offload": {},
    "offload.sharedTier": {"type": "nvme"},
    "offload.sharedTier.nvme": {"type": "nvme"},
    "offload.sharedTier.redis": {"type": "redis", "redis": {"url": "redis://cache:6379/0"}},
}
GATEWAY_SECTIONS = (
    "connections", "timeouts", "health", "limits", "routing", "retention", "breaker", "continuation", "disaggregation",
    "admission", "cors", "index", "log", "audit", "tracing", "reload",
)  # fmt: skip


def test_the_templates_pass_it_to_the_process(tmp_path: Path) -> None:
    cases: dict[str, dict[str, Any]] = {
        path: laid_over(nested("engine.offload.sharedTier", tier), nested(f"engine.{path}.madeUp", 7))
        for path, tier in ENGINE_SECTIONS.items()
    }
    cases["gateway"] = {"gateway": {section: {"madeUp": 7} for section in GATEWAY_SECTIONS}}
    rendered = render_many(cases, tmp_path / "chart")

    for path in ENGINE_SECTIONS:
        engine = yaml.safe_load(rendered[path].one("ConfigMap", "engine")["data"]["engine.yaml"])
        assert at(engine, path)["madeUp"] == 7, path
    gateway = yaml.safe_load(rendered["gateway"].one("ConfigMap", "gateway")["data"]["gateway.yaml"])
    assert {section for section in gateway if "madeUp" in gateway[section]} == set(GATEWAY_SECTIONS)


def at(tree: Any, path: str) -> Any:
    for key in path.split("."):
        tree = tree[key]
    return tree


@pytest.mark.parametrize(
    ("model", "process", "own"),
    [
        (ConnectorSettings, ConnectorConfig, Offload),
        (TransferSettings, TierLimits, SharedTier),
        (Routing, RoutingConfig, Routing),
    ],
)
def test_a_process_has_it_without_a_declaration(model: type, process: type, own: type) -> None:
    assert issubclass(process, model) and issubclass(own, model)
    assert set(model.__struct_fields__) <= set(process.__struct_fields__)


def test_the_connector_and_the_engine_read_it_under_their_own_keys() -> None:
    class New(ConnectorSettings, frozen=True):
        made_up_seconds: float = 3

    connector = own_keys(New)
    engine = camel_case_keys(connector)

    assert read_settings(connector, {"made_up_seconds": 7}).made_up_seconds == 7
    assert read_settings(engine, {"madeUpSeconds": 7}).made_up_seconds == 7
    assert read_settings(engine, {}).made_up_seconds == 3


def test_one_of_a_tier_that_is_not_used_is_refused() -> None:
    unread = settings_of({"readBy": "engine.offload.sharedTier.type", "settings": ["engine.offload.sharedTier.*"]})

    assert {field.removeprefix("engine.offload.sharedTier.") for field in unread} == {
        "ioThreads", "lookupTimeoutSeconds", "loadTimeoutSeconds", "storeTimeoutSeconds", "loadQueueBytesMax",
        "storeQueueBytesMax", "storeQueueSecondsMax",
    }  # fmt: skip
