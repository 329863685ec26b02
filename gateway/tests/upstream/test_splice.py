from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.upstream.splice import insert_member, replace_text

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.just("model"), inner, max_size=3),
    max_leaves=10,
)


@given(
    st.dictionaries(st.text(), values, max_size=4),
    st.text(),
    st.text(),
    st.booleans(),
    st.sampled_from([None, 1]),
)
def test_only_the_top_level_model_changes(
    fields: dict[str, object], alias: str, model: str, ascii_only: bool, indent: int | None
) -> None:
    document = {**fields, "model": alias, "last": {"model": alias}}
    body = json.dumps(document, ensure_ascii=ascii_only, indent=indent).encode("utf-8", "surrogatepass")

    replaced = replace_text(body, "model", model)

    expected = json.loads(body)
    expected["model"] = model
    assert json.loads(replaced) == expected


def test_every_other_byte_stays() -> None:
    body = b'{ "n": 1.50e+3, "model" : "alias","s":"\\u00e9 \\"model\\": \\"alias\\"" }'

    assert (
        replace_text(body, "model", "real")
        == b'{ "n": 1.50e+3, "model" : "real","s":"\\u00e9 \\"model\\": \\"alias\\"" }'
    )


def test_escaped_keys_and_repeats_are_seen() -> None:
    assert replace_text(b'{"m\\u006fdel":"a","model":"b"}', "model", "r") == b'{"m\\u006fdel":"r","model":"r"}'


@given(st.lists(st.tuples(st.sampled_from(["gone", "kept", "model"]), values), max_size=6), st.sampled_from([None, 1]))
def test_what_is_taken_out_leaves_the_rest_as_it_was(members: list[tuple[str, object]], indent: int | None) -> None:
    texts = [f"{json.dumps(name)} : {json.dumps(value, indent=indent)}" for name, value in members]
    body = ("{ " + " ,\n".join(texts) + " }").encode()
    kept = [text for text, (name, _) in zip(texts, members, strict=True) if name != "gone"]

    taken = replace_text(body, "gone", None)

    assert json.loads(taken, object_pairs_hook=list) == json.loads("{" + ",".join(kept) + "}", object_pairs_hook=list)
    assert all(text.encode() in taken for text in kept)


@given(st.dictionaries(st.text(), values, max_size=4), values, st.text(), st.sampled_from([None, 1]))
def test_a_value_of_any_kind_is_replaced(fields: dict[str, object], old: object, salt: str, indent: int | None) -> None:
    body = json.dumps({"cache_salt": old, **fields, "last": 1}, indent=indent).encode()

    replaced = json.loads(replace_text(body, "cache_salt", salt))

    assert replaced == {**json.loads(body), "cache_salt": salt}


@given(st.dictionaries(st.text().filter(lambda name: name != "salt"), values, max_size=4), st.text())
def test_an_inserted_text_comes_first_and_leaves_the_rest(fields: dict[str, object], salt: str) -> None:
    body = b" \n" + json.dumps(fields).encode()

    inserted = json.loads(insert_member(body, "salt", salt))

    assert inserted == {"salt": salt, **json.loads(body)}
    assert next(iter(inserted)) == "salt"
