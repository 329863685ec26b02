"""Turns YAML text and `--set` overrides into frozen settings; only this module sees camelCase keys and raw values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from msgspec import inspect as types

from spillway_connector.native_keys import native_key_answer
from spillway_connector.setting_names import PLAIN_NAMES, SettingNames
from spillway_engine.chart_keys import chart_key
from spillway_engine.errors import SettingsError
from spillway_engine.setting_rules import check_settings
from spillway_engine.settings import EngineSettings
from spillway_settings import typed
from spillway_settings.typed import WrongSetting

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
    """The same from what the file holds. Messages use the names under `settingNames`."""
    names = read_settings(SettingNames, tree.get("settingNames"))
    for override in overrides:
        tree = _with_override(tree, override)
    return check_settings(read_settings(EngineSettings, tree, names))


def read_settings(kind: type[Settings], tree: object, names: SettingNames = PLAIN_NAMES) -> Settings:
    """A mapping with camelCase keys -> the frozen struct `kind`. Raises SettingsError."""
    try:
        return typed.read_settings(kind, _as_meant(types.type_info(kind), tree))
    except WrongSetting as wrong:
        name = names.name(wrong.path) if wrong.path else "the configuration"
        answer = _native_key(wrong.path, names) or wrong.problem
        raise SettingsError(f"{name}: {answer}") from wrong


def _native_key(path: str, names: SettingNames) -> str | None:
    """Return the replacement for the key at `path`, if it is a key of vLLM's own offload connectors; else None."""
    section, _, key = path.rpartition(".")
    return (
        native_key_answer(key, lambda field: names.name(f"offload.{chart_key(field)}"))
        if section == "offload"
        else None
    )


def _with_override(tree: Mapping[str, Any], override: str) -> dict[str, Any]:
    path, equals, text = override.partition("=")
    if not equals or not path:
        raise SettingsError(f"{override!r} has no key or no value; write key=value, e.g. offload.numCpuBlocks=64")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SettingsError(f"{override!r}: the value is not YAML, quote it: {error}") from error
    return _placed(tree, path.split("."), value, override)


def _placed(tree: Mapping[str, Any], path: list[str], value: Any, override: str) -> dict[str, Any]:
    key, *rest = path
    if not rest:
        return {**tree, key: value}
    below = tree.get(key) or {}
    if not isinstance(below, dict):
        raise SettingsError(f"{override!r}: {key} holds no further keys; set {key} itself")
    return {**tree, key: _placed(below, rest, value, override)}


def _as_meant(node: types.Type, value: Any) -> Any:
    """Undo the guesses of YAML if the type says otherwise: text may look like a number (`extraArgs: [--seed, 8]`), `on`
    and `off` are words, and a section whose keys are all commented out is empty and not null."""
    if isinstance(node, types.Metadata):
        return _as_meant(node.type, value)
    if isinstance(node, types.UnionType):
        return value if value is None else _as_meant(node.types[0], value)
    if isinstance(node, types.StructType):
        fields = {field.encode_name: field.type for field in node.fields}
        tree = {} if value is None else value
        if not isinstance(tree, Mapping):
            return tree
        return {key: _as_meant(fields[key], below) if key in fields else below for key, below in tree.items()}
    if isinstance(node, types.VarTupleType) and isinstance(value, list):
        return [_as_meant(node.item_type, item) for item in value]
    if isinstance(node, types.DictType) and isinstance(value, Mapping):
        return {str(key): _as_meant(node.value_type, item) for key, item in value.items()}
    if isinstance(node, types.StrType) and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if isinstance(node, types.LiteralType) and isinstance(value, bool):
        word = "on" if value else "off"
        return word if word in node.values else value
    return value
