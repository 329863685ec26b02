"""Settings under the chart's camelCase keys, those that the connector declares under its own keys included."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from msgspec import structs

Section = TypeVar("Section", bound=msgspec.Struct)

_CHART_KEYS = {"cpu_bytes_to_use": "cpuBytes"}  # vLLM gave the field its name


def camel_case(name: str) -> str:
    """`num_cpu_blocks` -> `numCpuBlocks`."""
    head, *tail = name.split("_")
    return head + "".join(part.capitalize() for part in tail)


def chart_key(field: str) -> str:
    """`cpu_bytes_to_use` -> `cpuBytes`: what a field of the connector is called in the chart."""
    return _CHART_KEYS.get(field, camel_case(field))


def camel_case_keys(section: type[Section]) -> type[Section]:
    """A class decorator: the same fields, inherited ones included, under camelCase keys; no other key is accepted.

    msgspec applies `rename` to the fields that a struct declares itself, so the result declares all of them again.
    """
    declared = [(field.name, field.type, _default(field)) for field in structs.fields(section)]
    return msgspec.defstruct(  # type: ignore[return-value]  # typed as Struct; it is a subclass of its bases
        section.__name__,
        declared,
        bases=(section,),
        module=section.__module__,
        rename=chart_key,
        frozen=True,
        forbid_unknown_fields=True,
    )


def _default(field: structs.FieldInfo) -> Any:
    if field.default is not msgspec.NODEFAULT:
        return msgspec.field(default=field.default)
    if field.default_factory is not msgspec.NODEFAULT:
        return msgspec.field(default_factory=field.default_factory)
    return msgspec.field()


def settings_tree(settings: msgspec.Struct) -> dict[str, Any]:
    """The inverse of `read_settings`: camelCase keys, plain values, fit for YAML and JSON."""
    tree: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(settings, enc_hook=int))
    return tree
