"""Every size among the values, read before anything is computed from them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args

import msgspec

from spillway_ctl.check.chart_facts import fields_of
from spillway_ctl.check.finding import Finding, quoted
from spillway_settings.byte_sizes import parse_byte_count
from spillway_settings.values.engine import Engine
from spillway_settings.values.kinds import Size
from spillway_settings.values.release import Values

_EXAMPLE = "write for example 512MiB, 64Gi, 1TB or a number of bytes"
_MOST_BYTES = 8 << 50
_LEAST = {
    "engine.memory.pageCache": "0",
    "engine.memory.processPerRank": "512MiB",  # less holds no Python with torch; a bare 8 is eight bytes
    # Valkey takes a bound of 0 bytes for no bound at all, and the server fits into the quarter that is not for blocks.
    "redis.memory": "64MiB",
    # With fewer no request fits, or no prefix is remembered; a bare 64 is 64 bytes.
    **{
        f"gateway.{key}": "1KiB"
        for key in (
            "limits.bodyBytesMax",
            "limits.bodiesBytesMax",
            "limits.plainReplyBufferBytes",
            "limits.repliesBytesMax",
            "connections.headBytesMax",
            "connections.targetBytesMax",
            "index.bytesMax",
            "continuation.bytesMax",
        )
    },
}


def size_findings(values: Values, groups: Mapping[str, Engine]) -> Iterator[Finding]:
    for key, engine in groups.items():
        path = f"engines.{key}" if key else "engine"
        for setting, size in _sizes(engine):
            yield from _judged(f"{path}.{setting}", size, _LEAST.get(f"engine.{setting}", "1"))
    for path, section in (("gateway", values.gateway), ("redis", values.redis)):
        for setting, size in _sizes(section):
            yield from _judged(f"{path}.{setting}", size, _LEAST.get(f"{path}.{setting}", "1"))


def _sizes(section: msgspec.Struct) -> Iterator[tuple[str, Any]]:
    """(path within the section, value) of every setting whose type is a size."""
    for field in fields_of(type(section)):
        value = getattr(section, field.name)
        if isinstance(value, msgspec.Struct):
            for path, size in _sizes(value):
                yield f"{field.encode_name}.{path}", size
        elif Size in (field.type, *get_args(field.type)):
            yield field.encode_name, value


def _judged(path: str, value: Any, least: str) -> Iterator[Finding]:
    if value is None:
        return
    try:
        size_bytes = parse_byte_count(value)
    except ValueError as error:
        why = str(error).removeprefix(f"{value!r} ").split("; ")[0]
        yield Finding(path, f"{quoted(value)} {why}", _EXAMPLE)
        return
    if size_bytes < parse_byte_count(least):
        yield Finding(path, f"{quoted(value)} given, at least {'1 byte' if least == '1' else least} needed", _EXAMPLE)
    elif size_bytes > _MOST_BYTES:
        yield Finding(path, f"{quoted(value)} given, at most 8PiB needed", _EXAMPLE)
