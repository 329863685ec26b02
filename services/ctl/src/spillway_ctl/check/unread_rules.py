"""Settings that nothing reads as the other ones are: facts/unread-settings.yaml names them. Pure."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import structs

from spillway_ctl.check.chart_facts import facts
from spillway_ctl.check.finding import Finding, number, shown
from spillway_ctl.check.group import Release
from spillway_settings.values.release import Values

_ABSENT = object()


def unread_findings(release: Release) -> Iterator[Finding]:
    groups = {group.key: msgspec.to_builtins(group.engine) for group in release.groups}
    seen: set[str] = set()
    for rule, settings in _rules():
        for setting, default in settings.items():
            for finding in _of_setting(release, groups, rule, setting, default):
                if finding.setting not in seen:
                    seen.add(finding.setting)
                    yield finding


@functools.cache  # the model's defaults are read from its annotations, which takes 0.2 s
def _rules() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each rule with the settings that its entries stand for, and their defaults."""
    return [(rule, settings_of(rule)) for rule in facts("unread-settings.yaml")]


def settings_of(rule: dict[str, Any]) -> dict[str, Any]:
    """Setting -> its default: what the entries of the rule stand for."""
    found: dict[str, Any] = {}
    for entry in rule["settings"]:
        section, are_direct = entry.removesuffix(".*"), entry.endswith(".*")
        found |= dict(_defaults(_default(section), section, are_direct))
    return {setting: default for setting, default in found.items() if setting != rule["readBy"]}


def _default(path: str) -> Any:
    here: Any = Values()
    for key in path.split("."):
        here = next(getattr(here, field.name) for field in structs.fields(here) if field.encode_name == key)
    return here


def _defaults(default: Any, path: str, are_direct: bool) -> Iterator[tuple[str, Any]]:
    if not isinstance(default, msgspec.Struct):
        yield path, msgspec.to_builtins(default)
        return
    for field in structs.fields(default):
        value = getattr(default, field.name)
        if not (are_direct and isinstance(value, msgspec.Struct)):
            yield from _defaults(value, f"{path}.{field.encode_name}", are_direct)


def _of_setting(
    release: Release, groups: dict[str, Any], rule: dict[str, Any], setting: str, default: Any
) -> Iterator[Finding]:
    reader = rule["readBy"]
    if not setting.startswith("engine."):
        given, choice = _at(release.tree, setting), _at(release.tree, reader)
        if _is_given(given, default) and not _is_chosen(rule, choice):
            yield _unread(setting, reader, rule, given, choice)
        return
    own, by = setting.removeprefix("engine."), reader.removeprefix("engine.")
    is_read_anywhere = False
    for key, engine in groups.items():
        choice = _at(engine, by)
        other = rule.get("orReadBy", reader).removeprefix("engine.")
        if _is_chosen(rule, choice) or _is_chosen(rule, _at(engine, other)):
            is_read_anywhere = True
        elif key:
            # A setting that an entry inherits from `engine` may be there for the other entries.
            given = _at(release.tree["engines"][key] or {}, own)
            if _is_given(given, default):
                yield _unread(f"engines.{key}.{own}", f"engines.{key}.{by}", rule, given, choice)
    given = _at(release.tree["engine"], own)
    if not is_read_anywhere and _is_given(given, default):
        yield _unread(setting, reader, rule, given, _at(release.tree["engine"], by))


def _at(tree: Any, path: str) -> Any:
    for key in path.split("."):
        if not isinstance(tree, dict) or key not in tree:
            return _ABSENT
        tree = tree[key]
    return tree


def _is_given(given: Any, default: Any) -> bool:
    return given is not _ABSENT and given is not None and given != default


def _is_chosen(rule: dict[str, Any], choice: Any) -> bool:
    if "values" not in rule:
        return choice is not _ABSENT and choice not in (None, "")
    return any(choice == value and isinstance(choice, bool) == isinstance(value, bool) for value in rule["values"])


def _unread(path: str, by: str, rule: dict[str, Any], given: Any, choice: Any) -> Finding:
    chosen = "empty" if choice in ("", _ABSENT) else number(choice)
    words = " or ".join(number(value) for value in rule.get("values", ()))
    if words:
        return Finding(
            path,
            f"{shown(given, path)} given, but it is read with {by}: {words} alone, which is {chosen}",
            "set that, or remove this",
        )
    return Finding(
        path,
        f"{shown(given, path)} given, but it is read with {by} alone, which is {chosen}",
        "give that, or remove this",
    )
