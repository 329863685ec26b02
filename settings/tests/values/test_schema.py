"""The schema of a model; tests/chart/test_schema.py shows that Helm and editors take the chart's."""

import json
import re
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from spillway_settings.values import schema
from spillway_settings.values.schema import needed_settings, values_schema, written

VALUES = values_schema("engine:\n  # Pods of this model.\n  replicas: 2\n")
ENGINE = VALUES["definitions"]["engine"]["properties"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


def test_a_number_has_its_bounds_its_default_and_its_comment() -> None:
    assert ENGINE["replicas"] == {
        "type": "integer",
        "minimum": 0,
        "maximum": 10_000,
        "description": "Pods of this model.",
        "default": 2,
    }


def test_a_word_that_may_be_left_to_the_chart() -> None:
    assert ENGINE["dnsPolicy"] == {
        "enum": ["ClusterFirst", "ClusterFirstWithHostNet", "Default", None],
        "default": None,
    }


def test_a_number_or_a_text_are_judged_side_by_side() -> None:
    amount = ENGINE["podDisruptionBudget"]["properties"]["maxUnavailable"]

    assert amount["type"] == ["integer", "string"] and amount["minimum"] == 1 and "%" in amount["pattern"]


def test_a_setting_that_an_installation_can_do_without_may_be_null() -> None:
    assert ENGINE["cpu"]["properties"]["request"]["type"] == ["string", "number", "null"]
    assert VALUES["properties"]["gateway"]["properties"]["port"]["type"] == "integer"


def test_a_type_of_kubernetes_keeps_its_description_beside_the_reference() -> None:
    affinity = ENGINE["affinity"]

    assert affinity["allOf"] == [{"$ref": "#/definitions/Affinity"}] and affinity["default"] == {}
    assert "Affinity" in VALUES["definitions"]


def test_every_reference_leads_somewhere() -> None:
    text = json.dumps(VALUES)
    names = {part.split('"')[0] for part in text.split('"#/definitions/')[1:]}

    assert len(names) > 50 and names <= VALUES["definitions"].keys()


def test_no_pattern_stands_where_a_credential_may_be_pasted() -> None:
    """Helm repeats what does not match one."""

    def patterns(node: Any, path: str = "") -> set[str]:
        if not isinstance(node, dict):
            return set()
        own = {path} if isinstance(node.get("pattern"), str) else set()
        below = node.get("properties", {}).items()
        return own.union(*(patterns(inner, f"{path}.{key}".lower()) for key, inner in below))

    found = patterns(VALUES) | patterns(VALUES["definitions"]["engine"])
    assert len(found) > 30
    assert [path for path in found if any(word in path for word in ("secret", "password", "keyid"))] == []


def test_needed_settings_are_those_with_a_default() -> None:
    needed = needed_settings()

    assert "replicas" in needed["engine"] and "engine" in needed[""]
    assert "dnsPolicy" not in needed["engine"]
    assert "request" not in needed.get("engine.cpu", []) and "engine.cpu.request" in schema.REMOVABLE


@given(JSON)
def test_what_is_written_is_the_same_json(value: Any) -> None:
    text = written(value)

    assert json.loads(text) == value


def _patterns(node: Any) -> set[str]:
    if isinstance(node, list):
        return set[str]().union(*map(_patterns, node))
    if not isinstance(node, dict):
        return set()
    own = {node["pattern"]} if isinstance(node.get("pattern"), str) else set()
    return own.union(*map(_patterns, node.values()))


def test_a_path_may_be_as_short_as_one_letter() -> None:
    longer = {each for each in _patterns(VALUES) if re.search(each, "/bcd") and not re.search(each, "\n")}

    assert len(longer) > 3 and {each for each in longer if not re.search(each, "/b")} == set()
