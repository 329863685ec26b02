import sys
from pathlib import Path

import pytest
import yaml

from spillway_engine.chart_keys import settings_tree
from spillway_engine.errors import SettingsError
from spillway_engine.settings_reader import engine_settings
from spillway_stack import make_variables, object_store
from spillway_stack.components import (
    Component,
    PreparedModel,
    configuration_files,
    engine_configuration,
    gateway_configuration,
    plan_components,
)
from spillway_stack.errors import StackError
from spillway_stack.settings import StackSettings
from spillway_stack.state_folder import StateFolder

FOLDER = StateFolder(Path("/state"))
MODEL = PreparedModel("/models/m", "m", bundled=False, tokenizer="/models/m")


def test_start_order_and_stop_order() -> None:
    components = plan_components(StackSettings(), MODEL, FOLDER, Path("/bin/valkey"))

    assert [component.name for component in components] == ["valkey", "engine-0", "engine-1", "gateway"]
    by_stop = sorted(components, key=lambda component: component.stop_rank)
    assert [component.name for component in by_stop] == ["gateway", "engine-0", "engine-1", "valkey"]


def test_a_component_survives_the_plan_file() -> None:
    for component in plan_components(StackSettings(), MODEL, FOLDER, Path("/bin/valkey")):
        assert Component.from_dict(component.as_dict()).as_dict() == component.as_dict()


def test_engines_can_be_tested_without_a_gateway() -> None:
    components = plan_components(StackSettings(gateway=False, engines=1), MODEL, FOLDER, Path("/bin/valkey"))

    assert [component.name for component in components] == ["valkey", "engine-0"]


def test_the_object_store_runs_before_the_engines_and_they_alone_get_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "server_binary", lambda: Path("/bin/weed"))
    settings = StackSettings(engines=1, port=9000, shared_tier="s3")
    _, store, engine, gateway = plan_components(settings, MODEL, FOLDER, Path("/bin/valkey"))

    assert (store.name, store.port, len(set(store.ports))) == ("object-store", 9410, len(object_store.PORTS))
    assert engine.environment == object_store.KEYS and not gateway.environment
    files = configuration_files(settings, MODEL, FOLDER)
    secret = object_store.KEYS["AWS_SECRET_ACCESS_KEY"]
    assert [path.name for path, text in files.items() if secret in text] == ["object-store.json"]


def test_overrides_reach_every_engine() -> None:
    settings = StackSettings(engine_overrides=("model.dtype=float32",))
    (_, engine, _, _) = plan_components(settings, MODEL, FOLDER, Path("/bin/valkey"))

    assert list(engine.arguments) == [
        sys.executable, "-m", "spillway_engine",
        "--config", "/state/config/engine-0.yaml",
        "--set", "model.dtype=float32",
    ]  # fmt: skip


def test_engines_run_in_the_environment_of_their_vllm() -> None:
    settings = StackSettings(vllm=("0.23", "0.32"))
    (_, first, second, gateway) = plan_components(settings, MODEL, FOLDER, Path("/bin/valkey"))

    assert first.arguments[0] == gateway.arguments[0] == sys.executable
    assert second.arguments[0] == str(Path(sys.prefix).parent / "vllm-0.32" / "bin" / "python")


def test_the_engine_service_accepts_what_the_stack_writes() -> None:
    for tier in ("nvme", "redis", "s3", "none"):
        for offload in (True, False):
            settings = StackSettings(port=9000, shared_tier=tier, offload=offload)
            engine = engine_settings(engine_configuration(settings, MODEL, FOLDER, 1))
            assert (engine.port, engine.kv_events.port, engine.kv_events.replay_port) == (9101, 9201, 9301)
            assert engine.offload.enabled is offload
            if offload:
                assert engine.offload.shared_tier.type == tier
                assert engine.offload.num_cpu_blocks == settings.num_cpu_blocks


def test_all_engines_share_the_cpu_tier_of_the_machine_if_they_are_to() -> None:
    settings = StackSettings(node_tier="1GiB")
    tiers = [
        engine_settings(engine_configuration(settings, MODEL, FOLDER, index)).offload.node_tier for index in (0, 1)
    ]
    assert tiers[0] is not None and tiers[0] == tiers[1]
    assert (tiers[0].bytes, tiers[0].path, tiers[0].fallback) == (1 << 30, str(FOLDER.node_tier), "refuse")
    assert tiers[0].path != str(StateFolder(Path("/other")).node_tier)
    with pytest.raises(SettingsError, match="NODE_TIER: 'some' is no size"):
        engine_settings(engine_configuration(StackSettings(node_tier="some"), MODEL, FOLDER, 0))


def test_dtype_and_arguments_of_vllm_reach_every_engine() -> None:
    settings = StackSettings(dtype="float32", engine_args=("--max-num-seqs", "8"))
    engine = engine_settings(engine_configuration(settings, MODEL, FOLDER, 1))

    assert engine.model.dtype == "float32"
    assert engine.extra_args == ("--max-num-seqs", "8")


