"""multipart/form-data of the audio routes: reads a few small fields and changes no other byte (RFC 7578).

The boundary is read from the body's first line, where every client puts it, so the content type is not parsed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from spillway_gateway.api.engine_fields import NAMES, EngineFields
from spillway_gateway.api.parsed_body import ParsedBody
from spillway_gateway.errors import ClientBadRequest
from spillway_gateway.tokens.prompt import CompletionPrompt
from spillway_gateway.upstream.forward import Body
from spillway_gateway.upstream.splice import Edit, MemberValue, edited

BOUNDARY_BYTES_MAX = 70  # RFC 2046
PARTS_MAX = 1024
PART_HEAD_BYTES_MAX = 16 * 1024
TEXT_FIELD_BYTES_MAX = 4096
SEARCH_BYTES = 1024 * 1024
# Parsers differ on names with escapes, without quotes or given twice, so an engine could see another field than this.
_DISPOSITION = re.compile(
    rb'(?:\A|\r\n)content-disposition:[ \t]*form-data;[ \t]*name="([^"\\\r\n]*)"'
    rb'(?:;[ \t]*filename="(?:[^"\\\r\n]|\\[^\r\n])*"|;[ \t]*filename\*=[^";\r\n]*)*[ \t]*(?=\r\n|\Z)',
    re.IGNORECASE,
)
_DISPOSITIONS = re.compile(rb"content-disposition", re.IGNORECASE)
_JSON_FIELDS = ("vllm_xargs", "sampling_params")


@dataclass(frozen=True, slots=True)
class Part:
    """A named field; its value is body[start:end]. begin: where its delimiter begins."""

    name: bytes
    start: int
    end: int
    begin: int


def parse_audio(body: Body) -> ParsedBody:
    """Parse a form. Raises ClientBadRequest if it is not a multipart body."""
    return audio_of(body, parts_of(body))


def audio_of(body: Body, parts: Iterable[Part]) -> ParsedBody:
    """Raises ClientBadRequest."""
    fields: dict[bytes, bytes] = {}
    steering: dict[str, Any] = {}
    for part in parts:
        field = part.name.decode("latin-1")
        if part.name in (b"model", b"stream"):
            fields[part.name] = bytes(body[part.start : min(part.end, part.start + TEXT_FIELD_BYTES_MAX)])
        elif field in NAMES:
            steering[field] = _field_value(field, bytes(body[part.start : part.end]))
    model = fields.get(b"model")
    stream = fields.get(b"stream", b"").strip().lower() in (b"true", b"1", b"yes", b"on", b"t", b"y")
    try:
        name = model.decode() if model else None
    except UnicodeDecodeError as error:
        raise ClientBadRequest("The form field 'model' is not UTF-8 text; send a model's name", "model") from error
    return ParsedBody(
        name,
        names_salt=False,
        stream=stream,
        prompt=CompletionPrompt(""),
        counts_prompt=False,
        counts_reply=False,
        reply_tokens_max=None,
        engine_fields=EngineFields(**steering),
    )


def _field_value(name: str, text: bytes) -> Any:
    """Return the field's value as vLLM reads it: a text, which is a JSON document if the field holds an object."""
    if len(text) > TEXT_FIELD_BYTES_MAX:
        raise ClientBadRequest(
            f"The form field {name!r} has {len(text)} bytes, at most {TEXT_FIELD_BYTES_MAX} needed; send less of it",
            name,
        )
    if name not in _JSON_FIELDS:
        return text.decode("latin-1")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ClientBadRequest(f"The form field {name!r} is not JSON; send an object", name) from error


def replace_field(body: Body, name: str, value: MemberValue) -> bytes:
    """The body with another value in every field `name`, or without it (None); all other bytes unchanged."""
    return edited(body, field_edits(parts_of(body), name, value))


def field_edits(parts: Iterable[Part], name: str, value: MemberValue) -> list[Edit]:
    named = [part for part in parts if part.name == name.encode()]
    if value is None:
        return [Edit(part.begin, part.end + len(b"\r\n"), b"") for part in named]
    text = value.encode() if isinstance(value, str) else msgspec.json.encode(value)
    return [Edit(part.start, part.end, text) for part in named]


def parts_of(body: Body) -> list[Part]:
    """The named fields in their order. Raises ClientBadRequest."""
    return [part for part in parts_in_steps(body) if part is not None]


def parts_in_steps(body: Body) -> Iterator[Part | None]:
    """Yield the same in steps of at most SEARCH_BYTES; None for a step that found no part. Raises ClientBadRequest."""
    first_line = body[: BOUNDARY_BYTES_MAX + 4].partition(b"\r\n")[0]
    if not first_line.startswith(b"--") or len(first_line) < 3 or len(first_line) > BOUNDARY_BYTES_MAX + 2:
        raise _bad("does not begin with a boundary")
    delimiter = b"\r\n" + first_line
    count = 0
    at = len(first_line)  # after a delimiter
    while not body.startswith(b"--", at):
        head_start = at + 2
        head_end = body.find(b"\r\n\r\n", at, head_start + PART_HEAD_BYTES_MAX)
        if not body.startswith(b"\r\n", at) or head_end < 0:
            raise _bad("has a part without headers")
        start = head_end + 4
        searched = start
        while (end := body.find(delimiter, searched, searched + SEARCH_BYTES)) < 0:
            if searched + SEARCH_BYTES >= len(body):
                raise _bad("ends inside a part")
            searched += SEARCH_BYTES - len(delimiter) + 1  # it may lie across the step's end
            yield None
        if count == PARTS_MAX:
            raise _bad(f"has more than {PARTS_MAX} parts")
        count += 1
        yield Part(_name_of(bytes(body[head_start:head_end])), start, end, at - len(first_line))
        at = end + len(delimiter)


def _name_of(head: bytes) -> bytes:
    """Return the part's name. Raises ClientBadRequest for a head that two parsers may read differently."""
    found = _DISPOSITION.search(head)
    if found is None or len(_DISPOSITIONS.findall(head)) != 1:
        raise _bad('has a part whose content-disposition is not: form-data; name="NAME"; filename="FILE"')
    return found[1]


def _bad(what: str) -> ClientBadRequest:
    return ClientBadRequest(f"The request body {what}; send multipart/form-data", code="invalid_multipart")
