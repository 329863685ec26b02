from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from spillway_engine.chart_keys import camel_case, settings_tree
from spillway_engine.errors import SettingsError
from spillway_engine.setting_rules import check_settings
from spillway_engine.settings import EngineSettings
from spillway_engine.settings_reader import engine_settings, load_engine_settings, read_settings

MINIMAL: dict[str, Any] = {"model": {"path": "/models/x"}, "offload": {"numCpuBlocks": 64}}


def write(folder: Path, tree: Any) -> Path:
    path = folder / "engine.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def test_defaults_fill_what_the_file_leaves_out(tmp_path: Path) -> None:
    settings = load_engine_settings(write(tmp_path, MINIMAL))

    assert settings.model.path == "/models/x"
    assert settings.served_name == "x"
    assert settings.offload.num_cpu_blocks == 64
    assert settings.lifecycle.drain_timeout_seconds == 60.0


def test_overrides_win_in_order_and_reach_any_depth(tmp_path: Path) -> None:
    settings = load_engine_settings(
        write(tmp_path, MINIMAL),
        ["offload.numCpuBlocks=8", "offload.sharedTier.type=nvme", "offload.sharedTier.nvme.path=/mnt/kv",
         "offload.sharedTier.nvme.maxBytes=4GiB", "offload.numCpuBlocks=9"],
    )  # fmt: skip

    assert settings.offload.num_cpu_blocks == 9
    assert settings.offload.shared_tier.nvme.max_bytes == 4 << 30


def test_overrides_alone_are_enough() -> None:
    settings = load_engine_settings(None, ["model.path=/models/x", "offload.cpuBytes=512MiB"])

    assert settings.offload.cpu_bytes_to_use == 512 << 20


@pytest.mark.parametrize("word", ["on", "off"])
def test_on_and_off_are_words(word) -> None:
    """YAML reads a bare one as true or false."""
    override = f"offload.generatedTokens={word}"
    settings = load_engine_settings(None, ["model.path=/models/x", "offload.numCpuBlocks=1", override])

    assert settings.offload.generated_tokens == word


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("offload.numCpuBloks=3", "offload.numCpuBloks: unknown setting; did you mean 'numCpuBlocks'?"),
        ("dataParallelSize=65", "dataParallelSize: 65 given, a whole number from 1 to 64 needed"),
        ("dataParallelSize=0", "dataParallelSize: 0 given, a whole number from 1 to 64 needed"),
        ("modle.path=x", "modle: unknown setting; did you mean 'model'?"),
        ("offload.sharedTier.num_cpu_blocks=3", "offload.sharedTier.num_cpu_blocks: unknown setting"),
        ("port=eight", "port: 'eight' given, a whole number from 1 to 65535 needed"),
        ("port=true", "port: True given, a whole number from 1 to 65535 needed"),
        ("platform=tpu", "platform: 'tpu' given, auto, cpu, cuda or npu needed"),
        ("offload.cpuBytes=lots", "offload.cpuBytes: 'lots' is no size"),
        ("extraArgs=x", "extraArgs: 'x' given, a list needed"),
        ("model=x", "model: 'x' given, a mapping of settings needed"),
        ("port", "has no key or no value"),
        ("offload.cpuBytes=1GiB", "offload.numCpuBlocks: 64 and offload.cpuBytes: 1.0 GiB both size the CPU tier"),
        ("offload.numCpuBlocks=null", "offload.enabled: true needs the size of the CPU tier"),
        ("offload.numCpuBlocks=0", "offload.numCpuBlocks: 0 given, a whole number of at least 1 needed"),
        ("offload.sharedTier.type=nvme", "offload.sharedTier.nvme.path: '' is no absolute folder"),
        ("offload.sharedTier.type=redis", "offload.sharedTier.redis.url is empty"),
        (
            "offload.promotionInFlightFraction=0",
            "offload.promotionInFlightFraction: 0 given, a number above 0",
        ),
        (
            "offload.promotionPerRequestFraction=1.5",
            "Fraction: 1.5 given, a number above 0 and at most 1 needed",
        ),
        ("offload.requestWaitSeconds=0", "offload.requestWaitSeconds: 0 given, a number above 0 and at most"),
        ("kvEvents.port=8100", "kvEvents.port: 8100 is also port"),
        ("port=70000", "port: 70000 given, a whole number from 1 to 65535 needed"),
        ("blockSize=100", "blockSize: 100 is not a multiple of 16"),
    ],
)
def test_a_refusal_names_the_key_and_the_remedy(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load_engine_settings(write(tmp_path, MINIMAL), [override])

    assert message in str(refused.value)


def test_a_missing_model_is_named() -> None:
    with pytest.raises(SettingsError, match=r"model: missing; add it to the configuration"):
        load_engine_settings(None, ["port=1"])


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"nothing.yaml: No such file"):
        load_engine_settings(tmp_path / "nothing.yaml")


