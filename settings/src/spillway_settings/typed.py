"""Reads the mapping of a file into frozen msgspec structs; an error names the setting, the value and the need.

Pure: no file is read here.
"""

from __future__ import annotations

import difflib
import re
import sys
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta
from msgspec import inspect as types

from spillway_settings.byte_sizes import ByteCount

Settings = TypeVar("Settings")

LARGEST = sys.float_info.max  # as an upper bound it refuses infinity; every comparison refuses NaN
Text = Annotated[str, Meta(min_length=1)]
Count = Annotated[int, Meta(ge=1)]
Port = Annotated[int, Meta(ge=1, le=65_535)]
Positive = Annotated[float, Meta(gt=0, le=LARGEST)]
NotNegative = Annotated[float, Meta(ge=0, le=LARGEST)]
Share = Annotated[float, Meta(gt=0, le=1)]
Portion = Annotated[float, Meta(ge=0, le=1)]  # a share, or none

_PATH = re.compile(r" - at (?:`key` in )?`\$((?:\.\w+|\[\d+\]|\[\.\.\.\])*)`$")
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]|\[\.\.\.\]")
_GIVEN_CHARACTERS_MAX = 60


class CamelSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Settings whose keys are camelCase in the file: `attemptsMax` is the field `attempts_max`."""


class WrongSetting(ValueError):
    """path: the setting's path as the document spells it, `limits.attemptsMax` or `models[0].name`; empty: all of it.
    problem: what was given and what is needed, or the remedy; a message reads `PATH: PROBLEM`."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}" if path else problem)
        self.path = path
        self.problem = problem


def read_settings(kind: type[Settings], document: object) -> Settings:
    """The document as a `kind`, a msgspec struct with bounds on its types and without unknown keys.

    A `ByteCount` is read as people write sizes. Raises WrongSetting.
    """
    try:
        return msgspec.convert(document, kind, dec_hook=_read_value)
    except msgspec.ValidationError as error:
        raise _explained(kind, document, str(error)) from error


def settings_json(settings: msgspec.Struct) -> bytes:
    """The settings as another process of the same version reads them, by settings_of_json()."""
    return msgspec.json.encode(settings, enc_hook=int)  # a ByteCount


def settings_of_json(kind: type[Settings], document: bytes) -> Settings:
    """Read the settings that settings_json() wrote."""
    return msgspec.json.decode(document, type=kind, dec_hook=_read_value)


def unknown_setting(path: str, key: object, known: list[str]) -> WrongSetting:
    """The refusal of a key that is no setting below `path`; it names the setting that may have been meant."""
    plain = {name.lower(): name for name in known}
    [near] = difflib.get_close_matches(str(key).lower().replace("_", ""), plain, n=1, cutoff=0.0) or [""]
    remedy = f"did you mean {plain[near]!r}? " if near else ""
    return WrongSetting(_joined(path, f".{key}"), f"unknown setting; {remedy}Known here: {', '.join(sorted(known))}")


def _read_value(kind: type[Any], value: Any) -> Any:
    """The types that msgspec does not know; a ValueError is the problem's text."""
    if kind is ByteCount:
        return ByteCount.read(value)
    raise NotImplementedError(kind)


def _explained(kind: type[Any], document: object, refusal: str) -> WrongSetting:
    found = _PATH.search(refusal)
    node, value, path = types.type_info(kind), document, ""
    for step in _STEP.finditer(found[1]) if found else ():
        node = _bare(_meant(node, value))
        if isinstance(node, types.StructType) and isinstance(value, dict):
            node, value = next(field.type for field in node.fields if field.encode_name == step[1]), value[step[1]]
            path = _joined(path, step[0])
        elif isinstance(node, types.VarTupleType) and isinstance(value, list):
            node, value = node.item_type, value[int(step[2])]
            path = _joined(path, step[0])
        elif isinstance(node, types.TupleType) and isinstance(value, list):
            node, value = node.item_types[int(step[2])], value[int(step[2])]
            path = _joined(path, step[0])
        elif isinstance(node, types.DictType) and isinstance(value, dict):
            key = next((key for key in value if not _accepted(node.value_type, value[key])), "")
            node, value = node.value_type, value.get(key)
            path = _joined(path, f".{key}")
    node = _meant(node, value)
    bare = _bare(node)
    wrong = _wrong_keys(bare, value, path) if isinstance(bare, types.StructType) and isinstance(value, dict) else None
    if wrong is not None:
        return wrong
    if isinstance(bare, types.CustomType | types.StructType) and not refusal.startswith("Expected "):
        # Messages of _read_value or __post_init__.
        return WrongSetting(path, refusal.removesuffix(found[0]) if found else refusal)
    return WrongSetting(path, f"{_given(value)} given, {_needed(node)} needed")


