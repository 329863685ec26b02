"""Values as Helm reads and merges them."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_ctl.check.values_files import laid_over, merged_values, read_values
from spillway_ctl.errors import CommandError

KEYS = st.text(st.sampled_from("abc.,=[]{}\\-/0"), min_size=1, max_size=6)


def values_of(*assignments: str, text: bool = False) -> dict[str, object]:
    return merged_values([], [(each, text) for each in assignments])


def test_the_last_file_wins_and_maps_are_merged(tmp_path, monkeypatch):
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("engine: {replicas: 2, model: {path: /m}}\nlist: [1, 2]")
    second.write_text("engine: {replicas: null}\nlist: [3]")

    monkeypatch.setattr("sys.stdin", io.StringIO("x: 1"))
    assert merged_values([first, second, "-"], []) == {
        "engine": {"replicas": None, "model": {"path": "/m"}},
        "list": [3],
        "x": 1,
    }


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("a.b=1", {"a": {"b": 1}}),
        ("a.b=1,a.c=x", {"a": {"b": 1, "c": "x"}}),
        ("a=true", {"a": True}),
        ("a=null", {"a": None}),
        ("a=1.10", {"a": "1.10"}),  # as Helm: no number with a point
        ("a=007", {"a": "007"}),
        ("a={x,y}", {"a": ["x", "y"]}),
        ("a={}", {"a": []}),
        ("a[1].b=c", {"a": [None, {"b": "c"}]}),
        ("a.kubernetes\\.io/arch=arm64", {"a": {"kubernetes.io/arch": "arm64"}}),
        ("a=x\\,y", {"a": "x,y"}),
        ("a=b=c", {"a": "b=c"}),
        ("a=", {"a": ""}),
    ],
)
def test_set_is_read_as_helm_reads_it(assignment, expected):
    assert values_of(assignment) == expected


def test_set_string_makes_text_of_all():
    assert values_of("a=1,b=true", text=True) == {"a": "1", "b": "true"}


@pytest.mark.parametrize("assignment", ["a", "=1", "a..b=1", "a[x]=1"])
def test_a_setting_without_a_path_or_value_is_refused(assignment):
    with pytest.raises(CommandError, match="--set"):
        values_of(assignment)


@given(KEYS, st.text(max_size=5))
def test_a_key_whose_signs_are_escaped_is_one_key(key, value):
    escaped = "".join(f"\\{letter}" if letter in ".,=[]{}\\" else letter for letter in key)
    text = "".join(f"\\{letter}" if letter in ",{}\\" else letter for letter in value)

    assert values_of(f"top.{escaped}={text}", text=True) == {"top": {key: value}}


def test_no_dates_no_sixties_and_exponents_without_a_point():
    read = read_values("day: 2026-11-01\ntime: 10:30:00\nmany: 1e6\nhex: 0x10\nswitch: on\nversion: 1.10", "f")

    assert read == {
        "day": "2026-11-01",
        "time": "10:30:00",
        "many": 1e6,
        "hex": 16,
        "switch": True,
        "version": 1.1,
    }


def test_a_key_given_twice_is_refused_and_an_anchor_is_not():
    with pytest.raises(CommandError, match=r"f: replicas: given twice \(line 3\)"):
        read_values("engine:\n  replicas: 1\n  replicas: 2", "f")

    read = read_values("x-common: &common {a: 1, b: 1}\nengine: {<<: *common, a: 2}", "f")

    assert read["engine"] == {"a": 2, "b": 1}


@pytest.mark.parametrize("text", ["a: [", "- 1", "just text", "a: b: c"])
def test_what_is_no_map_of_values_is_refused_by_name(text):
    with pytest.raises(CommandError, match=r"my-values\.yaml"):
        read_values(text, "my-values.yaml")


@given(st.dictionaries(st.text(max_size=3), st.integers() | st.none()), st.dictionaries(st.text(max_size=3), st.none()))
def test_laying_over_changes_neither_and_keeps_nulls(base, over):
    before = dict(base)

    assert laid_over(base, over) == {**base, **over} and base == before
