"""Keys that stand twice are refused, and a reading can be given up."""

from __future__ import annotations

import pytest
import yaml

from spillway_gateway.config import unique_yaml
from spillway_gateway.config.unique_yaml import GivenUp, Reading


def test_a_key_that_is_there_twice_is_refused() -> None:
    with pytest.raises(yaml.YAMLError, match="'a' is there twice"):
        unique_yaml.load("b:\n  a: 1\n  a: 2\n")
    assert unique_yaml.load("a: [1, {b: c}]") == {"a": [1, {"b": "c"}]}


@pytest.mark.parametrize("method", ["compose_node", "construct_object"])
def test_a_reading_ends_where_it_is_given_up(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Both parsing the text and making its values can be given up."""
    reading, calls = Reading(), 0
    original = getattr(yaml.SafeLoader, method)

    def counting(self: yaml.SafeLoader, *arguments: object, **named: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 10:
            reading.give_up()
        return original(self, *arguments, **named)

    monkeypatch.setattr(yaml.SafeLoader, method, counting)
    with pytest.raises(GivenUp):
        unique_yaml.load("".join(f"key{number}: [1, 2]\n" for number in range(1_000)), reading)
    assert calls == 10
