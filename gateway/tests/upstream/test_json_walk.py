"""The walk finds what a JSON parser finds, whatever the document and wherever its steps end."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from spillway_gateway.errors import ClientBadRequest
from spillway_gateway.upstream.json_walk import REPEATS_MAX, JsonWalk, NotAnObject
from spillway_gateway.upstream.splice import Opening, edited, insert_member, insertion, replace_text, replacements

NAMES = ("model", "cache_salt")
blanks = st.text(alphabet=" \t\r\n", max_size=2)


def escaped(text: str) -> st.SearchStrategy[str]:
    """Ways to write a string: each character as it is (where JSON allows), or as an escape."""
    plain = json.dumps(text, ensure_ascii=False)
    ascii_only = json.dumps(text)
    units = text.encode("utf-16-be", "surrogatepass")
    every = '"' + "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2)) + '"'
    return st.sampled_from([plain, ascii_only, every])


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.sampled_from(
    ['"', "\\", '\\"', "{", "]", ","]
)
scalars = st.sampled_from(["0", "-1.50e+3", "true", "false", "null", "9" * 400, "1e999"]) | texts.flatmap(escaped)


def nested(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    spaced = st.tuples(blanks, inner, blanks).map("".join)
    member = st.tuples(blanks, texts.flatmap(escaped), blanks, st.just(":"), spaced).map("".join)
    return st.lists(spaced, max_size=4).map(lambda items: f"[{','.join(items) or ' '}]") | st.lists(
        member, max_size=4
    ).map(lambda items: f"{{{','.join(items)}}}")


values = st.recursive(scalars, nested, max_leaves=8)
names = (texts | st.sampled_from([*NAMES, "stream", "models"])).flatmap(escaped)


@st.composite
def documents(draw: st.DrawFn) -> bytes:
    members = draw(st.lists(st.tuples(blanks, names, blanks, blanks, values, blanks), max_size=6))
    inside = ",".join(f"{a}{name}{b}:{c}{value}{d}" for a, name, b, c, value, d in members)
    return f"{draw(blanks)}{{{inside or draw(blanks)}}}{draw(blanks)}".encode()


def walked(body: bytes, step: int) -> JsonWalk:
    walk = JsonWalk(body, NAMES)
    while not walk.advance(step):
        pass
    return walk


def pairs_of(body: bytes) -> list[tuple[str, Any]]:
    decoder = json.JSONDecoder(object_pairs_hook=tuple)
    return list(decoder.decode(body.decode()))


def counted(value: Any) -> tuple[int, int]:
    """Strings and containers in what pairs_of() makes of a value; objects are tuples of pairs."""
    if isinstance(value, str):
        return 1, 0
    if isinstance(value, tuple):
        parts = [counted(item) for pair in value for item in pair]
    elif isinstance(value, list):
        parts = [counted(item) for item in value]
    else:
        return 0, 0
    return sum(strings for strings, _ in parts), 1 + sum(containers for _, containers in parts)


@given(documents(), st.integers(1, 40))
@example(b'{"model":"a\\\\","cache_salt":"\\""}', 11)
@example(b'{"m\\u006fdel":1,"model":[{"model":2}],"model":{}}', 3)
def test_all_top_level_members_of_a_name_are_found(body: bytes, step: int) -> None:
    walk = walked(body, step)

    pairs = pairs_of(body)
    for name in NAMES:
        found = walk.members.get(name, [])
        expected = [value for key, value in pairs if key == name]
        assert [json.JSONDecoder(object_pairs_hook=tuple).decode(body[m.start : m.end].decode()) for m in found] == (
            expected
        )
        assert [(m.strings, m.containers) for m in found] == [counted(value) for value in expected]
    assert (walk.strings, walk.containers) == counted(tuple(pairs))
    assert walk.text_bytes <= len(body)


@given(documents(), st.integers(1, 40))
def test_steps_change_nothing(body: bytes, step: int) -> None:
    whole, stepped = walked(body, len(body)), walked(body, step)

    assert whole.members == stepped.members
    assert (whole.strings, whole.containers, whole.text_bytes) == (
        stepped.strings,
        stepped.containers,
        stepped.text_bytes,
    )


@given(documents(), st.text(max_size=9))
def test_edits_touch_nothing_else(body: bytes, value: str) -> None:
    walk = walked(body, 7)
    members = walk.members.get("model")
    done = edited(
        body,
        replacements(body, members, value)
        if members
        else [insertion(Opening(walk.inside, walk.empty), "model", value)],
    )

    others = [(key, value) for key, value in pairs_of(body) if key != "model"]
    assert [(key, value) for key, value in pairs_of(done) if key != "model"] == others
    assert {value for key, value in pairs_of(done) if key == "model"} == {
        pairs_of(json.dumps({"m": value}).encode())[0][1]
    }
    if not members:
        assert done == insert_member(body, "model", value)
    if members:
        assert done == replace_text(body, "model", value)
        assert len(done) - len(body) == sum(
            len(json.dumps(value, ensure_ascii=False).encode()) - (m.end - m.start) for m in members
        )


torn = st.tuples(documents(), st.integers(0, 60), st.binary(max_size=3), st.integers(0, 3)).map(
    lambda parts: parts[0][: parts[1]] + parts[2] + parts[0][parts[1] + parts[3] :]
)


@given(torn | st.binary(max_size=30), st.integers(1, 20))
@example('{"a":1}'.encode("utf-16"), 5)
@example('{"a":1}'.encode("utf-16-le"), 5)
@example('{"a":1}'.encode("utf-8-sig"), 5)
@example(b'{"a":"\\', 3)
@example(b'{"a":1}{}', 3)
def test_what_a_parser_takes_is_never_refused_and_other_encodings_never_pass(body: bytes, step: int) -> None:
    try:
        walk: JsonWalk | None = walked(body, step)
    except NotAnObject as error:
        assert str(error)
        walk = None
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return
    if not isinstance(document, dict) or b"\x00" in body or body.startswith(b"\xef\xbb\xbf"):
        assert walk is None
    else:
        assert walk is not None
        assert set(walk.members) == set(document) & set(NAMES)


@pytest.mark.parametrize(
    "body",
    [b"", b" ", b"[]", b'"a"', b"{", b'{"a"', b'{"a":', b'{"a":1', b'{"a":"b', b"{,}", b'{"a":,}', b'{"a" 1}', b"{}x"],
)
def test_what_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(NotAnObject):
        walked(body, 1000)


def test_what_repeats_a_wanted_name_too_often_is_refused() -> None:
    often = b'{"x":0' + b',"model":1' * REPEATS_MAX + b',"x":[]' * 3
    walked(often + b"}", 1000)
    with pytest.raises(ClientBadRequest, match="'model' more than 1024 times"):
        walked(often + b',"mod\\u0065l":2}', 1000)


def test_what_is_nested_too_deeply_is_refused() -> None:
    with pytest.raises(RecursionError):
        walked(b'{"a":' + b"[" * 1000 + b"]" * 1000 + b"}", 7)
    assert walked(b'{"a":' + b"[" * 999 + b"]" * 999 + b"}", 7).containers == 1000
