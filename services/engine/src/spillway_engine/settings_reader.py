"""From YAML text and `--set` overrides to frozen settings; the only place that sees camelCase keys and raw values."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from spillway_engine.byte_sizes import ByteCount, parse_byte_count
from spillway_engine.door import FILE, Door
from spillway_engine.errors import SettingsError
from spillway_engine.settings import EngineSettings, check_settings

Settings = TypeVar("Settings")


def load_engine_settings(config_path: Path | None, overrides: Iterable[str] = ()) -> EngineSettings:
    """Read a YAML file (None: start from nothing) and apply `key.path=value` overrides in order.

    Raises SettingsError: unreadable file, unknown key (named with its nearest known one), wrong type, contradiction.
    """
    tree: dict[str, Any] = {}
    if config_path is not None:
        try:
            loaded = yaml.safe_load(config_path.read_text())
        except OSError as error:
            raise SettingsError(f"--config {config_path}: {error.strerror}; give a readable YAML file") from error
        except yaml.YAMLError as error:
            raise SettingsError(f"--config {config_path} is not YAML: {error}") from error
        if not isinstance(loaded, dict):
            raise SettingsError(
                f"--config {config_path} holds no mapping; its keys are those under `engine:` in the chart"
            )
        tree = loaded
    return engine_settings(tree, overrides)


def engine_settings(tree: Mapping[str, Any], overrides: Iterable[str] = ()) -> EngineSettings:
    """The same from what the file holds. Messages name settings as the tree's `door` calls them."""
    door = read_settings(Door, tree.get("door") or {})
    for override in overrides:
        tree = _with_override(tree, override)
    return check_settings(read_settings(EngineSettings, tree, door))


def read_settings(kind: type[Settings], tree: Mapping[str, Any], door: Door = FILE) -> Settings:
    """A mapping with camelCase keys -> the frozen dataclass `kind`, recursively. Raises SettingsError."""
    try:
        return typing.cast(Settings, _read_dataclass(kind, tree, at=""))
    except _Misread as misread:
        name = door.name(misread.path) if misread.path else "the configuration"
        raise SettingsError(f"{name}{misread.problem}") from misread


class _Misread(Exception):
    """What is wrong with the value at `path`; the door gives the path its name."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(path, problem)
        self.path = path
        self.problem = problem


def settings_tree(settings: Any) -> dict[str, Any]:
    """The inverse of `read_settings`: camelCase keys, plain values, fit for YAML and JSON."""
    return {camel_case(field.name): _plain(getattr(settings, field.name)) for field in dataclasses.fields(settings)}


def camel_case(name: str) -> str:
    """`num_cpu_blocks` -> `numCpuBlocks`."""
    head, *tail = name.split("_")
    return head + "".join(part.capitalize() for part in tail)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return settings_tree(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return dict(value) if isinstance(value, dict) else value


def _with_override(tree: Mapping[str, Any], override: str) -> dict[str, Any]:
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise SettingsError(f"{override!r} has no key or no value; write key=value, e.g. offload.numCpuBlocks=64")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SettingsError(f"{override!r}: the value is not YAML: {error}") from error
    return _placed(tree, path.split("."), value, override)


def _placed(tree: Mapping[str, Any], path: list[str], value: Any, override: str) -> dict[str, Any]:
    key, *rest = path
    if not rest:
        return {**tree, key: value}
    below = tree.get(key) or {}
    if not isinstance(below, dict):
        raise SettingsError(f"{override!r}: {key} holds no further keys")
    return {**tree, key: _placed(below, rest, value, override)}


def _read_dataclass(kind: type[Any], tree: Any, at: str) -> Any:
    if not isinstance(tree, Mapping):
        raise _Misread(at, f": {tree!r} is not a mapping; it takes the keys {', '.join(_keys(kind))}")
    hints = typing.get_type_hints(kind)
    fields = {camel_case(field.name): field for field in dataclasses.fields(kind)}
    values: dict[str, Any] = {}
    for key, given in tree.items():
        path = f"{at}.{key}" if at else str(key)
        if key not in fields:
            raise _Misread(path, _unknown_key(str(key), list(fields)))
        values[fields[key].name] = _read_value(hints[fields[key].name], given, path)
    for key, field in fields.items():
        missing = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if missing and field.name not in values:
            path = f"{at}.{key}" if at else key
            raise _Misread(path, f" is not set and has no default; add it to the file or as --set {path}=...")
    return kind(**values)


def _unknown_key(key: str, known: list[str]) -> str:
    lowered = {name.lower(): name for name in known}
    near = difflib.get_close_matches(key.lower().replace("_", ""), lowered, n=1, cutoff=0.5)
    remedy = f"did you mean {lowered[near[0]]}?" if near else f"known here: {', '.join(sorted(known))}"
    return f" is no setting; {remedy}"


def _keys(kind: type[Any]) -> list[str]:
    return [camel_case(field.name) for field in dataclasses.fields(kind)]


def _read_value(hint: Any, given: Any, path: str) -> Any:
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        options = [option for option in typing.get_args(hint) if option is not type(None)]
        if given is None:
            return None
        return _read_value(options[0], given, path)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _read_dataclass(hint, {} if given is None else given, path)
    if hint is ByteCount:
        try:
            return parse_byte_count(given)
        except (TypeError, ValueError) as error:
            raise _Misread(path, f": {error}") from error
    if origin is typing.Literal:
        choices = typing.get_args(hint)
        # YAML reads a bare `off` as false.
        if given is False and "off" in choices:
            return "off"
        if given not in choices:
            raise _Misread(path, f": {given!r} is none of {', '.join(map(str, choices))}")
        return given
    if origin is tuple:
        if not isinstance(given, list):
            raise _Misread(path, f": {given!r} is not a list")
        item = typing.get_args(hint)[0]
        return tuple(_read_value(item, value, f"{path}[{index}]") for index, value in enumerate(given))
    if origin is dict:
        if not isinstance(given, Mapping):
            raise _Misread(path, f": {given!r} is not a mapping")
        value_hint = typing.get_args(hint)[1]
        return {str(key): _read_value(value_hint, value, f"{path}.{key}") for key, value in given.items()}
    return given if hint is Any else _read_scalar(hint, given, path)


def _read_scalar(hint: type[Any], given: Any, path: str) -> Any:
    if hint is float and isinstance(given, int) and not isinstance(given, bool):
        return float(given)
    if hint is str and isinstance(given, int | float) and not isinstance(given, bool):
        return str(given)
    if not isinstance(given, hint) or (hint is int and isinstance(given, bool)):
        wanted = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[hint]
        raise _Misread(path, f": {given!r} is not {wanted}")
    return given
