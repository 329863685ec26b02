from pathlib import Path

import pytest

from spillway_stack.errors import StackError
from spillway_stack.settings import StackSettings


def test_defaults_without_any_variable() -> None:
    assert StackSettings.from_environment({}) == StackSettings()


def test_every_variable_is_heard(tmp_path: Path) -> None:
    settings = StackSettings.from_environment(
        {
            "PORT": "9000", "ENGINES": "3", "MODEL": str(tmp_path), "SHARED_TIER": "redis", "OFFLOAD": "off",
            "NUM_CPU_BLOCKS": "12", "DEVICE_BLOCKS": "100",
        }
    )  # fmt: skip

    assert settings == StackSettings(9000, 3, str(tmp_path), "redis", False, 12, 100)


def test_a_small_device_cache_shortens_the_longest_prompt() -> None:
    assert StackSettings.from_environment({"DEVICE_BLOCKS": "33"}).max_length == 32 * 128


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("PORT", "http", "PORT=http is not a whole number from 1 to 65135"),
        ("PORT", "65500", "PORT=65500 is not a whole number from 1 to 65135"),
        ("ENGINES", "0", "ENGINES=0 is not a whole number from 1 to 50"),
        ("SHARED_TIER", "tape", "SHARED_TIER=tape is none of nvme, redis, none"),
        ("OFFLOAD", "maybe", "OFFLOAD=maybe is none of on, off"),
        ("NUM_CPU_BLOCKS", "-3", "NUM_CPU_BLOCKS=-3 is not a whole number of at least 1"),
    ],
)
def test_a_wrong_value_is_named(name: str, value: str, said: str) -> None:
    with pytest.raises(StackError) as refused:
        StackSettings.from_environment({name: value})

    assert str(refused.value) == said


def test_no_two_listeners_share_a_port() -> None:
    settings = StackSettings(engines=50)
    ports = [settings.gateway_port(), settings.valkey_port()]
    for index in range(settings.engines):
        ports += [settings.engine_port(index), settings.events_port(index), settings.replay_port(index)]

    assert len(ports) == len(set(ports))
