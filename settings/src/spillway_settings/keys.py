"""The same settings under other keys: what the chart calls `numCpuBlocks` is `num_cpu_blocks` in the connector."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from msgspec import structs

Section = TypeVar("Section", bound=msgspec.Struct)


def keyed(section: type[Section], key: Callable[[str], str]) -> type[Section]:
    """The section with all of its fields, inherited ones included, under `key` of their names; no other key is taken.

    msgspec applies `rename` to the fields that a struct declares itself, so the result declares all of them again.
    """
    declared = [(field.name, field.type, _default(field)) for field in structs.fields(section)]
    return msgspec.defstruct(  # type: ignore[return-value]  # typed as Struct; it is a subclass of its bases
        section.__name__,
        declared,
        bases=(section,),
        module=section.__module__,
        namespace={"__doc__": section.__doc__},
        rename=key,
        frozen=True,
        forbid_unknown_fields=True,
    )


def own_keys(section: type[Section]) -> type[Section]:
    """A class decorator: the fields of the section under their own names."""
    return keyed(section, str)


def _default(field: structs.FieldInfo) -> Any:
    if field.default is not msgspec.NODEFAULT:
        return msgspec.field(default=field.default)
    if field.default_factory is not msgspec.NODEFAULT:
        return msgspec.field(default_factory=field.default_factory)
    return msgspec.field()
