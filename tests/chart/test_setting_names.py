"""Messages of an engine in a cluster name settings by values that the chart has."""

from typing import Any

import pytest
import yaml
from chart.rendering import CHART, nested, render

from spillway_connector.setting_names import SettingNames
from spillway_engine.chart_keys import settings_tree
from spillway_engine.settings_reader import engine_settings
from spillway_engine.tier_settings import EncryptionSettings

VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
# Settings that the chart writes itself, or leaves to the engine service's default: operators cannot set them wrongly.
NOT_VALUES = {
    "name",
    "settingNames",
    "nodeRank",
    "leader",
    "offload.copyTable",
    "offload.cudaLibraryPath",
    "offload.nodeTier",
}


def engine_of(**values: Any) -> dict[str, Any]:
    rendered = render(CHART / "values-cpu.yaml", values=values)
    return yaml.safe_load(rendered.one("ConfigMap", "engine")["data"]["engine.yaml"])


def leaves(value: Any, path: str = "") -> list[str]:
    if isinstance(value, dict) and value:
        return [leaf for key, below in value.items() for leaf in leaves(below, f"{path}.{key}" if path else key)]
    return [path]


def has_value(path: str) -> bool:
    below: Any = VALUES
    for key in path.split("."):
        if not isinstance(below, dict) or key not in below:
            return False
        below = below[key]
    return True


def test_every_setting_of_an_engine_is_called_by_a_value() -> None:
    settings = engine_settings(engine_of())
    tree = settings_tree(settings)
    tree["offload"]["sharedTier"]["encryption"] = settings_tree(EncryptionSettings("a"))
    paths = [path for path in leaves(tree) if not any(f"{path}.".startswith(f"{own}.") for own in NOT_VALUES)]

    assert len(paths) > 60
    assert [path for path in paths if not has_value(settings.names.name(path))] == []


@pytest.mark.parametrize(
    ("values", "path", "name"),
    [
        ({}, "model.dtype", "engine.model.dtype"),
        ({}, "offload.sharedTier.redis.passwordEnv", "redis.existingSecret"),
        (
            nested("engine.offload.sharedTier.redis.url", "redis://cache") | {"redis": {"enabled": False}},
            "offload.sharedTier.redis.passwordEnv",
            "engine.offload.sharedTier.redis.existingSecret",
        ),
        ({"engines": {"chat": {}}}, "offload.numCpuBlocks", "engines.chat.offload.numCpuBlocks"),
        ({"engines": {"chat": {}}}, "host", "listenAddress"),
    ],
)
def test_names_follow_the_values(values: dict[str, Any], path: str, name: str) -> None:
    assert engine_settings(engine_of(**values)).names.name(path) == name


def test_only_the_names_are_written_that_differ() -> None:
    names = SettingNames(**engine_of()["settingNames"])

    assert all(name != names.others.replace("{path}", path) for path, name in names.names.items())
