from pathlib import Path

import pytest

from spillway_stack.errors import StackError
from spillway_stack.settings import StackSettings


def test_defaults_without_any_variable() -> None:
    assert StackSettings.from_environment({}) == StackSettings()


def test_every_variable_is_read(tmp_path: Path) -> None:
    settings = StackSettings.from_environment(
        {
            "PORT": "9000", "ENGINES": "3", "MODEL": str(tmp_path), "SHARED_TIER": "redis", "OFFLOAD": "off",
            "NUM_CPU_BLOCKS": "12", "DEVICE_BLOCKS": "100", "MAX_LENGTH": "2000", "DTYPE": "float32",
            "ENGINE_ARGS": "--max-num-seqs 8 --limit-mm-per-prompt '{\"image\": 0}'",
            "ENGINE_SET": "offload.blocksPerChunk=2 extraEnv.A='b c'", "SELF_CHECK": "off", "VLLM": "0.23, 0.30,0.32",
            "GATEWAY_PROCESSES": "2", "NODE_TIER": "1GiB",
            "SELF_CHECK_TEXT": " Alle Menschen werden Brüder: wo dein Flügel weilt. ",
        }
    )  # fmt: skip

    assert settings == StackSettings(
        9000, 3, str(tmp_path), "redis", False, "1GiB", 12, 100, max_length=2000, dtype="float32",
        engine_args=("--max-num-seqs", "8", "--limit-mm-per-prompt", '{"image": 0}'),
        engine_overrides=("offload.blocksPerChunk=2", "extraEnv.A=b c"), self_check="off",
        self_check_text="Alle Menschen werden Brüder: wo dein Flügel weilt.",
        vllm=("0.23", "0.30", "0.32"), gateway_processes=2,
    )  # fmt: skip


def test_settings_survive_the_plan_file() -> None:
    settings = StackSettings(port=9000, engines=3, engine_args=("--x",), engine_overrides=("a.b=1",))

    assert StackSettings.from_dict({**settings.as_dict(), "of_another_version": 1}) == settings


def test_a_small_device_cache_shortens_the_longest_prompt() -> None:
    assert StackSettings.from_environment({"DEVICE_BLOCKS": "33"}).max_length == 32 * 128
    assert StackSettings.from_environment({"DEVICE_BLOCKS": "33", "MAX_LENGTH": "5000"}).max_length == 5000


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("PORT", "http", "PORT=http is not a whole number from 1 to 65115"),
        ("PORT", "65500", "PORT=65500 is not a whole number from 1 to 65115"),
        ("ENGINES", "0", "ENGINES=0 is not a whole number from 1 to 50"),
        ("GATEWAY_PROCESSES", "17", "GATEWAY_PROCESSES=17 is not a whole number from 1 to 16"),
        ("SHARED_TIER", "tape", "SHARED_TIER=tape is none of none, nvme, redis, s3"),
        ("OFFLOAD", "maybe", "OFFLOAD=maybe is none of on, off"),
        ("NUM_CPU_BLOCKS", "-3", "NUM_CPU_BLOCKS=-3 is not a whole number of at least 1"),
        ("SELF_CHECK", "no", "SELF_CHECK=no is none of auto, off"),
        (
            "VLLM",
            "0.31",
            "VLLM=0.31 is none of 0.23, 0.30, 0.32; give one of them, or one for each engine separated by commas",
        ),
        (
            "VLLM",
            "0.23,0.30,0.32",
            "VLLM=0.23,0.30,0.32 names 3 versions for 2 engines; give one for all, or ENGINES=3",
        ),
        ("DTYPE", "fp32", "DTYPE=fp32 is none of auto, bfloat16, float16, float32"),
        ("ENGINE_ARGS", "--x 'y", "ENGINE_ARGS=--x 'y is not a command line: No closing quotation"),
        ("ENGINE_SET", "model.dtype=float32", "ENGINE_SET=model.dtype=float32: model.dtype is set by DTYPE="),
        ("ENGINE_SET", "extraArgs=[--x]", "ENGINE_SET=extraArgs=[--x]: extraArgs is set by ENGINE_ARGS="),
        ("ENGINE_SET", "host=::", "ENGINE_SET=host=::: host is decided by the local stack; leave it out"),
        (
            "ENGINE_SET",
            "settingNames.others=x",
            "ENGINE_SET=settingNames.others=x: settingNames.others is decided by the local stack; leave it out",
        ),
    ],
)
def test_a_wrong_value_is_named(name: str, value: str, message: str) -> None:
    with pytest.raises(StackError) as refused:
        StackSettings.from_environment({name: value})

    assert str(refused.value) == message


def test_no_two_listeners_share_a_port() -> None:
    settings = StackSettings(engines=50)
    ports = [settings.gateway_port(), settings.valkey_port()]
    for index in range(settings.engines):
        ports += [settings.engine_port(index), settings.events_port(index), settings.replay_port(index)]

    assert len(ports) == len(set(ports))
