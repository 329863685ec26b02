"""Every refusal names the setting as the document spells it, what was given and what is needed."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from spillway_settings.byte_sizes import ByteCount
from spillway_settings.typed import (
    CamelSection,
    Count,
    NotNegative,
    Port,
    Positive,
    Share,
    Text,
    WrongSetting,
    read_settings,
    settings_json,
    settings_of_json,
)

PortName = Annotated[str, Meta(pattern=r"^[a-z]+\Z", description="a port's name or its number")]


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Inner(CamelSection, frozen=True):
    first_name: Text
    mode: Literal["files", "slab"] = "files"
    size: ByteCount | None = None
    colour: Colour = Colour.RED


class Outer(CamelSection, frozen=True):
    inner: tuple[Inner, ...] = ()
    port: Port | PortName | None = None
    wait_seconds: Positive = 1.0
    delay_seconds: NotNegative = 0.0
    connections: Count = 1
    load_share: Share = 0.5
    enabled: bool = True
    environment: dict[str, str] = msgspec.field(default_factory=dict)
    rates: dict[str, NotNegative] = msgspec.field(default_factory=dict)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (3, "3 given, a mapping of settings needed"),
        (None, "nothing given, a mapping of settings needed"),
        ({"conections": 3}, "conections: unknown setting; did you mean 'connections'? Known here: connections, "),
        ({"wait_seconds": 3}, "wait_seconds: unknown setting; did you mean 'waitSeconds'?"),
        ({"inner": [{"firstName": "a"}, {}]}, "inner[1].firstName: missing; add it to inner[1]"),
        ({"inner": [{"firstName": ""}]}, "inner[0].firstName: '' given, a non-empty string needed"),
        ({"inner": [{"firstName": "a", "mode": "slabs"}]}, "inner[0].mode: 'slabs' given, files or slab needed"),
        ({"inner": [{"firstName": "a", "mode": False}]}, "inner[0].mode: False given, files or slab needed"),
        (
            {"inner": [{"firstName": "a", "size": "5Z"}]},
            "inner[0].size: '5Z' is no size; write for example 512MiB, 64Gi, 1TB or a number of bytes",
        ),
        ({"inner": [{"firstName": "a", "colour": 1}]}, "inner[0].colour: 1 given, red or blue needed"),
        ({"inner": {}}, "inner: {} given, a list needed"),
        ({"inner": [{"firstName": "a", 1: 2}]}, "inner[0].1: unknown setting; did you mean "),
        ({"port": 0}, "port: 0 given, a whole number from 1 to 65535 needed"),
        ({"port": 1.5}, "port: 1.5 given, a whole number from 1 to 65535 needed"),
        ({"port": "HTTP"}, "port: 'HTTP' given, a port's name or its number needed"),
        ({"connections": True}, "connections: True given, a whole number of at least 1 needed"),
        ({"waitSeconds": math.inf}, "waitSeconds: inf given, a finite number above 0 needed"),
        ({"waitSeconds": math.nan}, "waitSeconds: nan given, a finite number above 0 needed"),
        ({"waitSeconds": 10**400}, "waitSeconds: a int given, a finite number above 0 needed"),
        ({"delaySeconds": -1}, "delaySeconds: -1 given, a finite number of at least 0 needed"),
        ({"loadShare": 2}, "loadShare: 2 given, a number above 0 and at most 1 needed"),
        ({"enabled": "no"}, "enabled: 'no' given, true or false needed"),
        ({"environment": {"A": "1", "B": 2}}, "environment.B: 2 given, a string needed"),
        ({"environment": [1]}, "environment: [1] given, a mapping of settings needed"),
        ({"rates": {"a": 1, "b.c": -1}}, "rates.b.c: -1 given, a finite number of at least 0 needed"),
        ({"port": [0] * 50}, "port: a list given, a whole number from 1 to 65535 needed"),
    ],
)
def test_a_refusal_names_setting_value_and_need(document: Any, message: str) -> None:
    with pytest.raises(WrongSetting) as refused:
        read_settings(Outer, document)

    assert str(refused.value).startswith(message)


def test_what_is_right_becomes_frozen_settings() -> None:
    read = read_settings(Outer, {"inner": [{"firstName": "a", "size": "5MB"}], "port": "http", "waitSeconds": 3})

    assert settings_of_json(Outer, settings_json(read)) == read
    assert read == Outer(inner=(Inner("a", size=ByteCount(5_000_000)),), port="http", wait_seconds=3.0)
    assert isinstance(read.wait_seconds, float)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.just(" - at `$.inner`"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=3),
    max_leaves=8,
)


@given(anything, st.sampled_from(["inner", "port", "environment", "rates", "size", " - at `$.port`", "x`"]))
def test_any_document_is_read_or_refused_in_one_sentence(value: Any, key: str) -> None:
    for document in (value, {key: value}, {"inner": [value]}, {"inner": [{key: value}]}, {"rates": {key: value}}):
        try:
            assert isinstance(read_settings(Outer, document), Outer)
        except WrongSetting as wrong:
            assert wrong.problem
