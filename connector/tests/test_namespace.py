from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_connector.errors import ConfigError
from spillway_connector.namespace import (
    DIFFERENCE_CHARS_MAX,
    STORE_ID_BYTES,
    Namespace,
    explain_difference,
    store_id_of,
)

_names = st.text(min_size=1, max_size=8)
_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_names, inner, max_size=3),
    max_leaves=10,
)
_facts = st.dictionaries(_names, _values, max_size=5)


@given(_facts)
def test_the_order_of_facts_does_not_matter(facts: dict[str, object]) -> None:
    assert Namespace.of(facts) == Namespace.of(dict(reversed(facts.items())))


@given(_facts, _facts)
def test_equal_digests_mean_equal_facts(one: dict[str, object], two: dict[str, object]) -> None:
    same_facts = json.dumps(one, sort_keys=True) == json.dumps(two, sort_keys=True)
    assert (Namespace.of(one).digest16 == Namespace.of(two).digest16) == same_facts


@given(_facts, _facts)
def test_a_difference_is_named_exactly_when_there_is_one(one: dict[str, object], two: dict[str, object]) -> None:
    ours, theirs = Namespace.of(one).document, Namespace.of(two).document
    assert (explain_difference(ours, theirs) == "the documents say the same") == (ours == theirs)


def test_the_digest_is_a_promise() -> None:
    # Stored data is found by it: if this line must change, the key layout's version must change too.
    assert Namespace.of({"model": "a", "tp": 1}).document == b'{"frame_format":1,"model":"a","tp":1}'
    assert Namespace.of({"model": "a", "tp": 1}).hex == "9881a68ea1f0ce9646b667e31e9c078b"


@pytest.mark.parametrize(
    "facts", [{"a": b"bytes"}, {"a": float("nan")}, {"a": {1: "x"}}, {"a": [{2: 1}]}, {"a": {1, 2}}]
)
def test_facts_without_an_exact_json_form_are_refused(facts: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="namespace"):
        Namespace.of(facts)


def test_the_difference_names_the_fields() -> None:
    ours = Namespace.of({"model": "a", "layers": [1, 2], "tp": 1})
    theirs = Namespace.of({"model": "b", "layers": [1], "dp": 1})
    assert explain_difference(ours.document, theirs.document) == (
        "dp: ours has none, stored 1; layers[1]: ours 2, stored has none; "
        'model: ours "a", stored "b"; tp: ours 1, stored has none'
    )
    assert "damaged" in explain_difference(ours.document, theirs.document[:-5])


def test_a_store_is_one_namespace_in_one_place() -> None:
    ours = store_id_of(b"here", b"n" * 16)
    assert len(ours) == STORE_ID_BYTES
    assert ours == store_id_of(b"here", b"n" * 16)
    assert len({ours, store_id_of(b"there", b"n" * 16), store_id_of(b"here", b"m" * 16)}) == 3


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_a_stored_document_that_is_nested_too_deeply_is_damaged(opening: bytes) -> None:
    assert "damaged" in explain_difference(Namespace.of({"model": "a"}).document, opening * 100_000)
    closed = opening * 900 + b"1" + (b"]" if opening == b"[" else b"}") * 900  # read, and too deep to be compared
    assert explain_difference(Namespace.of({"model": "a"}).document, closed)


@pytest.mark.parametrize("stored", [{"model": "x" * 500_000}, {f"field {number}": 1 for number in range(50_000)}])
def test_a_long_difference_is_cut(stored: dict[str, object]) -> None:
    ours, theirs = Namespace.of({"model": "a"}), Namespace.of(stored)
    assert len(explain_difference(ours.document, theirs.document)) == DIFFERENCE_CHARS_MAX