def test_yaml_off_is_the_word_off() -> None:
    settings = read_settings(EngineSettings, yaml.safe_load("{model: {path: x}, lifecycle: {selfCheck: off}}"))

    assert settings.lifecycle.self_check == "off"


def test_every_setting_survives_the_way_out_and_back() -> None:
    settings = load_engine_settings(None, ["model.path=/m", "offload.cpuBytes=1GiB", "extraEnv.A=b", "extraArgs=[--x]"])

    assert read_settings(EngineSettings, settings_tree(settings)) == settings


@given(st.text(alphabet="abcdefghijklmnopqrstuvwxyzABC_", min_size=1, max_size=20))
def test_no_unknown_key_is_ever_accepted(key: str) -> None:
    known = settings_tree(EngineSettings(**{"model": read_settings(EngineSettings, MINIMAL).model}))
    if key in known:
        return
    with pytest.raises(SettingsError, match=f"^{key}: unknown setting"):
        check_settings(read_settings(EngineSettings, {**MINIMAL, key: 1}))


@given(st.lists(st.from_regex(r"[a-z]{1,6}", fullmatch=True), min_size=1, max_size=4))
def test_camel_case_is_reversible(words: list[str]) -> None:
    name = camel_case("_".join(words))

    assert "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name) == "_".join(words)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (
            {"pipelineParallelSize": 2},
            "pipelineParallelSize: 2 and dataParallelSize: 4: stages are not proven with data",
        ),
        (
            {"offload": {"numCpuBlocks": 9, "layerwiseLoads": "on"}},
            "offload.layerwiseLoads: on changes the steps of one",
        ),
        ({"offload": {"numCpuBlocks": 9, "computeWhileLoading": "on"}}, "offload.computeWhileLoading: on changes the"),
        (
            {"kvTransfer": {"connector": "NixlConnector"}},
            "kvTransfer: NixlConnector is not proven with dataParallelSize: 4",
        ),
        (
            {"kvEvents": {"port": 65533}},
            "kvEvents.port: 65533 with dataParallelSize: 4, whose last rank would use 65536",
        ),
        (
            {"kvEvents": {"port": 8098}},
            "port: 8100 and kvEvents.port: 8098 are too near: rank r of dataParallelSize: 4",
        ),
        (
            {"kvEvents": {"port": 8203, "replayPort": 8200}},
            "kvEvents.port: 8203 and kvEvents.replayPort: 8200 are too near",
        ),
        ({"kvEvents": {"port": 8200, "replayPort": 8203}}, "keep them 4 or more apart"),
        ({"kvEvents": {"replayPort": 8200}}, "kvEvents.replayPort: 8200 is also kvEvents.port; give each its own port"),
    ],
)
def test_what_does_not_go_with_data_parallel_ranks(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as refused:
        engine_settings({**MINIMAL, "dataParallelSize": 4, **tree})

    assert message in str(refused.value)


def test_ranks_without_events_need_no_ports_of_their_own() -> None:
    near = {"kvEvents": {"port": 8200, "replayPort": 8204}}
    for tree in (
        near,
        {"kvEvents": {"enabled": False, "port": 8101}},
        {"port": 8204, "kvEvents": {"replayPort": 8196}},
    ):
        assert engine_settings({**MINIMAL, "dataParallelSize": 4, **tree}).data_parallel_size == 4