def _wrong_keys(node: types.StructType, given: dict[Any, Any], path: str) -> WrongSetting | None:
    known = [field.encode_name for field in node.fields]
    for key in given:
        if key not in known:
            return unknown_setting(path, key, known)
    for field in node.fields:
        if field.required and field.encode_name not in given:
            problem = f"missing; add it to {path or 'the configuration'}"
            return WrongSetting(_joined(path, f".{field.encode_name}"), problem)
    return None


def _bare(node: types.Type) -> types.Type:
    return node.type if isinstance(node, types.Metadata) else node


def _meant(node: types.Type, value: object) -> types.Type:
    """The member of a union that the value was meant for: text for text, else the first."""
    if not isinstance(node, types.UnionType):
        return node
    members = [member for member in node.types if not isinstance(member, types.NoneType)]
    is_text = isinstance(value, str)
    return next((one for one in members if isinstance(_bare(one), types.StrType) == is_text), members[0])


def _accepted(node: types.Type, value: object) -> bool:
    """Whether `value` may stand in a mapping of this type: a text or a number within the type's bounds."""
    if isinstance(node, types.StrType):
        return isinstance(value, str) and len(value) >= (node.min_length or 0)
    if isinstance(node, types.FloatType):
        return isinstance(value, int | float) and not isinstance(value, bool) and _in_bounds(node, value)
    return True


def _in_bounds(node: types.FloatType, value: float) -> bool:
    return (
        (node.gt is None or value > node.gt)
        and (node.ge is None or value >= node.ge)
        and (node.le is None or value <= node.le)
    )


def _needed(node: types.Type) -> str:
    """The type's description if it has one, else what its bounds say."""
    if isinstance(node, types.Metadata):
        return str((node.extra_json_schema or {}).get("description") or _needed(node.type))
    if isinstance(node, types.IntType | types.FloatType):
        return _number(node)
    if isinstance(node, types.LiteralType | types.EnumType):
        values = node.values if isinstance(node, types.LiteralType) else [one.value for one in node.cls]
        *first, last = map(str, values)
        return f"{', '.join(first)} or {last}" if first else last
    if isinstance(node, types.StrType):
        return "a non-empty string" if node.min_length else "a string"
    if isinstance(node, types.BoolType):
        return "true or false"
    if isinstance(node, types.TupleType):
        return f"a list of {len(node.item_types)} items"
    return "a list" if isinstance(node, types.VarTupleType) else "a mapping of settings"


def _number(node: types.IntType | types.FloatType) -> str:
    noun = "a whole number" if isinstance(node, types.IntType) else "a number"
    if node.le == LARGEST:
        noun, most = "a finite number", None
    else:
        most = node.le
    if node.gt is not None:
        return f"{noun} above {node.gt:g}" + ("" if most is None else f" and at most {most:.16g}")
    if node.ge is None:
        return noun
    return f"{noun} of at least {node.ge:g}" if most is None else f"{noun} from {node.ge:g} to {most:.16g}"


def _given(value: object) -> str:
    if value is None:
        return "nothing"
    text = repr(value)
    return text if len(text) <= _GIVEN_CHARACTERS_MAX else f"a {type(value).__name__}"


def _joined(path: str, step: str) -> str:
    return path + step if path else step.removeprefix(".")
