from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spillway_gateway.api.multipart import PARTS_MAX, parse_audio, parts_of, replace_field
from spillway_gateway.errors import ClientBadRequest

BOUNDARY = b"--b0undary"


def form(fields: list[tuple[str, bytes]]) -> bytes:
    parts = [
        BOUNDARY + b'\r\nContent-Disposition: form-data; name="' + name.encode() + b'"\r\n\r\n' + value + b"\r\n"
        for name, value in fields
    ]
    return b"".join(parts) + BOUNDARY + b"--\r\n"


names = st.sampled_from(["model", "stream", "file", "prompt"])
values = st.binary(max_size=40).filter(lambda value: BOUNDARY not in b"\r\n" + value)


@given(st.lists(st.tuples(names, values), min_size=1, max_size=6), st.text(max_size=10))
def test_fields_are_found_and_replaced_and_nothing_else_changes(fields: list[tuple[str, bytes]], value: str) -> None:
    body = form(fields)
    found = [(part.name.decode(), body[part.start : part.end]) for part in parts_of(body)]
    assert found == fields
    changed = [(name, value.encode() if name == "model" else old) for name, old in fields]
    assert replace_field(body, "model", value) == form(changed)


@given(st.binary(max_size=200), st.integers(0, 200))
def test_any_bytes_are_parsed_or_refused(noise: bytes, cut: int) -> None:
    whole = form([("model", b"m"), ("file", b"RIFF")])
    for body in (noise, BOUNDARY + noise, BOUNDARY + b"\r\n" + noise, whole[:cut], whole[:cut] + noise):
        try:
            parse_audio(body)
        except ClientBadRequest as error:
            assert error.message


def test_model_and_stream() -> None:
    parsed = parse_audio(form([("model", b"whisper"), ("stream", b"True"), ("file", b"model")]))
    assert (parsed.model, parsed.stream) == ("whisper", True)
    parsed = parse_audio(form([("file", b'name="model"')]))
    assert (parsed.model, parsed.stream) == (None, False)


def test_the_number_of_parts_is_bounded() -> None:
    with pytest.raises(ClientBadRequest, match="more than"):
        parts_of(form([("x", b"")] * (PARTS_MAX + 1)))