def test_the_start_up_check_may_be_switched_off_or_read_another_text() -> None:
    text = "Alle Menschen werden Brüder: wo dein Flügel weilt."
    engine = engine_settings(engine_configuration(StackSettings(self_check_text=text), MODEL, FOLDER, 0))
    off = engine_settings(engine_configuration(StackSettings(self_check="off"), MODEL, FOLDER, 0))

    assert (engine.lifecycle.self_check, engine.lifecycle.self_check_text) == ("auto", text)
    assert off.lifecycle.self_check == "off"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (StackSettings(self_check_text="Too short."), "SELF_CHECK_TEXT has 10 characters; give 16 to 400"),
        (StackSettings(engine_args=("--api_key=k1",)), "ENGINE_ARGS: --api-key would show a secret"),
        (StackSettings(engine_args=("-tp=2",)), "ENGINE_ARGS: -tp is decided by ENGINE_SET=tensorParallelSize"),
        (StackSettings(engine_args=("--dtype", "half")), "ENGINE_ARGS: --dtype is decided by DTYPE; change that"),
        (StackSettings(engine_overrides=("blockSize=100",)), "ENGINE_SET=blockSize=100 is not a multiple of 16"),
        (
            StackSettings(engine_overrides=("blockSzie=100",)),
            "ENGINE_SET=blockSzie: unknown setting; did you mean",
        ),
    ],
)
def test_a_refusal_names_the_variable(settings: StackSettings, message: str) -> None:
    with pytest.raises(SettingsError) as refused:
        engine_settings(engine_configuration(settings, MODEL, FOLDER, 0), settings.engine_overrides)

    assert message in str(refused.value)
    assert "k1" not in str(refused.value)


def test_the_variables_name_existing_settings() -> None:
    """A variable must not outlive the setting that it sets."""
    tree = settings_tree(engine_settings(engine_configuration(StackSettings(node_tier="1GiB"), MODEL, FOLDER, 0)))
    for path in [*make_variables.VARIABLES, *make_variables.RESERVED]:
        below = tree
        for key in path.split("."):
            assert key in below, path
            below = below[key]


def test_the_gateway_is_configured_with_every_engine() -> None:
    tree = gateway_configuration(StackSettings(port=9000, engines=2), MODEL)

    assert tree["listen"] == {"host": "127.0.0.1", "port": 9000}
    assert tree["models"][0]["engines"][1] == {
        "name": "engine-1",
        "url": "http://127.0.0.1:9101",
        "kvEvents": "tcp://127.0.0.1:9201",
        "kvReplay": "tcp://127.0.0.1:9301",
    }


def test_every_data_parallel_rank_has_ports_and_is_routed_to() -> None:
    settings = StackSettings(port=9000, engines=2, engine_overrides=("blockSize=64", "dataParallelSize=3"))
    second = gateway_configuration(settings, MODEL)["models"][0]["engines"][1]
    (engine,) = [each for each in plan_components(settings, MODEL, FOLDER, Path("/v")) if each.name == "engine-1"]
    read = engine_settings(engine_configuration(settings, MODEL, FOLDER, 1), settings.engine_overrides)

    assert (second["kvEvents"], second["kvReplay"]) == ("tcp://127.0.0.1:9203", "tcp://127.0.0.1:9303")
    assert second["dataParallelRanks"] == read.data_parallel_size == 3
    assert list(engine.ports) == [9101, 9203, 9204, 9205, 9303, 9304, 9305]
    assert (read.kv_events.port, read.kv_events.replay_port) == (9203, 9303)


def test_more_ranks_than_ports_are_refused() -> None:
    environment = {"ENGINES": "4", "ENGINE_SET": "dataParallelSize=26"}
    with pytest.raises(StackError, match="ENGINES=4 and ENGINE_SET=dataParallelSize=26 are 104 ranks, and there are"):
        StackSettings.from_environment(environment)
    assert StackSettings.from_environment(environment | {"ENGINES": "3"}).data_parallel_size == 26


@pytest.mark.parametrize("size", ["0", "two", "-1", "2.5", "65"])
def test_the_engine_service_refuses_what_is_no_number_of_ranks(size: str) -> None:
    settings = StackSettings(engine_overrides=(f"dataParallelSize={size}",))
    gateway_configuration(settings, MODEL)
    with pytest.raises(SettingsError, match="ENGINE_SET=dataParallelSize"):
        engine_settings(engine_configuration(settings, MODEL, FOLDER, 0), settings.engine_overrides)


def test_files_are_yaml_of_these_trees() -> None:
    files = configuration_files(StackSettings(engines=1), MODEL, FOLDER)

    assert set(files) == {FOLDER.config / "engine-0.yaml", FOLDER.config / "gateway.yaml"}
    assert yaml.safe_load(files[FOLDER.config / "engine-0.yaml"]) == engine_configuration(
        StackSettings(engines=1), MODEL, FOLDER, 0
    )
