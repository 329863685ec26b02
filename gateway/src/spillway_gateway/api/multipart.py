"""multipart/form-data of the audio routes: reads two small fields and leaves every other byte alone (RFC 7578).

The boundary is taken from the body's first line, where every client puts it, so the content type need not be parsed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from spillway_gateway.api.parsed_body import ParsedBody
from spillway_gateway.errors import ClientBadRequest
from spillway_gateway.tokens.prompt import CompletionPrompt
from spillway_gateway.upstream.forward import Body

BOUNDARY_BYTES_MAX = 70  # RFC 2046
PARTS_MAX = 1024
PART_HEAD_BYTES_MAX = 16 * 1024
TEXT_FIELD_BYTES_MAX = 4096
_NAME = re.compile(rb'[;\s]name="([^"]*)"', re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Part:
    """A named field; its value is body[start:end]."""

    name: bytes
    start: int
    end: int


def parse_audio(body: Body) -> ParsedBody:
    """Raises ClientBadRequest for what is no multipart body."""
    fields: dict[bytes, bytes] = {}
    for part in parts_of(body):
        if part.name in (b"model", b"stream"):
            fields[part.name] = bytes(body[part.start : min(part.end, part.start + TEXT_FIELD_BYTES_MAX)])
    model = fields.get(b"model")
    stream = fields.get(b"stream", b"").strip().lower() in (b"true", b"1", b"yes", b"on", b"t", b"y")
    try:
        name = model.decode() if model else None
    except UnicodeDecodeError as error:
        raise ClientBadRequest("The form field 'model' is not UTF-8 text", "model") from error
    return ParsedBody(
        name, names_salt=False, stream=stream, prompt=CompletionPrompt(""), counts_prompt=False, counts_reply=False
    )


def replace_field(body: Body, name: str, value: str) -> bytes:
    """The body with another value in every field `name`; all other bytes as they were."""
    pieces: list[Body] = []
    copied = 0
    for part in parts_of(body):
        if part.name == name.encode():
            pieces += [body[copied : part.start], value.encode()]
            copied = part.end
    return b"".join([*pieces, body[copied:]])


def parts_of(body: Body) -> list[Part]:
    """The named fields in their order. Raises ClientBadRequest."""
    first_line = body[: BOUNDARY_BYTES_MAX + 4].partition(b"\r\n")[0]
    if not first_line.startswith(b"--") or len(first_line) < 3 or len(first_line) > BOUNDARY_BYTES_MAX + 2:
        raise _bad("does not begin with a boundary")
    delimiter = b"\r\n" + first_line
    parts: list[Part] = []
    at = len(first_line)  # behind a delimiter
    while not body.startswith(b"--", at):
        head_start = at + 2
        head_end = body.find(b"\r\n\r\n", at, head_start + PART_HEAD_BYTES_MAX)
        if not body.startswith(b"\r\n", at) or head_end < 0:
            raise _bad("has a part without headers")
        start = head_end + 4
        end = body.find(delimiter, start)
        if end < 0:
            raise _bad("ends inside a part")
        if len(parts) == PARTS_MAX:
            raise _bad(f"has more than {PARTS_MAX} parts")
        name = _NAME.search(body, head_start, head_end)
        if name is not None:
            parts.append(Part(name.group(1), start, end))
        at = end + len(delimiter)
    return parts


def _bad(what: str) -> ClientBadRequest:
    return ClientBadRequest(f"The request body {what}; send multipart/form-data", code="invalid_multipart")
