"""The chart's settings and the engine service's are judged by the same rules, in the same words."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from spillway_connector.setting_names import PLAIN_NAMES, SettingNames
from spillway_engine.errors import SettingsError
from spillway_engine.setting_rules import Contradiction, check_settings, contradictions
from spillway_engine.settings import EngineSettings
from spillway_engine.settings_reader import read_settings
from spillway_settings import typed
from spillway_settings.values.engine import Engine

MISTAKES = {
    "port: 8200": ["kvEvents.port"],
    "{kvEvents: {port: 65535}, dataParallelSize: 2}": ["kvEvents.port"],
    "{port: 29490, dataParallelSize: 2, nodesPerReplica: 2}": ["port"],
    "{pipelineParallelSize: 2, offload: {fairSteps: 'on'}, extraArgs: [--distributed-executor-backend=ray]}": [
        "offload.fairSteps",
        "extraArgs",
    ],
    "{dataParallelSize: 4, pipelineParallelSize: 2, kvTransfer: {connector: NixlConnector}}": [
        "pipelineParallelSize",
        "kvTransfer",
    ],
    "{tensorParallelSize: 4, nodesPerReplica: 3}": ["nodesPerReplica", "offload.enabled"],
    "{kvTransfer: {connector: OffloadingConnector}, offload: {layerwiseLoads: true}}": [
        "kvTransfer.connector",
        "offload.layerwiseLoads",
    ],
    "lora: {resolverFolder: /loras, maxActive: 4, maxInMemory: 2}": ["lora.resolverFolder", "lora.maxInMemory"],
    "offload: {sharedTier: {below: {type: s3}}}": ["offload.sharedTier.below.type"],
    "offload: {sharedTier: {type: s3, below: {type: s3}}}": ["offload.sharedTier.below.type"],
    "offload: {cpuBytes: 1GiB}": ["offload.numCpuBlocks"],
    "offload: {numCpuBlocks: null}": ["offload.enabled"],
    "{}": [],
}
SIZED = {"numCpuBlocks": Engine().offload.num_cpu_blocks}  # the engine service has no default of its own


def both(text: str) -> tuple[list[Contradiction], list[Contradiction]]:
    tree: dict[str, Any] = yaml.safe_load(text)
    of_the_chart = typed.read_settings(Engine, tree)
    of_the_service = read_settings(
        EngineSettings, {**tree, "model": {"path": "/m"}, "offload": SIZED | tree.get("offload", {})}
    )
    return list(contradictions(of_the_chart, PLAIN_NAMES)), list(contradictions(of_the_service, PLAIN_NAMES))


@pytest.mark.parametrize(("text", "settings"), MISTAKES.items())
def test_the_check_and_the_engine_service_say_the_same(text: str, settings: list[str]) -> None:
    by_check, by_service = both(text)

    assert by_check == by_service
    assert [each.setting for each in by_check] == settings


def test_the_engine_service_refuses_with_all_of_them() -> None:
    tree = {"model": {"path": "/m"}, "offload": {"enabled": False}, "port": 8200, "lora": {"resolverFolder": "/a"}}
    with pytest.raises(SettingsError) as refused:
        check_settings(read_settings(EngineSettings, tree))

    assert str(refused.value).splitlines() == [
        "kvEvents.port: 8200 is also port; give each its own port",
        "lora.resolverFolder: vLLM loads adapters by name only if they may change at run time; "
        "set lora.runtimeUpdating: true",
    ]


def test_a_sentence_names_a_setting_as_its_reader_writes_it() -> None:
    names = SettingNames(names={"offload.enabled": "OFFLOAD"}, others="ENGINE_SET={path}", separator="=")

    assert Contradiction("offload.enabled", True, ", but a", "b").sentence(names) == "OFFLOAD=on, but a; b"
    assert Contradiction("port", 1, "is c", "d").sentence(names) == "ENGINE_SET=port=1 is c; d"
    assert Contradiction("extraArgs", None, "e", "f").sentence(names) == "ENGINE_SET=extraArgs: e; f"
