"""Defaults that the chart and a process share are written once, in settings/values/: none of them is repeated."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import spillway_gateway.config.settings as gateway
from spillway_connector.config import ConnectorConfig, RedisStore, S3Store
from spillway_connector.limits import TierLimits
from spillway_engine.kv_transfer import KvTransferSettings
from spillway_engine.lora_settings import LoraSettings
from spillway_engine.settings import EngineSettings, KvEventsSettings, LifecycleSettings
from spillway_settings.byte_sizes import parse_byte_count
from spillway_settings.values.engine import Engine, Lora
from spillway_settings.values.gateway import Gateway
from spillway_settings.values.offload import Offload
from spillway_stack.settings import StackSettings

CHART = Gateway()
# A section of a process, and that of the chart with the same settings.
SECTIONS: list[tuple[type[Any], msgspec.Struct]] = [
    *((type(getattr(gateway.GatewayConfig(()), name)), getattr(CHART, name)) for name in (
        "connections", "timeouts", "health", "limits", "routing", "breaker", "admission", "index", "log", "audit",
        "reload", "continuation", "disaggregation", "tracing",
    )),
    (gateway.AuthConfig, CHART.auth),
    (gateway.SharedLimitsConfig, CHART.auth.shared_limits),
    (ConnectorConfig, Offload()),
    (TierLimits, Offload().shared_tier),
    (RedisStore, Offload().shared_tier.redis),
    (S3Store, Offload().shared_tier.s3),
    (EngineSettings, Engine()),
    (KvTransferSettings, Engine().kv_transfer),
    (StackSettings, Engine()),
    (StackSettings, CHART),
    (LifecycleSettings, Engine().lifecycle),
    (KvEventsSettings, Engine().kv_events),
    (LoraSettings, Lora()),
]  # fmt: skip


def written_defaults(section: type[Any]) -> Iterator[tuple[str, Any]]:
    """Setting of the section, and the number of its own that stands in its source as its default."""
    file = Path(str(__import__(section.__module__, fromlist=["_"]).__file__))
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ClassDef) and node.name == section.__name__:
            for line in node.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.value is not None:
                    yield line.target.id, line.value


def copies(own: dict[str, Any], chart: msgspec.Struct) -> set[str]:
    """Settings whose default is a number or a word that the chart has too; one is a number of its own.

    A word that YAML may read as true or false has another type in a process.
    """
    values = {name: value.value for name, value in own.items() if isinstance(value, ast.Constant)}
    return {
        name
        for name, value in values.items()
        if type(value) in (int, float, str) and value not in (1, "") and value == getattr(chart, name, None)
        if value not in ("auto", "on", "off")
    }


@pytest.mark.parametrize(("section", "chart"), SECTIONS, ids=lambda part: getattr(part, "__name__", None))
def test_no_number_of_the_chart_is_written_a_second_time(section: type[Any], chart: msgspec.Struct) -> None:
    assert set(getattr(section, "__struct_fields__", section.__annotations__)) & set(chart.__struct_fields__)
    assert copies(dict(written_defaults(section)), chart) == set()


def test_a_copy_is_found() -> None:
    assert copies({"port": ast.Constant(8000), "processes": ast.Constant(1)}, CHART) == {"port"}
    assert dict(written_defaults(gateway.HealthConfig)).keys() == {"ending_seconds"}


@pytest.mark.parametrize(("section", "chart"), SECTIONS[:13], ids=lambda part: getattr(part, "__name__", None))
def test_defaults_of_the_gateway_are_those_of_the_chart(section: type[Any], chart: msgspec.Struct) -> None:
    process = section()
    for name in set(section.__struct_fields__) & set(chart.__struct_fields__) - {"ending_seconds"}:
        given, ours = getattr(chart, name), getattr(process, name)
        assert ours == (parse_byte_count(given) if isinstance(given, str) and isinstance(ours, int) else given), name
