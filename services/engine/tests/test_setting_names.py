"""The same mistake, named by each of the three places in which an engine is configured."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spillway_connector.setting_names import PLAIN_NAMES, SettingNames
from spillway_engine.chart_keys import settings_tree
from spillway_engine.errors import ModelShapeError, SettingsError
from spillway_engine.machine import Machine
from spillway_engine.memory_budget import plan_memory
from spillway_engine.model_shape import ModelShape, load_model_shape
from spillway_engine.pod_channel import ENVIRONMENT_VARIABLE, PodBrief
from spillway_engine.settings import EngineSettings
from spillway_engine.settings_reader import engine_settings
from spillway_engine.tier_files import require_tier_files
from spillway_engine.tier_settings import RedisTierSettings, SharedTierSettings

CHART: dict[str, Any] = {
    "others": "engines.chat.{path}",
    "names": {"offload.sharedTier.redis.passwordEnv": "engines.chat.offload.sharedTier.redis.existingSecret"},
}
MAKE: dict[str, Any] = {
    "others": "ENGINE_SET={path}",
    "separator": "=",
    "names": {
        "model.dtype": "DTYPE",
        "model.maxLength": "MAX_LENGTH",
        "deviceBlocks": "DEVICE_BLOCKS",
        "offload.enabled": "OFFLOAD",
        "offload.numCpuBlocks": "NUM_CPU_BLOCKS",
        "extraArgs": "ENGINE_ARGS",
    },
}
SHAPE = ModelShape(30, 3, 64, None, "bfloat16", 8192, 0)
SMALL = Machine("cpu", frozenset(), (0, 1), 12 << 30, "MemAvailable", 100 << 20, 6 << 30)


def tree(source: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    given = {"model": {"path": "/models/x"}, "offload": {"numCpuBlocks": 64}, **more}
    return given if source is None else {**given, "settingNames": source}


@pytest.mark.parametrize(
    ("names", "name", "given", "off"),
    [
        (PLAIN_NAMES, "offload.numCpuBlocks", "offload.numCpuBlocks: 8", "offload.enabled: false"),
        (
            SettingNames(others="engine.{path}"),
            "engine.offload.numCpuBlocks",
            "engine.offload.numCpuBlocks: 8",
            "engine.offload.enabled: false",
        ),
        (SettingNames(**MAKE), "NUM_CPU_BLOCKS", "NUM_CPU_BLOCKS=8", "OFFLOAD=off"),
    ],
)
def test_a_setting_is_called_as_its_reader_writes_it(names: SettingNames, name: str, given: str, off: str) -> None:
    assert names.name("offload.numCpuBlocks") == name
    assert names.given("offload.numCpuBlocks", 8) == given
    assert names.given("offload.enabled", False) == off


def test_an_item_of_a_list_is_called_by_its_list() -> None:
    assert SettingNames(**MAKE).name("extraArgs[2]") == "ENGINE_ARGS[2]"
    assert SettingNames(**MAKE).given("offload.blocksPerChunk", 2) == "ENGINE_SET=offload.blocksPerChunk=2"


@pytest.mark.parametrize(
    ("source", "more", "message"),
    [
        (MAKE, {"blockSize": 100}, "ENGINE_SET=blockSize=100 is not a multiple of 16"),
        (
            MAKE,
            {"model": {"path": "/x", "dtype": "fp8"}},
            "DTYPE: 'fp8' given, auto, bfloat16, float16 or float32",
        ),
        (MAKE, {"extraArgs": ["--dtype=half"]}, "ENGINE_ARGS: --dtype is decided by DTYPE; change that instead"),
        (
            MAKE,
            {"offload": {}},
            "OFFLOAD=on needs the size of the CPU tier; set NUM_CPU_BLOCKS (or ENGINE_SET=offload.c",
        ),
        (CHART, {"blockSize": 100}, "engines.chat.blockSize: 100 is not a multiple of 16"),
        (CHART, {"kvEvents": {"port": 8100}}, "engines.chat.kvEvents.port: 8100 is also engines.chat.port"),
        (
            CHART,
            {"lifecycle": {"stopTimeoutSeconds": 0}},
            "engines.chat.lifecycle.stopTimeoutSeconds: 0 given, a finite number of at least 1",
        ),
        (CHART, {"modle": {}}, "engines.chat.modle: unknown setting; did you mean 'model'?"),
        (
            CHART,
            {"offload": {"numCpuBlocks": 4, "sharedTier": {"type": "redis", "redis": {"url": "http://h"}}}},
            "engines.chat.offload.sharedTier.redis.url: 'http://h' is not understood",
        ),
        (None, {"extraArgs": ["--dtype=half"]}, "extraArgs: --dtype is decided by model.dtype; change that instead"),
    ],
)
def test_a_refusal_names_the_setting_of_its_source(
    source: dict[str, Any] | None, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError) as refused:
        engine_settings(tree(source, **more))

    assert message in str(refused.value)


def test_memory_that_does_not_fit_names_the_setting_of_its_source() -> None:
    def problem(source: dict[str, Any] | None) -> str:
        (problem_text,) = plan_memory(engine_settings(tree(source)), SHAPE, SMALL).problems
        return problem_text

    assert problem(None).startswith("offload.numCpuBlocks: 64 needs ")
    assert "; set offload.numCpuBlocks <= " in problem(None)
    assert problem(MAKE).startswith("NUM_CPU_BLOCKS=64 needs ")
    assert "; set NUM_CPU_BLOCKS <= " in problem(MAKE)
    assert "; set engines.chat.offload.numCpuBlocks <= " in problem(CHART)


def test_lengths_and_warnings_name_the_setting_of_their_source() -> None:
    given = engine_settings(tree(MAKE, model={"path": "/x", "maxLength": 9000}, deviceBlocks=2))
    budget = plan_memory(given, SHAPE, replace(SMALL, shared_memory_free_bytes=6 << 30))

    assert budget.problems == (
        "MAX_LENGTH=9000 tokens, the model's config.json allows 8192; set MAX_LENGTH <= 8192, or stretch the model "
        "by --hf-overrides in ENGINE_ARGS",
        "DEVICE_BLOCKS=2 of 128 tokens hold no prompt of MAX_LENGTH=9000; set DEVICE_BLOCKS >= 72 or MAX_LENGTH <= 128",
    )
    assert budget.warnings[0].endswith("set NUM_CPU_BLOCKS >= 71")


def test_a_missing_secret_names_the_value_of_the_chart() -> None:
    tier = SharedTierSettings(type="redis", redis=RedisTierSettings(url="redis://h", password_env="PW"))
    with pytest.raises(SettingsError, match="existingSecret: the environment variable PW is not set"):
        require_tier_files(tier, {}, names=SettingNames(**CHART))


def test_a_model_that_is_not_there_names_the_variable(tmp_path: Path) -> None:
    with pytest.raises(ModelShapeError, match=f"^MODEL={tmp_path} has no config.json"):
        load_model_shape(str(tmp_path), SettingNames(names={"model.path": "MODEL"}, separator="="))


def test_the_names_survive_every_way_that_settings_take() -> None:
    settings = engine_settings(tree(MAKE))

    assert settings.names == SettingNames(**MAKE)
    assert engine_settings(settings_tree(settings)) == settings
    brief = PodBrief(names=settings.names)
    assert PodBrief.from_environment(brief.to_environment()) == brief
    assert PodBrief.from_environment({ENVIRONMENT_VARIABLE: ""}).names == PLAIN_NAMES


def test_every_setting_has_a_name_of_its_own_in_every_source() -> None:
    settings = settings_tree(engine_settings(tree(None)))
    paths = [path for path in leaves(settings) if not path.startswith("settingNames")]
    assert len(paths) > 60
    for names in (PLAIN_NAMES, SettingNames(others="engine.{path}"), SettingNames(**MAKE)):
        assert len({names.name(path) for path in paths}) == len(paths)


def leaves(value: Any, path: str = "") -> list[str]:
    if isinstance(value, dict) and value:
        return [leaf for key, below in value.items() for leaf in leaves(below, f"{path}.{key}" if path else key)]
    return [path]


def test_defaults_are_those_of_the_file() -> None:
    assert EngineSettings(model=engine_settings(tree(None)).model).names == PLAIN_NAMES
